"""A random Qwen3 with single bytes and tags as tokens, for benchmarks without meaningful texts."""

from __future__ import annotations

from pathlib import Path

import torch

TAGS = [f"<{slash}{tag}>" for tag in ("think", "python", "search", "result", "answer") for slash in ("", "/")]
VOCAB_SIZE = 2048
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_tokenizer(folder: str | Path, vocab_size: int = VOCAB_SIZE):
    """Write a tokenizer and a chat template, and return the tokenizer. Each token can be decoded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"<|{i}|>" for i in range(vocab_size - len(alphabet) - len(TAGS) - 1)]
    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, *fillers])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_end|>"])
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_model(folder: str, *, hidden: int = 128, layers: int = 4) -> None:
    """Config, float32 weights, tokenizer and chat template; 4096 positions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = write_tokenizer(folder)
    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64, "head_dim": 32}
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        **heads,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
