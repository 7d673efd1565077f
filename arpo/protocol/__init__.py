"""Text between model and tools: the forms of calls, schemas of tools, system prompts, and their tokens.

A form of calls is one folder here and one line in `FORMS`. The folder has

    text.py    what the model writes, read as calls: each with its tool, or with the error that the model reads
    codec.py   the tokens. Where the chat template writes calls and results, a `TemplateCodec` with three short methods
    format.py  `FormatRules`: what is well-formed, and where the answer stands; the reward and the grader ask it
    rows.py    what an SFT file's calls become

and its `__init__` puts them into a `Form` (form.py), all that the project knows of it. Names and arguments are checked
by `checked_call` (calls.py), so that errors, records and caches are the same in all forms. A form whose arguments are
no JSON turns them into the types of the tool's schema first. Help and errors take the names from `FORMS`.
"""

from arpo.protocol import hermes, llama, tags, xml
from arpo.protocol.codec import Codec
from arpo.protocol.form import Form
from arpo.protocol.hermes import HermesCodec
from arpo.protocol.llama import LlamaCodec
from arpo.protocol.tags import TagsCodec
from arpo.protocol.xml import XmlCodec

__all__ = ["FORMS", "Codec", "Form", "HermesCodec", "LlamaCodec", "TagsCodec", "XmlCodec"]

FORMS: dict[str, Form] = {
    "tags": tags.FORM,
    "hermes": hermes.FORM,
    "llama": llama.FORM,
    "xml": xml.FORM,
}
"""protocol.format -> the form."""
