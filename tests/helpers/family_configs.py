"""Small configs of model families, their RoPE, and rows that fork."""

import numpy as np
from transformers import AutoConfig

from arpo.batch import Row

SIZES = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip


def config_of(family: str, **changes):
    return AutoConfig.for_model(family, **SIZES | changes)


def rope(kind: str, theta: float, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def longrope(original: int = 4096, **more) -> dict:
    """Of the size of this file's heads; the ratios are about those of Phi-3.5-mini."""
    factors = {"short_factor": [1.0, 1.02, 1.03, 1.03], "long_factor": [1.08, 4.2, 32.8, 64.8]}
    return rope("longrope", 1e4, original_max_position_embeddings=original, **factors, **more)


def some_rows() -> list[Row]:
    """Two prompts; of the first, three responses that fork, one within the other's."""
    prompt, other = [3, 4, 5, 6, 7], [8, 9]
    responses = [(prompt, range(10, 90)), (prompt, [10, 11, 12, 30, 31]), (prompt, [40, 41, 42]), (other, [10, 11])]
    rows = []
    for ids, response in responses:
        mask = np.ones(len(response), np.int64)
        mask[1::4] = 0
        rows.append(Row(np.array(ids), np.array(response), mask))
    return rows
