"""The way to a first run: what README and docs/data.md promise of it is what configs, code and tables say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from arpo.data.hub import TRAIN_FILES
from arpo.start.load import load_config
from arpo.start.memory import GIB, Job, misfits
from benchmarks.scaling import from_config
from benchmarks.shared.cost_model import Memory, Shape, memory_of_job, seconds
from benchmarks.shared.hardware import HARDWARE
from evaluate import EvalConfig
from train_rl import RLConfig
from train_sft import SFTConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CONFIGS = {"arpo-sft": SFTConfig, "arpo-rl": RLConfig, "arpo-eval": EvalConfig}
QWEN_3B = Shape(2048, 11008, 36, 16, 2, 128, 151_936, tied=True, qkv_bias=True)
QWEN_7B = Shape(3584, 18944, 28, 28, 4, 128, 152_064, qkv_bias=True)


def commands(text: str) -> list[list[str]]:
    """The commands in the blocks of a page, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
def test_the_commands_of_a_page_are_accepted(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = [words for words in commands((ROOT / page).read_text()) if words and words[0] in CONFIGS]
    assert found
    for name, *argv in found:
        load_config(CONFIGS[name], argv)


@pytest.mark.parametrize("title", ["Your first run on one GPU", "And on eight"])
def test_the_first_runs_follow_each_other_and_end_with_the_line_that_is_promised(title, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = {words[0]: words[1:] for words in commands(section(title)) if words and words[0] in CONFIGS}
    sft, rl = load_config(SFTConfig, found["arpo-sft"]), load_config(RLConfig, found["arpo-rl"])
    assert rl.model.path == f"runs/{sft.run.name}/hf"
    assert {sft.data.train, rl.data.train} <= TRAIN_FILES.keys()
    assert f"The last line is `tensorboard --logdir runs/{rl.run.name}/tb`" in section(title)


def need(shape: Shape, cfg: SFTConfig | RLConfig, ranks: int, gib: float) -> Memory:
    """What the estimate says of a run, which must fit."""
    if isinstance(cfg, SFTConfig):
        job, max_tokens = Job(shape.sizes, cfg.model, ranks), cfg.data.max_tokens_per_microbatch
    else:
        job = Job(shape.sizes, cfg.model, ranks, cfg.engine, cfg.max_model_len)
        max_tokens = cfg.update.max_tokens_per_microbatch
    found = memory_of_job(shape, job, max_tokens, gib * GIB)
    assert misfits(job, gib * GIB) == [] and found.training < gib * GIB
    return found


def test_the_memory_that_is_promised_is_what_the_start_of_a_run_reckons(monkeypatch):
    monkeypatch.chdir(ROOT)
    one, eight = section("Your first run on one GPU"), section("And on eight")
    files = ["configs/qwen2.5_3b.yaml", "configs/arpo.yaml", "configs/one_gpu.yaml"]
    sft, rl = load_config(SFTConfig, [files[0], "configs/sft.yaml", files[2]]), load_config(RLConfig, files)
    large, small = 79.1, 23.5  # an H100, and a card of 24 GB, as the driver reports them
    assert f"20 minutes and {need(QWEN_3B, sft, 1, large).training / GIB:.0f} GiB" in one
    assert f"2 hours and {need(QWEN_3B, rl, 1, large).rollout / GIB:.0f} GiB" in one
    assert f"4 hours and {need(QWEN_3B, rl, 1, small).rollout / GIB:.0f} GiB" in one
    assert need(QWEN_3B, sft, 1, small).training < small * GIB
    model = "configs/qwen2.5_7b.yaml"
    sft, rl = load_config(SFTConfig, [model, "configs/sft.yaml"]), load_config(RLConfig, [model, "configs/arpo.yaml"])
    assert f"2.2 to 2.6 hours, and {need(QWEN_7B, sft, 8, large).training / GIB:.0f} GiB of each GPU" in eight
    assert f"6 to 7 hours with its saves, and {need(QWEN_7B, rl, 8, large).rollout / GIB:.0f} GiB" in eight


def test_the_hours_that_are_promised_are_what_scaling_prints(monkeypatch):
    monkeypatch.chdir(ROOT)
    one, eight = section("Your first run on one GPU"), section("And on eight")
    files = ["configs/qwen2.5_3b.yaml", "configs/arpo.yaml", "configs/one_gpu.yaml"]
    num_steps = load_config(RLConfig, files).run.num_steps

    def step_seconds(shape: Shape, files: list[str], hardware: str) -> float:
        return seconds(shape, from_config(files)[1], HARDWARE[hardware], HARDWARE[hardware].gpus_per_node).step

    for hardware in ("1xH100-80GB", "1xRTX4090-24GB"):
        assert f"RL {num_steps * step_seconds(QWEN_3B, files, hardware) / 3600:.0f} hours" in one
    step = step_seconds(QWEN_7B, ["configs/qwen2.5_7b.yaml", "configs/arpo.yaml"], "8xH100-80GB")
    assert 120 < step < 180 and f"156 steps of two to three minutes, {156 * step / 3600:.0f} to 7 hours" in " ".join(
        eight.split()
    )


def test_every_repository_has_link_size_and_licence_and_the_readme_links_the_papers_data():
    page = (ROOT / "docs/data.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| [")]
    found = {row[0].partition("]")[0][1:]: row for row in rows}
    assert len(found) == 22
    for repo, (link, what, size, licence) in found.items():
        kind = "datasets/" if repo in TRAIN_FILES else ""
        assert link == f"[{repo}](https://huggingface.co/{kind}{repo})" and what and size and licence
    for repo in [repo for repo in TRAIN_FILES if repo.startswith("dongguanting/")]:
        assert f"](https://huggingface.co/datasets/{repo})" in README and found[repo][-1] == "MIT"
