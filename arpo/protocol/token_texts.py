"""The text that each token adds to a decoded response."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
"""The character that decoders write for bytes that are none."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""The name of a byte in a sentencepiece vocabulary."""
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_NAMES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}
"""The characters by which a byte-level BPE names bytes (GPT-2's)."""


class TokenTexts:
    """The texts of one tokenizer's tokens; each is decoded once."""

    def __init__(self, tokenizer, decode: Callable[[Sequence[int]], str], anchor: list[int]):
        """`anchor` are tokens of some text that does not end in a space."""
        self.tokenizer, self.decode, self.anchor = tokenizer, decode, anchor
        self._behind_text: dict[int, str] = {}

    def pieces(self, token_ids: list[int]) -> list[str]:
        """Return what each token adds to the text of all; the last token of a character adds it.

        The pieces are the text where the decoder decodes tokens one after the other, as all in use do; the caller
        compares.
        """
        pieces = [self.decode(token_ids[:1]), *map(self._piece, token_ids[1:])]
        return self._whole_characters(pieces, token_ids) if any(BROKEN in piece for piece in pieces) else pieces

    def _piece(self, token: int) -> str:
        """Return the text of one token behind another: alone, some decoders would strip its leading space."""
        if token not in self._behind_text:
            text = self.decode([*self.anchor, token])
            self._behind_text[token] = text.removeprefix(self.decode(self.anchor))
        return self._behind_text[token]

    def _whole_characters(self, pieces: list[str], token_ids: list[int]) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # replaces as the tokenizers' decoders do
        pairs = list(zip(pieces, token_ids, strict=True))
        bytes_of = {token: self._bytes(token) for token in {token for piece, token in pairs if BROKEN in piece}}
        whole = [decoder.decode(bytes_of.get(token) or piece.encode()) for piece, token in pairs]
        whole[-1] += decoder.decode(b"", final=True)
        return whole

    def _bytes(self, token: int) -> bytes:
        """Return the bytes of a token that has parts of characters."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        if fallback := BYTE_TOKEN.fullmatch(name):
            return bytes([int(fallback[1], 16)])
        return bytes(BYTE_NAMES[char] for char in name) if BYTE_NAMES.keys() >= set(name) else name.encode()
