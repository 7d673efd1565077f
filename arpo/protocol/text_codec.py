"""Text to tokens and back, with a given tokenizer: special tokens in data stay plain text, tags keep their tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

ESCAPE_MARK = "\U0010ffff"
"""Surrounds each special token in a message's text while the template renders it. This character is no valid text."""
ANCHORS = ("\n", "a", ".")
"""Texts to encode another text after. A tokenizer may merge the start of a text with some of them, not with all."""
CONTEXT_CHARS = 64
"""Number of characters before a text that decide its tokens. Not shorter than any special token."""


class TextCodec:
    """Encodes text and decodes tokens.

    Special tokens in data (a question, a tool result, an assistant message of SFT) are encoded as plain characters, so
    no data can end a turn. But some tokenizers declare a tag of the protocol as a special token. The model was trained
    on this token, so `encode` writes it and `decode` keeps it.
    """

    def __init__(self, tokenizer, tags: Iterable[str]):
        """tags: the protocol's tags, like "<think>" and "</think>"."""
        self.tokenizer = tokenizer
        tags = frozenset(tags)
        special = {
            token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        control = special.keys() - tags
        self._tag_ids = {text: token_id for text, token_id in special.items() if text in tags}
        self._tag = _any_of(self._tag_ids)
        self._control = _any_of(control)
        self._control_ids = frozenset(special[text] for text in control)
        # SentencePiece writes a blank before a text. This is right at the start of a text, and wrong within it.
        sentence, dot, word = (tokenizer.encode(text, add_special_tokens=False) for text in (".The", ".", "The"))
        takes_blanks = any(token.rstrip for token in tokenizer.added_tokens_decoder.values())
        self._marks_beginnings = takes_blanks or sentence != dot + word

    def encode(self, text: str, before: str = ANCHORS[0]) -> list[int]:
        """Encode data, without BOS. Special tokens in it become plain characters, except tags.

        before: the text (or its end) in front of this text. SentencePiece encodes the start of a text differently.
        """
        token_ids: list[int] = []
        position = 0
        for tag in self._tag.finditer(text):
            token_ids += self._encode_after(before, text[position : tag.start()], is_data=True)
            token_ids.append(self._tag_ids[tag[0]])
            position = tag.end()
            before = tag[0]
        return token_ids + self._encode_after(before, text[position:], is_data=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens other than tags."""
        visible = [token for token in token_ids if token not in self._control_ids]
        return self.tokenizer.decode(visible, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _encode_after(self, before: str, text: str, *, is_data: bool) -> list[int]:
        """Encode text as the tokenizer encodes it after `before`. Special tokens in data are plain characters."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False, split_special_tokens=is_data)
        if not (self._marks_beginnings and before and text):
            return encode(text)
        contexts = [(anchor, encode) for anchor in ANCHORS]
        if not (is_data and self._control.search(text)):
            # The real context comes first: it may end in a special token that takes the next blanks (Phi-3).
            encode_special = partial(self.tokenizer.encode, add_special_tokens=False)
            contexts.insert(0, (before.replace(ESCAPE_MARK, "")[-CONTEXT_CHARS:], encode_special))
        for context, encode_both in contexts:
            head = encode_both(context)
            both = encode_both(context + text)
            if both[: len(head)] == head:  # otherwise one token has characters of the context and of the text
                return both[len(head) :]
        return encode(text)

    # -- texts that a chat template renders

    def _mark_special(self, text: str) -> str:
        return self._control.sub(rf"{ESCAPE_MARK}\g<0>{ESCAPE_MARK}", text.replace(ESCAPE_MARK, ""))

    def _mark_special_in(self, value: Any) -> Any:
        """Return messages or schemas with `_mark_special` applied to all texts, at every depth."""
        if isinstance(value, str):
            return self._mark_special(value)
        if isinstance(value, list):
            return [self._mark_special_in(item) for item in value]
        if isinstance(value, dict):
            return {name: self._mark_special_in(item) for name, item in value.items()}
        return value

    def _encode_rendered(self, text: str, before: str = "") -> list[int]:
        """Encode a rendered text after `before`. Special tokens are the template's, except the marked ones."""
        token_ids: list[int] = []
        # The pieces alternate: text of the template, marked data, text of the template, ...
        for index, piece in enumerate(text.split(ESCAPE_MARK)):
            is_data = index % 2 == 1
            token_ids += self.encode(piece, before) if is_data else self._encode_after(before, piece, is_data=False)
            before += piece
        return token_ids


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of these texts, longest first. Without texts the pattern never matches."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
