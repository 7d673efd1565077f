"""Shared fixtures, and an environment that does not depend on the shell's.

`tiny_model_dir` is a folder with a random float32 Qwen3 (2 layers, width 64, tied head), a byte-level BPE tokenizer
whose tags are single tokens, and a generation_config: everything that the trainer and vLLM read of a real model. It is
session-scoped and shared, so do not write into it; `helpers.models.build_tiny_model` makes variants.
"""

import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path

# Before torch: one thread each, here and in every process that a test starts. More would wait for one another.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from helpers.models import build_tiny_model
from helpers.parsers import parsers_kept
from helpers.worker_line import close_line_in_forks

gc.disable()  # until pytest_collection_finish: a quarter of what importing the tests computes

LONGEST_FIRST = ["test_kill_points.py", "test_end_to_end.py", "test_every_algorithm.py", "test_scripts.py",
                 "test_gpu_report.py", "test_real_data.py", "test_validation.py", "test_carry_over_run.py",
                 "test_multi_node.py", "test_storm.py", "test_preemption.py", "test_hermes_end_to_end.py",
                 "test_checkpoint.py", "test_evaluate.py", "test_sandbox_attacks.py", "test_sandbox_host.py",
                 "test_model.py", "test_engine.py"]  # fmt: skip
"""A worker takes the next file when it is done with one: a long one that came last would keep the others waiting."""

ROOMS_APART = [Path(__file__).parent / room for room in ("benchmarks", "extras", "jail")]
"""A change elsewhere seldom breaks one of their tests: they are left to the slow tier."""

SLOW_S = 1500.0
"""When a slow test hangs. On two quiet cores the longest takes four minutes."""


def pytest_sessionstart(session: pytest.Session) -> None:
    close_line_in_forks(session.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "download" not in config.option.markexpr:
        for item in [item for item in items if item.get_closest_marker("download")]:
            item.add_marker(pytest.mark.skip(reason="downloads a gigabyte: make test-downloads"))
    for item in items:
        if any(item.path.is_relative_to(room) for room in ROOMS_APART):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") or item.get_closest_marker("download"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """What is there now stays: nobody looks through half a million objects of libraries again, and forks copy none."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def nothing_of_a_file_harms_the_next():
    """A process group would be taken for its own. The watch of a loop of tools that was stopped ends the process."""
    yield
    assert not torch.distributed.is_initialized()
    deadline = time.monotonic() + 60
    while (names := Counter(thread.name for thread in threading.enumerate()))["arpo-tools-watch"] > names["arpo-tools"]:
        assert time.monotonic() < deadline, "close the ToolRunner whose loop was stopped"
        time.sleep(0.01)


@pytest.fixture(scope="session", autouse=True)
def one_parser_for_each_script():
    with parsers_kept():
        yield


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny_model"))
