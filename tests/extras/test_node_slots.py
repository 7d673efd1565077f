"""The limit per machine: real processes, some of them killed."""

import asyncio
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.forked import fork, in_processes, killed
from helpers.python_tools import HANG_S, SMALL, start

from arpo.errors import UserError
from extras.tools import node_slots
from extras.tools.node_slots import NodeSlots, runtime_folder
from extras.tools.python import RecordedPython, RecordedPythonConfig


def test_no_more_than_the_limit_run_at_once_over_all_processes(tmp_path):
    def hold(number: int) -> list[int]:
        slots = NodeSlots("x", 3, folder=tmp_path)

        def one(call: int) -> int:
            with slots.take():
                mark = tmp_path / f"held-{number}-{call}"
                mark.touch()
                num_held = len(list(tmp_path.glob("held-*")))
                time.sleep(0.02)
                mark.unlink()
            return num_held

        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(one, range(8)))

    seen = [count for part in in_processes(hold, 4) for count in part]
    assert len(seen) == 32 and max(seen) <= 3


def test_a_killed_process_loses_no_slot(tmp_path):
    def hold_for_ever(name: str, acknowledge: int) -> None:
        with NodeSlots("x", 2, folder=tmp_path).take():
            os.write(acknowledge, f"{name}\n".encode())
            time.sleep(HANG_S)

    for _ in range(5):
        assert killed(hold_for_ever, "01") == {"0", "1"}
    slots = NodeSlots("x", 2, folder=tmp_path)
    with slots.take(), slots.take():
        pass


def test_a_fork_made_while_a_slot_was_held_does_not_keep_it(tmp_path):
    slots = NodeSlots("x", 1, folder=tmp_path)
    with slots.take():
        child = fork.Process(target=time.sleep, args=(HANG_S,))
        child.start()
    with NodeSlots("x", 1, folder=tmp_path).take():
        child.kill()
    child.join()


def test_whoever_waits_when_the_tool_closes_is_let_go(tmp_path):
    slots = NodeSlots("x", 1, folder=tmp_path)
    waiting = threading.Thread(target=lambda: slots.take().__enter__())
    with slots.take():
        waiting.start()
        slots.close()
        waiting.join(timeout=HANG_S)
    assert not waiting.is_alive()


def test_calls_of_two_ranks_share_the_limit(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    cfg = RecordedPythonConfig(**vars(SMALL) | {"wall_s": 30.0, "max_concurrent_per_node": 1})
    tools = [start(cfg, kind=RecordedPython) for _ in range(2)]
    code = "import time\nstarted = time.time()\ntime.sleep(0.2)\n(started, time.time())"

    async def both():
        calls = [tool.run(code) for tool in tools for _ in range(3)]
        return await asyncio.wait_for(asyncio.gather(*calls), HANG_S)

    spans = sorted(eval(result.text) for result in asyncio.run(both()))
    for tool in tools:
        asyncio.run(tool.aclose())
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans))
    assert len(spans) == 6


def test_the_folder_is_the_users_alone(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(node_slots.tempfile, "tempdir", str(tmp_path))
    assert runtime_folder() == tmp_path / f"arpo-{os.getuid()}"
    assert runtime_folder().stat().st_mode & 0o777 == 0o700
    runtime_folder().rmdir()
    (tmp_path / f"arpo-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(UserError, match="belongs to somebody else"):
        runtime_folder()


def test_a_limit_below_none_is_refused():
    with pytest.raises(UserError, match=r"options: python\.max_concurrent_per_node=-1 must be at least 0"):
        RecordedPython(RecordedPythonConfig(max_concurrent_per_node=-1))
