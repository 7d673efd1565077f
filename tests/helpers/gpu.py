"""Parts that the tests of a GPU have in common. ARPO_GPU_KIT=cpu runs them on the CPU, to see that they work."""

import os

import numpy as np
import pytest
import torch

from arpo.batch import Row
from arpo.config.sections import ModelConfig
from arpo.errors import UserError
from arpo.model.attention import attention_backend

ON_GPU = torch.cuda.is_available()
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and os.environ.get("ARPO_GPU_KIT") != "cpu", reason="needs an NVIDIA GPU"),
]
VOCAB = 384


def missing(attention: str) -> str:
    """Return why this model.attention does not run here in bfloat16; "" if it does."""
    try:
        attention_backend(ModelConfig(attention=attention), torch.device("cuda" if ON_GPU else "cpu"))
    except UserError as error:
        return str(error)
    return ""


def skip_unless_here(attention: str) -> None:
    if reason := missing(attention):
        pytest.skip(reason)


def some_rows(num_rows: int, num_prompt: int, num_response: int, *, shared: int = 0) -> list[Row]:
    """Random tokens; the first `shared` response tokens are the same in all rows, and so is the prompt."""
    rng = np.random.default_rng(0)
    prompt, start = rng.integers(0, VOCAB, num_prompt), rng.integers(0, VOCAB, shared)
    rows = []
    for i in range(num_rows):
        own = rng.integers(0, VOCAB, num_response - shared + 7 * i)
        response = np.concatenate([start, own])
        rows.append(Row(prompt, response, (rng.random(len(response)) < 0.8).astype(np.int64), np.zeros(len(response))))
    return rows


def assert_close(ours, expected, tolerance: float) -> None:
    scale = expected.abs().max().clamp(min=1e-6)
    assert float((ours - expected).abs().max() / scale) < tolerance
    assert float((ours - expected).norm() / expected.norm()) < tolerance / 3
