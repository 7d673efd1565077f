"""The Hugging Face Hub: data sets by name, and downloads that are checked. (python -m arpo.hub)"""

from arpo.data.hub import check_hub_model, local_file, pin, source_of

__all__ = ["check_hub_model", "local_file", "pin", "source_of"]
