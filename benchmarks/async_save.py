"""Seconds of a run's wait at a save: until all files are written, or until a thread has a copy to write.

    python benchmarks/async_save.py [--quick]          (on the GPU if there is one; TMPDIR chooses the disk)

arpo.checkpoint.Saver saves a random Qwen3 with AdamW's moments and its Hugging Face folder, in turn with run.async_save
off and on. Nothing else runs meanwhile, and each save ends before the next begins. `written_s`: from the start of a
save to the end of its thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arpo.checkpoint import Saver
from arpo.checkpoint.checkpoints import verify
from arpo.config.sections import ModelConfig, OptimConfig, RunConfig
from arpo.model import load_policy
from arpo.model.optim import build_optimizer
from arpo.ranks import Ranks, init_ranks
from benchmarks.shared.tiny_model import write_model


def measure(ranks: Ranks, folder: str, *, hidden: int, layers: int, num_saves: int) -> dict[str, float]:
    """Return medians over the saves, without the first save of each kind, because this save allocates buffers."""
    model = f"{folder}/model"
    write_model(model, hidden=hidden, layers=layers)
    policy = load_policy(ModelConfig(model), ranks.mesh, device=ranks.device)
    optimizer = build_optimizer(policy, OptimConfig())
    savers = {}
    for kind in (False, True):
        run = RunConfig(name=f"async_{kind}", dir=folder, async_save=kind, keep_best=False)
        savers[kind] = Saver(run, ranks, source=model)
        savers[kind].resume(policy, optimizer)
    blocked: dict[bool, list[float]] = {False: [], True: []}
    written = []
    for step in range(1, num_saves + 2):
        for kind, saver in savers.items():
            started = time.perf_counter()
            saver.save(step, is_final=False)
            blocked[kind].append(time.perf_counter() - started)
            saver.wait()
        written.append(time.perf_counter() - started)
    for saver in savers.values():
        assert verify(saver.checkpoints.folder_of(step)) is None
    baseline, ours = (statistics.median(blocked[kind][1:]) for kind in (False, True))
    gib = 12 * sum(p.numel() for p in policy.parameters()) / 2**30
    written_s = statistics.median(written[1:])
    print(f"{gib:.2f} GiB of state: a step waits {baseline:.3f} s, for the copy alone {ours:.3f} s ({written_s:.3f} s)")
    result = {"name": "async_save", "ratio": baseline / ours, "ours": ours, "baseline": baseline, "unit": "s"}
    return result | {"written_s": written_s, "gib": gib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model")
    args = parser.parse_args()
    ranks = init_ranks()
    size = {"hidden": 256, "layers": 4} if args.quick else {"hidden": 768, "layers": 8}
    with tempfile.TemporaryDirectory() as folder:
        result = measure(ranks, folder, **size, num_saves=3 if args.quick else 5)
    ranks.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
