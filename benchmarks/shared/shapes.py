"""Shapes of real models, for benchmarks of models with random weights."""

from __future__ import annotations

from benchmarks.shared.cost_model import Shape

# Shape(hidden, intermediate, layers, heads, kv_heads, head_dim, vocab)
SHAPES = {
    "tiny": Shape(128, 512, 2, 4, 2, 32, 4096, tied=True, qkv_bias=True),
    "small": Shape(256, 1024, 4, 4, 2, 64, 4096, tied=True, qk_norm=True),
    "135m": Shape(576, 1536, 30, 9, 3, 64, 49_152, tied=True),
    "0.5b": Shape(896, 4864, 24, 14, 2, 64, 151_936, tied=True, qkv_bias=True),
    "0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151_936, tied=True, qk_norm=True),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151_936, tied=True, qkv_bias=True),
    "4b": Shape(2560, 9728, 36, 32, 8, 128, 151_936, tied=True, qk_norm=True),
    "7b": Shape(3584, 18_944, 28, 28, 4, 128, 152_064, qkv_bias=True),
}
"""Qwen3's shapes (qk_norm), SmolLM2's (135m, here with the biases of Qwen2's code), and Qwen2.5's (all others)."""


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
