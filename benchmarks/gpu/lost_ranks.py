"""Lost ranks, while other ranks wait for them in NCCL: how long until the run ends, and does a line name the ranks?

    python benchmarks/gpu/lost_ranks.py [--quick]       (half of the GPUs is a node; without any, gloo and two ranks)

Two torchruns on this machine play two nodes. All ranks reduce a tensor again and again. Then the ranks of the second
node are killed, or frozen (no sign of life), or a live rank stays away from the collective. In each case all ranks of
the first node must end by themselves, with the line promised by arpo/ranks/peers.py. Last line: JSON with the seconds
until the end, and the lines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from arpo.ranks import init_ranks
from benchmarks.shared.children import child_environment

ROOT = Path(__file__).resolve().parents[2]
SILENCE_S = 10.0
WAIT_S = 30.0
START_S = 240.0
GONE = r"error \(rank \d+\): rank \d+ \(.*(is gone|no sign of life for 10 s)"
CASES = {
    "killed": GONE,
    "frozen": GONE,
    "absent": r"error \(rank \d+\): the ranks did not meet .* though all are alive",
}
"""Case -> the last line of the first node's ranks."""


def work(folder: Path) -> None:
    """Be a rank."""
    ranks = init_ranks(WAIT_S / 60, SILENCE_S)
    tensor = torch.ones(1 << 20, device=ranks.device)
    is_last = ranks.rank == ranks.world_size - 1
    for number in range(1_000_000):
        if is_last and (folder / "stay away").exists():
            time.sleep(600)
        dist.all_reduce(tensor)
        tensor.zero_()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        if number == 3:
            (folder / f"works{ranks.rank}").touch()
        time.sleep(0.05)


def launch(node: int, gpus: list[int], folder: Path, port: int) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc_per_node={max(len(gpus), 1)}",
        "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", f"--rdzv_id={port}",
        f"--rdzv_conf=is_host={int(node == 0)}", "--local_addr=127.0.0.1", __file__, "--folder", str(folder),
    ]  # fmt: skip
    shown = ",".join(map(str, gpus))
    env = child_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES=shown)
    with (folder / f"log{node}").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)


def ranks_of(node: subprocess.Popen) -> list[int]:
    """Return the process ids of a torchrun's workers. Each worker has a separate session."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    return [int(child) for child in children]


def lose(case: str) -> tuple[float, str]:
    """Return the seconds until the end of the first node, and the node's last line. Raises AssertionError without a
    line."""
    gpus = list(range(torch.cuda.device_count()))
    half = len(gpus) // 2
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nodes = []
        others = []
        try:
            nodes = [launch(0, gpus[:half], folder, port), launch(1, gpus[half:], folder, port)]
            deadline = time.monotonic() + START_S
            while len(list(folder.glob("works*"))) < (len(gpus) or 2):
                log = "".join((folder / f"log{n}").read_text() for n in (0, 1))
                assert time.monotonic() < deadline and nodes[0].poll() is None, log[-3000:]
                time.sleep(0.1)
            others = [nodes[1].pid, *ranks_of(nodes[1])]
            if case == "absent":
                (folder / "stay away").touch()
            for pid in others if case != "absent" else ():
                os.kill(pid, signal.SIGKILL if case == "killed" else signal.SIGSTOP)
            started = time.monotonic()
            nodes[0].wait(WAIT_S + 60)
            took = time.monotonic() - started
            log = (folder / "log0").read_text()
        finally:
            for pid in [*others, *(node.pid for node in nodes)]:
                for number in (signal.SIGKILL, signal.SIGCONT):
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        continue
            for node in nodes:
                node.wait()
        log += (folder / "log1").read_text() if case == "absent" else ""  # one line of all survivors
        print(f"== {case}\n{log}", flush=True)
    line = re.search(CASES[case], log)
    assert line, f"{case}: no line that says so"
    return took, line[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the killed ones")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        work(args.folder)
        return
    result: dict[str, float | str] = {"name": "lost_ranks"}
    for case in ("killed",) if args.quick else CASES:
        result[f"{case}_s"], result[case] = lose(case)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
