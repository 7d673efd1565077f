"""The demo's pretrained model, cut down to a few layers: it says nothing of sense before it is trained.

Its tokenizer, template, head of 49k tokens and embeddings are the real ones.
"""

from pathlib import Path

import pytest

from arpo.errors import UserError
from extras.llm_demo import model as llm


def build_pretrained_model(folder: Path, *, num_layers: int) -> Path:
    """Write it to `folder`, out of the wheel; where that is not installed, the test is skipped."""
    from transformers import AutoModelForCausalLM

    try:
        llm.save_from_wheel(folder, "not asked for")
    except UserError as error:
        pytest.skip(f"{error}")
    model = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=num_layers)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder
