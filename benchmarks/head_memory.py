"""Peak memory and time of logprobs, entropies and their gradients: our chunked head against full logits.

    python benchmarks/head_memory.py [--quick]          (on the GPU if there is one)

Both get the same hidden states and weight, and their gradients are compared. Each runs in a separate process after one
warm-up, so that neither profits from the other's memory. Reported is the peak of the tensors beyond the inputs.
time_ratio = our time (CPU seconds without a GPU) / the time of full logits.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arpo.model.head import token_logprobs

SIZES = {  # N tokens, D hidden size, V vocabulary
    "cuda": {"quick": (4096, 2048, 151_936), "full": (16_384, 3584, 152_064)},  # full: Qwen2.5-7B
    "cpu": {"quick": (2048, 128, 8192), "full": (8192, 512, 32_768)},
}


def full_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain way: all logits at once, upcast to float32; autograd does the rest."""
    log_p = torch.log_softmax((hidden @ weight.T).float(), dim=-1)  # (N, V)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


HEADS = {"ours": token_logprobs, "baseline": full_logits}


@contextlib.contextmanager
def peak_mib(device: str) -> Iterator[list[float]]:
    """Append to the list the peak MiB of tensors allocated within the block."""
    peak: list[float] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        yield peak
        peak.append((torch.cuda.max_memory_allocated() - start) / 2**20)
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield peak
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))  # freed: negative
    peak.append(max(itertools.accumulate(sizes)) / 2**20)


def measure(side: str, device: str, size: tuple[int, int, int], repeats: int) -> dict[str, float]:
    """Peak MiB and median seconds of forward and backward, and sums by which the two sides can be compared."""
    num_tokens, hidden_size, vocab = size
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=g, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, hidden_size, generator=g, device=device, dtype=dtype).mul_(0.05).requires_grad_()
    targets = torch.randint(0, vocab, (num_tokens,), generator=g, device=device)

    def forward_backward() -> tuple[float, float, float]:
        hidden.grad = weight.grad = None
        logprobs, entropy = HEADS[side](hidden, weight, targets)
        (logprobs.mean() + 0.1 * entropy.mean()).backward()
        return float(logprobs.mean()), float(entropy.mean()), float(weight.grad.float().norm())

    forward_backward()
    hidden.grad = weight.grad = None
    with peak_mib(device) as peak:
        sums = forward_backward()
    clock = time.perf_counter if device == "cuda" else time.process_time
    seconds = []
    for _ in range(repeats):
        started = clock()
        forward_backward()
        seconds.append(clock() - started)
    return {"mib": peak[0], "seconds": statistics.median(seconds), "sums": sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under a minute")
    parser.add_argument("--side", choices=HEADS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES[device]["quick" if args.quick else "full"]
    if args.side:
        print(json.dumps(measure(args.side, device, size, repeats=3)))
        return
    results = {}
    for side in HEADS:
        command = [sys.executable, __file__, "--side", side, *(["--quick"] if args.quick else [])]
        results[side] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ours = results["ours"]
    baseline = results["baseline"]
    for values in results.values():
        for a, b in zip(values["sums"], baseline["sums"], strict=True):
            assert abs(a - b) <= (1e-4 if device == "cpu" else 1e-2) * abs(b), results
    print("{} tokens, hidden size {}, vocabulary {}, on {}".format(*size, device))
    for side, values in results.items():
        print(f"{side:8}  peak {values['mib']:8.0f} MiB   forward + backward {values['seconds']:.3f} s")
    result = {"name": "head_memory", "ratio": baseline["mib"] / ours["mib"], "ours": ours["mib"]}
    result |= {"baseline": baseline["mib"], "unit": "MiB", "time_ratio": ours["seconds"] / baseline["seconds"]}
    print(json.dumps(result | {"ours_s": ours["seconds"], "baseline_s": baseline["seconds"], "device": device}))


if __name__ == "__main__":
    main()
