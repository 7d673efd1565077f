"""Which characters of a response each token adds."""

import random
from itertools import accumulate, pairwise

import pytest
from helpers.fakes import CHAT, byte_tokenizer
from helpers.families import FAMILIES, codec_of, family_tokenizer, opening_template
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from arpo.protocol import Codec, TagsCodec
from arpo.protocol.tags import render_result
from arpo.protocol.token_texts import BYTE_NAMES

TEXTS = ["plain words", " the answer is\n\n 42", "naïve café, 你好 and 😀😀!", "", "a\ufffdb", "\ufffd" * 9]


def chars(codec: Codec, token_ids: list[int], mask: list[int] | None = None) -> tuple[str, list[int]]:
    mask = mask or [1] * len(token_ids)
    segments = codec.segments(token_ids, mask)
    return "".join(text for text, _ in segments), codec.token_chars(token_ids, mask, segments)


def cut(text: str, counts: list[int]) -> list[str]:
    ends = [0, *accumulate(counts)]
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_texts_one_after_the_other_are_the_response(family, text):
    codec = codec_of(family)
    ids = [*codec.encode(text), codec.tokenizer.eos_token_id]
    decoded, counts = chars(codec, ids)
    assert decoded == text and len(counts) == len(ids) and sum(counts) == len(text)
    assert counts[-1] == 0  # the EOS is no text
    for token, piece in zip(ids[:-1], cut(text, counts), strict=False):
        alone = codec.decode([token])
        assert "\ufffd" in alone or alone == piece


def test_a_character_of_several_tokens_belongs_to_the_last_of_them():
    codec = TagsCodec(byte_tokenizer())
    assert chars(codec, codec.encode("a😀é")) == ("a😀é", [1, 0, 0, 0, 1, 0, 1])


@pytest.mark.parametrize("part", [1, 2, 3])
def test_what_is_no_whole_character_is_shown_as_the_decoder_shows_it(part):
    """A response that is cut within a character, or goes on with another one."""
    codec = TagsCodec(byte_tokenizer())
    broken = codec.encode("😀")[:part]
    for ids in (broken, broken + codec.encode("ab"), codec.encode("😀") + broken * 3):
        decoded, counts = chars(codec, ids)
        assert "\ufffd" in decoded and len(counts) == len(ids) and sum(counts) == len(decoded)


def test_results_are_counted_apart_and_an_opened_thought_belongs_to_no_token():
    codec = TagsCodec(family_tokenizer("qwen2_5", chat_template=opening_template()))
    call, result = codec.encode("so</think><search> é </search>"), codec.encode(render_result("é"))
    mask = [1] * len(call) + [0] * len(result) + [1] * len(call)
    decoded, counts = chars(codec, [*call, *result, *call], mask)
    assert decoded.startswith("<think>\nso") and len(decoded) - sum(counts) == len("<think>\n")


def sentence_tokenizer(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    vocab = {piece: i for i, piece in enumerate(["[UNK]", "▁a", "▁the", "b", "<0xC3>", "<0xA9>", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoder
    tokenizer.add_special_tokens(["</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = CHAT.replace("<|im_end|>", "</s>")
    return fast


def test_the_decoders_of_sentencepiece_are_followed():
    """They drop the first space, and make characters of bytes."""
    codec = TagsCodec(sentence_tokenizer(decoders.Metaspace()))
    assert chars(codec, [3, 2, 1, 2]) == ("b the a the", [1, 4, 2, 4])
    assert chars(codec, [2, 1]) == ("the a", [3, 2])
    codec = TagsCodec(sentence_tokenizer(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])))
    assert chars(codec, codec.tokenizer.convert_tokens_to_ids(["b", "<0xC3>", "<0xA9>", "b"])) == ("béb", [1, 0, 1, 1])


def test_bytes_have_the_names_that_a_byte_level_vocabulary_gives_them():
    assert {byte: name for name, byte in BYTE_NAMES.items()} == bytes_to_unicode()


def test_random_tokens_have_characters_too():
    codec = codec_of("qwen2_5")
    for seed in range(20):
        ids = random.Random(seed).choices(range(len(codec.tokenizer)), k=200)
        decoded, counts = chars(codec, ids)
        assert len(counts) == 200 and sum(counts) == len(decoded)


def test_no_counts_where_the_text_is_not_made_of_the_tokens_texts():
    class Reversed(TagsCodec):
        """A decoder that looks at all tokens at once."""

        def decode(self, token_ids) -> str:
            return super().decode(token_ids)[::-1]

    codec = Reversed(byte_tokenizer())
    assert chars(codec, codec.encode("abc")) == ("cba", [])
