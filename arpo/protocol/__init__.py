"""Text between model and tools: the forms of calls, schemas of tools, system prompts, and their tokens.

A form of calls is one file here and one line in `FORMS`, or a file of yours (`protocol.format FILE.py:NAME`, as
extras has one). It makes a `Form` (form.py), all that the project knows of it, of

    a codec     the tokens. Where the chat template writes calls and results, a `TemplateCodec` with three short methods
    rules       `FormatRules`: what is well-formed, and where the answer stands; the reward and the grader ask it
    parse_row   what an SFT file's calls become

Names and arguments are checked by `checked_call` (calls.py), so that errors, records and caches are the same in all
forms. A form whose arguments are no JSON turns them into the types of the tool's schema first.
"""

from arpo.config.named import find
from arpo.config.returned import instance
from arpo.protocol import hermes, tags, xml
from arpo.protocol.codec import Codec
from arpo.protocol.form import Form
from arpo.protocol.hermes import HermesCodec
from arpo.protocol.tags import TagsCodec
from arpo.protocol.xml import XmlCodec

__all__ = ["FORMS", "Codec", "Form", "HermesCodec", "TagsCodec", "XmlCodec", "form_of"]

FORMS: dict[str, Form] = {
    "tags": tags.FORM,
    "hermes": hermes.FORM,
    "xml": xml.FORM,
}


def form_of(name: str) -> Form:
    """Return the form of calls that protocol.format names. One of a user's file stands in FORMS from then on, so that
    records may name it: what a stranger's record says is looked up there, and never imported."""
    return FORMS.setdefault(name, instance(find("protocol.format", name, FORMS), f"protocol.format={name}", Form))
