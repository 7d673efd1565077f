"""The way to a first run: what README and docs/data.md promise of it is what configs, code and tables say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from arpo.data.hub import TRAIN_FILES
from arpo.start.inputs import check_questions
from arpo.start.load import load_config
from arpo.start.memory import GIB, Job, misfits
from benchmarks.scaling import from_config, load_rl, shape_of, workload_of
from benchmarks.shared import cost_model, recipe
from benchmarks.shared.cost_model import Memory, memory_of_job, seconds
from benchmarks.shared.hardware import HARDWARE
from benchmarks.shared.shapes import Shape
from evaluate import EvalConfig
from train_rl import RLConfig
from train_sft import SFTConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = {
    "arpo-sft": "arpo-sft",
    "arpo-rl": "arpo-rl",
    "arpo-eval": "arpo-eval",
    "train_sft.py": "arpo-sft",
    "train_rl.py": "arpo-rl",
    "evaluate.py": "arpo-eval",
    "slurm_train_rl.sh": "arpo-rl",
}
"""What a command line may call -> its command."""
CONFIGS = {"arpo-sft": SFTConfig, "arpo-rl": RLConfig, "arpo-eval": EvalConfig}
QWEN_3B = Shape(2048, 11008, 36, 16, 2, 128, 151_936, tied=True, qkv_bias=True)
QWEN_7B = Shape(3584, 18944, 28, 28, 4, 128, 152_064, qkv_bias=True)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where the commands name their files from."""
    monkeypatch.chdir(ROOT)


def commands(text: str) -> list[list[str]]:
    """The commands in the blocks of a page, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_commands(title: str) -> dict[str, list[str]]:
    """The arguments of the first arpo-sft, arpo-rl and arpo-eval of a section."""
    found = reversed([words for words in commands(section(title)) if words and words[0] in CONFIGS])
    return {words[0]: words[1:] for words in found}


def script_and_arguments(words: list[str]) -> tuple[str, list[str]] | None:
    """What a line runs: ["torchrun", ..., "train_rl.py", "a.yaml"] -> ("arpo-rl", ["a.yaml"]); None if nothing of ours.

    A line with a placeholder for files is none: `--eval.files ...`, `RUN/config.yaml`. A loop has a ";" after it.
    """
    for place, word in enumerate(words):
        name = SCRIPTS.get(Path(word).name)
        if name and not {"...", "RUN/config.yaml"} & set(words):
            arguments = words[place + 1 :]
            end = next((i for i, argument in enumerate(arguments, 1) if argument.endswith(";")), len(arguments))
            return name, [argument.rstrip(";") for argument in arguments[:end]]
    return None


PAGES = ["README.md", "docs/data.md", "docs/scale.md", "docs/training.md", "docs/evaluation.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_accepted(page):
    found = list(filter(None, map(script_and_arguments, commands((ROOT / page).read_text()))))
    assert found
    for name, argv in found:
        load_config(CONFIGS[name], argv)


def test_the_commands_for_several_nodes_start_and_share_no_file_of_sqlite(monkeypatch):
    """Without a zone they ended at once, and with one all nodes opened data/search_cache.sqlite."""
    monkeypatch.setenv("BRIGHTDATA_API_KEY", "key")
    page = (ROOT / "docs/scale.md").read_text()
    of_nodes = page.partition("\n## Several nodes\n")[2].partition("\n## ")[0]
    lines = [words for words in commands(of_nodes) if script_and_arguments(words) and words[0] != "while"]
    assert len(lines) == 2
    for words in lines:
        cfg = load_config(RLConfig, script_and_arguments(words)[1])
        check_questions([], cfg.tools)  # the settings of the search
        assert "ARPO_REDIS=1" in words or "redis://" in cfg.tools.search.cache


@pytest.mark.parametrize("title", ["Your first run on one GPU", "And on eight"])
def test_the_first_runs_follow_each_other_and_end_with_the_line_that_is_promised(title):
    found = first_commands(title)
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


def test_the_memory_that_is_promised_is_what_the_start_of_a_run_reckons():
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


def test_the_hours_that_are_promised_are_what_scaling_prints():
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


FIRST_HOUR = section("The first GPU hour")
CARDS = ("1xRTX4080-16GB", "1xRTX4090-24GB", "1xH100-80GB")
SIZES = [line for line in FIRST_HOUR.splitlines() if " GiB, " in line]


def test_the_first_hour_stands_before_the_other_recipes_and_its_runs_follow_each_other():
    assert README.index("## The first GPU hour") < README.index("## Your first run on one GPU")
    found = [words for words in commands(FIRST_HOUR) if words and words[0] in CONFIGS]
    (rl, python), (before, after) = (
        [load_config(CONFIGS[name], words[1:]) for words in found if words[0] == name]
        for name in ("arpo-rl", "arpo-eval")
    )
    assert (before.model.path, after.model.path) == (rl.model.path, f"runs/{rl.run.name}/hf")
    assert before.eval.files == after.eval.files == (rl.data.valid,)
    names = {cfg.run.name for cfg in (rl, python, before, after)}
    assert len(names) == 4 and f"runs/{before.run.name} runs/{after.run.name}" in FIRST_HOUR
    assert (rl.tools.names, python.tools.names, python.rollout.max_tool_calls) == ((), ("python",), 3)
    # what an evaluation asks is what a validation asks
    for evaluated in (before, after):
        assert evaluated.eval.system_prompt == rl.data.system_prompt
        assert evaluated.rollout.max_response_tokens == rl.rollout.max_response_tokens
        assert evaluated.rollout.temperature == 0  # as in sampling/validation.py
        assert evaluated.model.enable_thinking == rl.model.enable_thinking


def test_the_first_hour_has_the_settings_of_the_published_run():
    """Arctic-Platform #55: 32 prompts x 4, mini-batches of 4, lr 1e-6, prompt 512, response 1,024, no KL, an evaluation
    of all 1,319 questions every 10 steps. huggingface/trl #3892 asks for a standard run on GSM8K, and finds none."""
    cfg = load_config(RLConfig, ["configs/gsm8k.yaml"])
    assert (cfg.data.num_prompts_per_step, cfg.rollout.group_size, cfg.update.num_prompts_per_minibatch) == (32, 4, 4)
    assert (cfg.optim.lr, cfg.optim.schedule, cfg.optim.warmup_ratio) == (1e-6, "constant", 0)
    assert (cfg.data.max_prompt_tokens, cfg.rollout.max_response_tokens) == (512, 1024)
    assert (cfg.loss.kl_coefficient, cfg.branching.selector, cfg.run.validate_every) == (0, "none", 10)
    assert cfg.model.enable_thinking and cfg.reward.terms == ("accuracy=1",)
    assert cfg.run.num_steps == 70 and cfg.data.num_valid_prompts == 0
    [curve] = [line for line in FIRST_HOUR.splitlines() if line.startswith("| published")]
    values = [float(cell) for cell in curve.strip("| ").split(" | ")[1:]]
    assert values == [0.295, 0.391, 0.499, 0.589, 0.659, 0.688, 0.691, 0.710, 0.717, 0.732, 0.717, 0.732]
    # the marks are below the published values at their steps, by more than an interval of 1,319 questions
    assert "0.55 at step 30, and 0.65 at step 70" in FIRST_HOUR
    assert values[3] - 0.55 > 0.026 and values[7] - 0.65 > 0.026


@pytest.mark.parametrize("line", SIZES, ids=lambda line: line.split("|")[1].strip(" *"))
def test_the_sizes_of_the_first_hour_are_what_scaling_prints(line):
    """Jiayi-Pan/TinyZero #64: 0.5B, 1.5B and 3B on cards of 24 GB; what fits was not said, and 1.5B and 3B did not."""
    model, *cells = (cell.strip(" *") for cell in line.strip("| ").split("|"))
    [lora] = re.findall(r"LoRA is `([^`]*)`", FIRST_HOUR.replace("\n", " "))
    for card, cell in zip(CARDS, cells, strict=True):
        hw = HARDWARE[card]
        flags = lora.split() if "LoRA" in cell else []
        cfg = load_rl(["configs/gsm8k.yaml", "--model.path", f"Qwen/{model}", *flags])
        shape, work, run = shape_of(cfg.model.path), workload_of(cfg), recipe.recipe_of(cfg)
        if cell == "no":
            with_lora = load_rl(["configs/gsm8k.yaml", "--model.path", f"Qwen/{model}", *lora.split()])
            assert cost_model.misfits(shape, workload_of(with_lora), hw, 1)
            continue
        assert not cost_model.misfits(shape, work, hw, 1)
        need = cost_model.memory(shape, work, hw)
        gib = max(need.training, need.rollout) / GIB
        in_all = recipe.hours(shape, work, run, hw, 1).total
        assert cell.removeprefix("LoRA: ") == f"{gib:.0f} GiB, {in_all:.1f} h", card
        if flags:  # LoRA only where full training does not fit
            full = workload_of(load_rl(["configs/gsm8k.yaml", "--model.path", f"Qwen/{model}"]))
            assert cost_model.misfits(shape, full, hw, 1)


def test_another_size_of_the_first_run_names_its_own_model():
    """The second command must not drop the SFT model for the raw one."""
    one = " ".join(section("Your first run on one GPU").split())
    pairs = re.findall(r"`(configs/\S+\.yaml)` and `--model\.path (\S+)`", one)
    assert [Path(file).stem for file, _ in pairs] == ["qwen2.5_1.5b", "qwen2.5_7b"]
    for file, path in pairs:
        sft = load_config(SFTConfig, [file, "configs/sft.yaml", "configs/one_gpu.yaml"])
        assert path == f"runs/{sft.run.name}/hf"
        load_config(RLConfig, [file, "configs/arpo.yaml", "configs/one_gpu.yaml", "--model.path", path])


def test_every_repository_has_link_size_and_licence_and_the_readme_links_the_papers_data():
    page = (ROOT / "docs/data.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| [")]
    found = {row[0].partition("]")[0][1:]: row for row in rows}
    assert len(found) == 23
    for repo, (link, what, size, licence) in found.items():
        kind = "datasets/" if repo in TRAIN_FILES else ""
        assert link == f"[{repo}](https://huggingface.co/{kind}{repo})" and what and size and licence
    for repo in [repo for repo in TRAIN_FILES if repo.startswith("dongguanting/")]:
        assert f"](https://huggingface.co/datasets/{repo})" in README and found[repo][-1] == "MIT"
