"""The text between model and tools: forms of calls, schemas of tools, system prompts, and the tokens of all these.

A form of calls is a file here with a line in `FORMS`, or a file of yours (`protocol.format FILE.py:NAME`; extras has an
example). The file makes a `Form` (form.py). The rest of the code knows only four parts of the form:

    codec       text to tokens and back. If the chat template writes calls and results: a `TemplateCodec` with three
                short methods
    rules       `FormatRules`: is a response well-formed, and where is its answer? Reward and grader use them
    parse_row   converts the calls of an SFT file
    template_lists_tools
                True if the chat template lists the tools, and False if our system prompt does

All forms check names and arguments with `checked_call` (calls.py), so errors, records and caches do not depend on the
form. A form without JSON first converts the arguments to the types of the tool's schema.
"""

from arpo.config.named import find
from arpo.config.returned import checked_instance
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
    """Return the form of calls with this name (protocol.format).

    A form from a user's file is added to FORMS, so that records may name it. The name in a record may come from a
    stranger: it is only looked up in FORMS, and never imported.
    """
    if name not in FORMS:
        FORMS[name] = checked_instance(find("protocol.format", name, FORMS), f"protocol.format={name}", Form)
    return FORMS[name]
