"""Is a response with calls in XML well-formed?"""

from __future__ import annotations

from arpo.protocol.hermes.format import HermesRules
from arpo.protocol.xml.text import read_function


class XmlRules(HermesRules):
    """As `HermesRules`, but a block holds one whole function."""

    @staticmethod
    def name_of(body: str) -> str | None:
        function = read_function(body)
        return function and function[0]
