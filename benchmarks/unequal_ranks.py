"""Two real ranks (gloo, vLLM on a tiny model) and prompts of unequal lengths: dealt out, and pulled.

    python benchmarks/unequal_ranks.py [--quick]

Responses to every other prompt are twenty times as long, and dealt out, all of these are rank 1's. `ratio` is the time
of a rollout, until both ranks have ended it, where prompts are dealt out, over that where they are pulled. Also
measured: a pull while both ranks pull at once. What many ranks would gain: no_rank_waits.py.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing as mp
from transformers import AutoTokenizer

from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.engine.team import Team
from arpo.log import Console
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import TagsCodec
from arpo.ranks import init_ranks
from arpo.sampling.sampler import Sampler
from arpo.sampling.sources import OneRollout
from arpo.trajectory import Prompt
from benchmarks.shared.prescribed_tokens import PrescribedTokens
from benchmarks.shared.tiny_model import write_model

NUM_PROMPTS, GROUP_SIZE, MAX_NUM_SEQS = 16, 4, 8
LONG, QUICK, SHORT = 400, 50, 20
NUM_PULLS = 2000


def letters(long: int, request_id: str) -> int:
    """Responses to every other prompt are long: dealt out, they are all rank 1's."""
    return long if int(request_id.partition("|")[0]) % 2 else SHORT


def on_rank(rank: int, port: int, folder: str, quick: bool, results: mp.SimpleQueue) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    place = init_ranks()
    team, codec = Team(place), TagsCodec(AutoTokenizer.from_pretrained(folder))
    cfg = EngineConfig(kv_cache_gib=0.1, max_num_seqs=MAX_NUM_SEQS, gpu_memory_utilization=0.2)
    engine = Engine(folder, cfg, max_model_len=1024, seed=rank)
    engine.llm.collective_rpc(PrescribedTokens(codec, length=partial(letters, QUICK if quick else LONG)).install)
    tools = team.tool_runner({})
    nobody, none = Console(is_main=False), BranchingConfig("none")
    prompts = [Prompt(str(i), [], [""], tools=(), token_ids=tuple(codec.encode("a" * 50))) for i in range(NUM_PROMPTS)]
    fixed = RolloutConfig(GROUP_SIZE, max_response_tokens=600)
    times: dict[str, list[float]] = {"fixed": [], "pull": []}
    num_long: dict[str, int] = {}
    for repeat in range(2 if quick else 4):  # the first one warms up
        for way, cfg in {"fixed": fixed, "pull": replace(fixed, dispatch="pull")}.items():
            place.barrier()
            started = time.perf_counter()
            sampler = Sampler(
                engine=engine,
                tools=tools,
                codec=codec,
                team=team,
                log=nobody,
                seed=0,
                rollout=cfg,
                branching=none,
                max_num_seqs=MAX_NUM_SEQS,
            )
            source = OneRollout(sampler, prompts, repeat, label=way)
            sampler.run(source, way, NUM_PROMPTS)
            place.barrier()  # which is what the ranks wait for each other at
            times[way].append(time.perf_counter() - started)
            num_long[way] = sum(int(group.prompt.prompt_id) % 2 for group in source.to_score)
            source.exchange()
    started = time.perf_counter()
    for _ in range(NUM_PULLS):
        place.store.add("pulls", 1)
    pull_us = 1e6 * (time.perf_counter() - started) / NUM_PULLS
    num_long = {way: place.all_gather_objects(count) for way, count in num_long.items()}
    if rank == 0:
        results.put(({way: statistics.median(values[1:]) for way, values in times.items()}, num_long, pull_us))
    tools.close()
    engine.close()
    place.close()


def measure(folder: str, quick: bool) -> tuple[dict[str, float], dict[str, list[int]], float]:
    """Return the seconds of a rollout on both ranks, the number of long prompts that each rank sampled, and the
    microseconds of a pull while both pull at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("fork").SimpleQueue()
    mp.start_processes(on_rank, args=(port, folder, quick, results), nprocs=2, start_method="fork")
    return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter responses, one repeat")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        seconds, num_long, pull_us = measure(folder, args.quick)
    print(f"long prompts by rank: dealt out {num_long['fixed']}, pulled {num_long['pull']}")
    ours, baseline = seconds["pull"], seconds["fixed"]
    result = {"name": "unequal_ranks", "ratio": baseline / ours, "ours": ours, "baseline": baseline, "unit": "s"}
    print(json.dumps(result | {"pull_us": pull_us}))


if __name__ == "__main__":
    main()
