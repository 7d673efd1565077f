"""Shapes of real models: for the cost model, and for benchmarks of models with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from arpo.start.memory import Sizes


@dataclass(frozen=True)
class Shape:
    """A dense decoder with gated MLPs (Qwen2, Qwen3, Llama)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def layer_parameters(self) -> int:
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv) + self.qkv_bias * (q + 2 * kv) + self.qk_norm * 2 * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Embedding, head and last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            parameters=self.parameters,
            kv_numbers_per_token=self.kv_numbers_per_token,
            kv_heads=self.kv_heads,
            hidden=self.hidden,
            intermediate=self.intermediate,
            vocab=self.vocab,
            head_dim=self.head_dim,
        )


def shape_from_json(c: dict) -> Shape:
    """Return the shape of a config.json. Raises KeyError if it has other names for its sizes."""
    heads = c["num_attention_heads"]
    return Shape(
        hidden=c["hidden_size"],
        intermediate=c["intermediate_size"],
        layers=c["num_hidden_layers"],
        heads=heads,
        kv_heads=c.get("num_key_value_heads", heads),
        head_dim=c.get("head_dim") or c["hidden_size"] // heads,
        vocab=c["vocab_size"],
        tied=c.get("tie_word_embeddings", False),
        qkv_bias=c["model_type"] == "qwen2",
        qk_norm=c["model_type"] == "qwen3",
    )


# What the models of a family share.
qwen2_5 = partial(Shape, vocab=151_936, qkv_bias=True)
qwen3 = partial(Shape, head_dim=128, vocab=151_936, qk_norm=True)
llama3 = partial(Shape, vocab=128_256)
smol_lm2 = partial(Shape, head_dim=64, vocab=49_152, tied=True)

MODELS = {
    "Qwen2.5-3B": qwen2_5(hidden=2048, intermediate=11_008, layers=36, heads=16, kv_heads=2, head_dim=128, tied=True),
    "Qwen2.5-7B": qwen2_5(
        hidden=3584, intermediate=18_944, layers=28, heads=28, kv_heads=4, head_dim=128, vocab=152_064
    ),
    "Llama-3.1-8B": llama3(hidden=4096, intermediate=14_336, layers=32, heads=32, kv_heads=8, head_dim=128),
    "Qwen3-8B": qwen3(hidden=4096, intermediate=12_288, layers=36, heads=32, kv_heads=8),
    "Qwen3-14B": qwen3(hidden=5120, intermediate=17_408, layers=40, heads=40, kv_heads=8),
}
"""The models of the table of benchmarks/scaling.py."""
OTHER_MODELS = {
    "SmolLM2-135M": smol_lm2(hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3),
    "SmolLM2-360M": smol_lm2(hidden=960, intermediate=2560, layers=32, heads=15, kv_heads=5),
    "SmolLM2-1.7B": smol_lm2(hidden=2048, intermediate=8192, layers=24, heads=32, kv_heads=32),
    "Qwen2.5-0.5B": qwen2_5(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, tied=True),
    "Qwen2.5-1.5B": qwen2_5(hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, head_dim=128, tied=True),
    "Qwen3-0.6B": qwen3(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, tied=True),
    "Qwen3-1.7B": qwen3(hidden=2048, intermediate=6144, layers=28, heads=16, kv_heads=8, tied=True),
    "Qwen3-4B": qwen3(hidden=2560, intermediate=9728, layers=36, heads=32, kv_heads=8, tied=True),
    "Llama-3.2-1B": llama3(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, head_dim=64, tied=True),
    "Llama-3.2-3B": llama3(hidden=3072, intermediate=8192, layers=28, heads=24, kv_heads=8, head_dim=128, tied=True),
}
"""Further models for --model."""
SHAPES = {
    "tiny": qwen2_5(hidden=128, intermediate=512, layers=2, heads=4, kv_heads=2, head_dim=32, vocab=4096, tied=True),
    "small": Shape(
        hidden=256, intermediate=1024, layers=4, heads=4, kv_heads=2, head_dim=64, vocab=4096, tied=True, qk_norm=True
    ),
    "135m": OTHER_MODELS["SmolLM2-135M"],  # `config_of` gives it the biases of Qwen2's code
    "0.5b": OTHER_MODELS["Qwen2.5-0.5B"],
    "0.6b": OTHER_MODELS["Qwen3-0.6B"],
    "1.5b": OTHER_MODELS["Qwen2.5-1.5B"],
    "4b": OTHER_MODELS["Qwen3-4B"],
    "7b": MODELS["Qwen2.5-7B"],
}
"""The shapes of --shape, for models with random weights."""


def config_of(shape: Shape):
    """Return the config of transformers."""
    from transformers import Qwen2Config, Qwen3Config

    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers}
    sizes |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab}
    sizes |= {"tie_word_embeddings": shape.tied, "max_position_embeddings": 32_768, "dtype": "bfloat16"}
    config = Qwen3Config(**sizes, head_dim=shape.head_dim) if shape.qk_norm else Qwen2Config(**sizes)
    config.architectures = ["Qwen3ForCausalLM" if shape.qk_norm else "Qwen2ForCausalLM"]
    return config


def write_config(folder: str, shape: Shape) -> None:
    """Write the config and a one-word tokenizer (nobody reads a text here). The weights come from memory."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config_of(shape).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
