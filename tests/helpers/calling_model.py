"""A tiny model that has learnt, in seconds, to call tools in JSON: well, twice in a turn, and wrongly."""

from pathlib import Path

import torch
from helpers.families import CHATML, LLAMA, TEMPLATES, words_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from arpo.protocol import HermesCodec, hermes
from arpo.protocol.calls import BAD_JSON
from arpo.tools import tool_class
from extras import llama

MAX_STEPS, LEARNT = 600, 0.05  # nats of its least likely token
TOOLS = ("python", "search")
ANSWER = "It is \\boxed{42}."


def call(code: str) -> dict:
    return {"name": "python", "arguments": {"code": code}}


WRONG = '<tool_call>\n{"name": "python", "arguments": {"code": print(6 * 7)}}\n</tool_call>'
ERROR = BAD_JSON.format(reason="Expecting value", call=hermes.A_CALL)
LLAMA_WRONG = '{"name": "python", "parameters": {"code": print(6 * 7)}}'
LLAMA_ERROR = BAD_JSON.format(reason="Expecting value", call=llama.A_CALL)
DIALOGUES = {
    "one call": [[call("print(6 * 7)")], ["42"]],
    "two calls": [[call("print(6 * 7)"), call("print(7 * 6)")], ["42", "42"]],
    "a wrong call": [WRONG, [ERROR], [call("print(6 * 7)")], ["42"]],
}
"""Question -> what is said and what is answered in turn, before the model answers."""
LLAMA_DIALOGUES = {
    "one call": DIALOGUES["one call"],
    "two calls": [[call("print(6 * 7)")], ["42"], [call("print(7 * 6)")], ["42"]],
    "a wrong call": [LLAMA_WRONG, [LLAMA_ERROR], [call("print(6 * 7)")], ["42"]],
}


def dialogues_of(family: str) -> dict[str, list]:
    return LLAMA_DIALOGUES if family == "llama3_1" else DIALOGUES


def conversation(question: str, family: str = "qwen3") -> list[dict]:
    messages = [{"role": "user", "content": question}]
    for turn in dialogues_of(family)[question]:
        if isinstance(turn, str):
            messages.append({"role": "assistant", "content": turn})
        elif isinstance(turn[0], dict):
            messages.append({"role": "assistant", "content": "", "tool_calls": turn})
        else:
            messages += [{"role": "tool", "name": "python", "content": text} for text in turn]
    return [*messages, {"role": "assistant", "content": ANSWER}]


def codec_for(tokenizer) -> HermesCodec:
    kind = llama.LlamaCodec if tokenizer.eos_token == "<|eot_id|>" else HermesCodec
    return kind(tokenizer, tools=[tool_class(name).schema for name in TOOLS])


def build_calling_model(folder: Path, *, family: str = "qwen3") -> Path:
    """Write a Qwen3 of two layers to `folder`, trained on the family's dialogues by SFT's own rows, with its template.

    It is trained until it says them nearly surely, since tests want to hear them of it.
    """
    tokenizer = _tokenizer(family)
    codec = codec_for(tokenizer)
    rows = [codec.render_conversation(conversation(question, family)) for question in DIALOGUES]
    config = Qwen3Config(
        vocab_size=640, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    width = max(len(row.token_ids) for row in rows)
    ids = torch.tensor([row.token_ids + [0] * (width - len(row.token_ids)) for row in rows])  # (B, T)
    mask = torch.tensor([row.loss_mask + [0] * (width - len(row.token_ids)) for row in rows])
    for _ in range(MAX_STEPS):
        logits = model(ids).logits[:, :-1]  # (B, T-1, V)
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none") * mask[:, 1:]
        (nll.sum() / mask[:, 1:].sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if nll.max() < LEARNT:
            break
    assert nll.max() < LEARNT, f"the model has not learnt its dialogues: {nll.max()}"
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id])
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE that has merged most of the template's own words, so that prompts are short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words_of(family)
    tokenizer.decoder = decoders.ByteLevel()
    is_llama, template = family == "llama3_1", (TEMPLATES / f"{family}.jinja").read_text()
    tokenizer.add_special_tokens(LLAMA if is_llama else CHATML)
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    schemas = [str(tool_class(name).schema.as_function()).replace("'", '"') for name in TOOLS]
    tokenizer.train_from_iterator([template, *schemas * 2, " " * 64, str(dialogues_of(family))], trainer)
    eos, pad = ("<|eot_id|>", "<|end_of_text|>") if is_llama else ("<|im_end|>", "<|endoftext|>")
    bos = {"bos_token": "<|begin_of_text|>"} if is_llama else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, chat_template=template, **bos
    )
