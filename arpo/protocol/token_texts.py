"""The text added by each token to a decoded response, and the runs of a response."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

BROKEN = "\ufffd"
"""Decoders write this character for bytes that are not a full character."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""The name of a byte in a SentencePiece vocabulary."""
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_NAMES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}
"""The character that names each byte in a byte-level BPE vocabulary (as in GPT-2)."""


class TokenTexts:
    """The texts of a tokenizer's tokens. Each token is decoded once."""

    def __init__(self, tokenizer, decode: Callable[[Sequence[int]], str], anchor: list[int]):
        """anchor: tokens of any text without a space at the end."""
        self.tokenizer = tokenizer
        self.decode = decode
        self.anchor = anchor
        self._cache: dict[int, str] = {}

    def pieces(self, token_ids: list[int]) -> list[str]:
        """Return the text added by each token. The last token of a character with several tokens adds the character.

        The pieces add up to the text of all tokens if the decoder decodes token by token. All decoders in use do this,
        and the caller checks the sum.
        """
        pieces = [self.decode(token_ids[:1]), *map(self._piece, token_ids[1:])]
        if any(BROKEN in piece for piece in pieces):
            return self._join_bytes(pieces, token_ids)
        return pieces

    def _piece(self, token: int) -> str:
        """Return the text of a token after another token. Alone, a token may lose the leading space to the decoder."""
        if token not in self._cache:
            text = self.decode([*self.anchor, token])
            self._cache[token] = text.removeprefix(self.decode(self.anchor))
        return self._cache[token]

    def _join_bytes(self, pieces: list[str], token_ids: list[int]) -> list[str]:
        """Return the pieces. A character made from the bytes of several tokens is in the piece of the last token."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # replaces like the tokenizers' decoders
        broken = {token for piece, token in zip(pieces, token_ids, strict=True) if BROKEN in piece}
        bytes_of = {token: self._bytes(token) for token in broken}
        joined = []
        for piece, token in zip(pieces, token_ids, strict=True):
            joined.append(decoder.decode(bytes_of.get(token) or piece.encode()))
        joined[-1] += decoder.decode(b"", final=True)
        return joined

    def _bytes(self, token: int) -> bytes:
        """Return the bytes of a token with parts of characters."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        byte = BYTE_TOKEN.fullmatch(name)
        if byte:
            return bytes([int(byte[1], 16)])
        if BYTE_NAMES.keys() >= set(name):
            return bytes(BYTE_NAMES[char] for char in name)
        return name.encode()


def runs_of(
    token_ids: Sequence[int], loss_mask: Sequence[int], cuts: Sequence[int]
) -> Iterator[tuple[list[int], bool]]:
    """Yield (tokens, mask) of the runs with equal mask. A run also ends at each cut.

    [5, 6, 7], [1, 1, 1], [2] -> ([5, 6], True), ([7], True)
    """
    numbered = enumerate(zip(token_ids, loss_mask, strict=True))
    for (mask, _), run in groupby(numbered, key=lambda item: (bool(item[1][1]), bisect_right(cuts, item[0]))):
        yield [token for _, (token, _) in run], mask
