"""Is a response with calls in XML well-formed?"""

from __future__ import annotations

from arpo.protocol.hermes.format import HermesRules
from arpo.protocol.xml.text import read_function


class XmlRules(HermesRules):
    """The rules of calls in JSON, with one whole function in a block in the place of an object."""

    @staticmethod
    def name_of(body: str) -> str | None:
        function = read_function(body)
        return function and function[0]
