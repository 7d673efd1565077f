"""SentencePiece's kind of tokenizers: a row is tokenised as the chat template as a whole, with no blank of its own."""

import pytest
from helpers.families import EOS, SCHEMAS
from helpers.models import CHAT_TEMPLATE
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from arpo.protocol import HermesCodec, TagsCodec
from arpo.trajectory import ToolCall

TEXTS = [
    "user assistant system print(1 + 2) the answer is 42, who wrote the book? The page <think> </think> result search"
] * 50 + ["\n"]
SPECIAL = ["<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
PHI3 = (  # Phi-3's form; its tokens take the blanks behind them
    "{% for m in messages %}{{ '<|user|>\n' if m.role == 'user' else '<|assistant|>\n' }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + "
    "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %} {% endif %}"
)
BARE = (  # the answer follows a special token
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KINDS = {  # report: what makes the blank
    "Metaspace first (transformers#31513)": lambda t: setattr(
        t, "pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "Metaspace always (tokenizers#1258)": lambda t: setattr(
        t, "pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    ),
    "Prepend of Llama-2 and Phi-3 (NeMo-RL#2844, transformers#26273)": lambda t: setattr(
        t, "normalizer", normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "none (Gemma's normalizer)": lambda t: setattr(t, "normalizer", normalizers.Replace(" ", "▁")),
}
TEMPLATES = {"ChatML": CHAT_TEMPLATE, "Phi-3": PHI3, "Llama-2": LLAMA2, "special token": BARE}
QUESTION = {"role": "user", "content": "who wrote the book?"}
ANSWERS = ["The answer is 42", "42, the answer", "\nThe page", " the book", "<think>ok</think>The page", "é is 42"]


def tokenizer_of(kind: str, template: str, *, tags: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    KINDS[kind](tokenizer)
    strip = decoders.Strip(" ", 1, 0)
    blanks = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse(), strip])
    special = [AddedToken(token, special=True, rstrip="Phi" in template and token != "<|im_end|>") for token in SPECIAL]
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(min_frequency=9, special_tokens=[*special, *alphabet], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    if tags:
        tokenizer.add_tokens([AddedToken(f"<{s}search>", normalized=False) for s in ("", "/")])
    template = TEMPLATES[template]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_sft_is_the_template_as_a_whole(kind, template):
    tokenizer = tokenizer_of(kind, template)
    codec = TagsCodec(tokenizer)
    for answer in ANSWERS:
        for messages in ([QUESTION], [QUESTION, {"role": "assistant", "content": "It is."}, QUESTION]):
            conversation = [*messages, {"role": "assistant", "content": answer}]
            if codec._trims and answer != answer.strip():
                continue
            whole = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
            row = codec.render_conversation(conversation)
            assert row.token_ids == list(whole), (answer, tokenizer.convert_ids_to_tokens(row.token_ids))
            assert codec.render_prompt(messages) == row.token_ids[: len(codec.render_prompt(messages))]


@pytest.mark.parametrize("tags", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_of_a_rollout_is_that_of_sft_and_of_the_whole_text(kind, tags):
    tokenizer = tokenizer_of(kind, "ChatML", tags=tags)
    codec = TagsCodec(tokenizer)
    call, rest = "<search> the book </search>", "<think>ok</think>The answer"
    _, result = codec.encode_result("42", 50, "search")
    told = {"role": "assistant", "content": f"{call} <result>\n42\n</result>{rest}"}
    row = codec.render_conversation([QUESTION, told])
    start = next(i for i in range(len(row.token_ids)) if row.token_ids[i : i + len(result)] == result)
    assert row.loss_mask[start - 1 : start + len(result) + 1] == [1, *[0] * len(result), 1]
    # Tokens of the whole may go over the border of a result; its text may not differ.
    whole = tokenizer.apply_chat_template([QUESTION, told], tokenize=True, return_dict=False)
    assert tokenizer.decode(row.token_ids) == tokenizer.decode(whole)
    if not tags or "first" in kind or "none" in kind:  # else the whole has a blank behind such a token
        sampled = [*codec.encode(call), *result, *codec.encode(rest)]
        assert codec.decode(sampled).strip() == told["content"]


@pytest.mark.parametrize("kind", KINDS)
def test_results_that_the_template_writes_follow_the_end_token_as_in_the_whole(kind):
    from helpers.families import TEMPLATES as FILES

    tokenizer = tokenizer_of(kind, "ChatML")
    tokenizer.chat_template = (FILES / "qwen2_5.jinja").read_text()
    codec = HermesCodec(tokenizer, tools=SCHEMAS)
    calls = [{"name": "search", "arguments": {"query": "the book"}}]
    messages = [
        QUESTION,
        {"role": "assistant", "content": "The page", "tool_calls": calls},
        {"role": "tool", "name": "search", "content": "42"},
        {"role": "assistant", "content": "The answer is 42"},
    ]
    row = codec.render_conversation(messages)
    asked = [
        {**m, "tool_calls": [{"type": "function", "function": c} for c in m.get("tool_calls", ())]} for m in messages
    ]
    functions = [schema.as_function() for schema in SCHEMAS]
    whole = tokenizer.apply_chat_template(asked, tools=functions, tokenize=True, return_dict=False)
    assert row.token_ids == list(whole)
    done = ToolCall("search", "the book", result="42", ok=True)
    _, result = codec.encode_results([done], 100, last_token=tokenizer.eos_token_id)
    assert any(row.token_ids[i : i + len(result)] == result for i in range(len(row.token_ids)))
    assert EOS["qwen2_5"] == tokenizer.eos_token
