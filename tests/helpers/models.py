"""Tiny random models: everything that the trainer and vLLM read of a real one, made in a second."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from arpo.batch import Row
from arpo.config.sections import ModelConfig

TAGS = [f"<{slash}{tag}>" for tag in ("think", "python", "search", "result", "answer") for slash in ("", "/")]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user assistant print(1 + 2) the answer is 42, who wrote the book?"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def build_tiny_model(folder: str | Path, *, seed: int = 0, tied: bool = True, weights: bool = True) -> Path:
    """Write tokenizer, config and (unless weights=False) random weights to `folder`; returns it."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # peaked enough that entropies and greedy choices differ between positions
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id])
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    if weights:
        model.save_pretrained(folder)
    return Path(folder)


def searching_model(folder: Path, tools: tuple[str, ...] = ("search",)) -> Path:
    """The tiny model, whose tied rows of the tools' tags are large: it opens and closes calls all the time."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    build_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    tags = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(
        [f"<{slash}{tool}>" for tool in tools for slash in ("", "/")]
    )
    weights["model.embed_tokens.weight"][tags] *= 3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- families, and the Hugging Face model's own forward pass to compare with

SIZES = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1}


def build(kind: str, path, **changes):
    """A random model of one of our families."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if kind.startswith("qwen3"):
        return build_tiny_model(path, tied=kind == "qwen3")
    kinds = {"qwen2": (Qwen2Config, Qwen2ForCausalLM, True), "llama": (LlamaConfig, LlamaForCausalLM, False)}
    config_class, model_class, tied = kinds[kind]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        options = SIZES | HEADS | {"tie_word_embeddings": tied} | changes
        model_class(config_class(**options)).save_pretrained(path)
    build_tiny_tokenizer().save_pretrained(path)
    return path


def cfg_of(folder, **changes) -> ModelConfig:
    base = ModelConfig(str(folder), compute_dtype="float32", recompute_every_n_layers=0)
    return replace(base, **changes)


def load_hf(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def random_rows(lengths=((5, 9), (1, 4), (7, 13), (3, 1))) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for num_prompt, num_response in lengths:
        mask = (rng.random(num_response) < 0.7).astype(np.int64)
        mask[0] = 1
        rows.append(Row(rng.integers(0, 380, num_prompt), rng.integers(0, 380, num_response), mask))
    return rows


def some_loss(logprobs, entropies):
    """Every token and both outputs count, each differently."""
    weights = torch.linspace(-1.0, 1.0, logprobs.shape[-1]).expand_as(logprobs)
    return (weights * logprobs).sum() + ((0.5 - weights) * entropies).sum()


def assert_close_by_name(ours: dict, expected: dict, tolerance: float = 1e-5) -> None:
    """Each of these tensors or arrays is the expected one, up to a share of its largest number, which is not 0."""
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        scale = np.abs(np.asarray(values)).max()
        assert scale > 0, name
        np.testing.assert_allclose(ours[name], values, rtol=tolerance, atol=tolerance * scale, err_msg=str(name))


def row_by_row(hf, rows, temperature):
    """(logprobs, entropies) of each row by itself, 0 where masked; with gradient."""
    for row in rows:
        ids = torch.as_tensor(np.concatenate([row.prompt_ids, row.response_ids]))
        logits = hf(input_ids=ids[None], use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1]  # (T, V)
        log_p = (logits / temperature).log_softmax(-1)
        mask = torch.as_tensor(row.loss_mask)
        targets = torch.as_tensor(row.response_ids)
        yield log_p.gather(1, targets[:, None])[:, 0] * mask, -(log_p.exp() * log_p).sum(-1) * mask
