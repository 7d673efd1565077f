"""The ablation: numbers of the table from files, equal budgets, resuming, failures that are named."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.files import read_jsonl, write_jsonl
from helpers.ranks import ROOT, try_script

from arpo.errors import UserError
from arpo.start.load import load_config
from extras.ablation import runs as ablation
from extras.ablation.config import ALGORITHMS, AblationConfig
from extras.ablation.results import RunResult, algorithms_table, compare_algorithms, estimate, estimate_share, read_run

TRAIN = """
run: {save_every: 0}
model: {path: @DIR@/model, compute_dtype: float32, recompute_every_n_layers: 0}
data: {train: @DIR@/train.jsonl, num_prompts_per_step: 2, max_prompt_tokens: 64}
engine: {dtype: float32, kv_cache_gib: 0.05, max_num_seqs: 32}
rollout: {group_size: 4, max_response_tokens: 24, max_tool_calls: 1, max_result_tokens: 32, answer_reserve_tokens: 4}
branching: {num_initial_rollouts: 2, entropy_tokens: 4}
tools: {names: [search], search: {backend: local, corpus: @DIR@/corpus.jsonl, mode: live}}
update: {num_prompts_per_minibatch: 2, max_tokens_per_microbatch: 128}
"""
EVAL = """
eval: {files: [@DIR@/train.jsonl], max_prompt_tokens: 64}
engine: {dtype: float32, kv_cache_gib: 0.05, max_num_seqs: 32}
rollout: {temperature: 1.0, top_p: 1.0, max_response_tokens: 24, answer_reserve_tokens: 4}
tools: {names: [search], search: {backend: local, corpus: @DIR@/corpus.jsonl, mode: live}}
"""


@pytest.fixture
def config(tmp_path, tiny_model_dir) -> Path:
    """A folder with everything an ablation of a tiny model needs; returns its config file."""
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    rows = [{"prompt": f"say e {i}", "answer": "e", "data_source": "toy"} for i in range(4)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    (tmp_path / "corpus.jsonl").write_text('{"title": "e", "text": "eeee"}\n')
    for name, settings in {"train": TRAIN, "eval": EVAL}.items():
        (tmp_path / f"{name}.yaml").write_text(settings.replace("@DIR@", str(tmp_path)))
    path = tmp_path / "ablation.yaml"
    path.write_text(
        f"run: {{name: ab, dir: {tmp_path}}}\nablation:\n  train: {tmp_path}/train.yaml\n  eval: {tmp_path}/eval.yaml\n"
        "  algorithms: [grpo, random]\n  seeds: [0]\n  num_steps: 2\n  num_parallel: 2\n"
    )
    return path


def write_run(folder: Path, accuracy: float, rewards: list[float] = (0.1, 0.2), **metrics: float) -> None:
    """What a finished run leaves."""
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    scores = {"test": {"accuracy": accuracy, "reward": accuracy - 0.1}}
    (folder / "eval" / "scores.json").write_text(json.dumps(scores))
    spent = {"tools/all/calls": 10, "tokens/sampled": 100, "time/rollout": 1.0, "time/step": 2.0} | metrics
    rows = [{"step": step, "reward/mean": reward} | spent for step, reward in enumerate(rewards, 1)]
    write_jsonl(folder / "metrics.jsonl", [{"step": 0, "valid/accuracy": 0.0}, *rows])


def runs_of(folder: Path, algorithm: str, accuracies: list[float], first_seed: int = 0) -> list[RunResult]:
    """Runs with these accuracies, one a seed."""
    runs = []
    for seed, accuracy in enumerate(accuracies, first_seed):
        write_run(folder / f"{algorithm}_seed{seed}", accuracy)
        runs.append(read_run(folder / f"{algorithm}_seed{seed}", algorithm, seed))
    return runs


@pytest.fixture
def pretended(monkeypatch):
    """(name of the run, script) of every command that was started. They pretend, and leave results."""
    started = []

    def start_next(job: ablation.Job) -> None:
        script = job.commands.pop(0)[0]
        started.append((job.name, script))
        if script == "evaluate.py":
            write_run(job.folder, 0.5)
        job.process = subprocess.Popen(["true"])

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ablation.Job, "start_next", start_next)
    monkeypatch.setattr(ablation, "POLL_S", 0.01)
    yield started
    signal.signal(signal.SIGTERM, handler)


# ---- the table


def test_the_table_is_worked_out_from_metrics_and_scores(tmp_path):
    for seed, accuracy in enumerate([0.75, 0.93]):
        calls = {"tools/all/calls": 10 + seed}
        write_run(tmp_path / f"arpo_seed{seed}", accuracy, [0.1, 0.9, 0.9, 0.9], **calls)
    runs = [read_run(tmp_path / f"arpo_seed{seed}", "arpo", seed) for seed in (0, 1)]
    table = compare_algorithms(runs, target_reward=0.6)
    row = table["arpo"]
    assert row["accuracy"]["mean"] == pytest.approx(0.84) and row["reward"]["mean"] == pytest.approx(0.74)
    assert row["tool_calls"] == {"mean": 42.0, "seeds": 2}  # of 40 and 44
    assert row["step_s"]["mean"] == 8.0
    # running means: .1, .5, .633, .7
    assert row["steps_to_target"] == {"mean": 3.0, "seeds": 2} and row["seconds_to_target"] == {"mean": 6.0, "seeds": 2}
    assert "6.0 n=2" in algorithms_table(table, 0.6)
    table = compare_algorithms(runs, target_reward=0.95)
    assert table["arpo"]["seconds_to_target"] is None and "| never |" in algorithms_table(table, 0.95)


def test_algorithms_are_compared_seed_by_seed(tmp_path):
    """The seeds differ by far more than the algorithms; only the paired difference shows the latter."""
    runs = runs_of(tmp_path, "random", [0.1, 0.3, 0.5]) + runs_of(tmp_path, "arpo", [0.32, 0.52, 0.72], first_seed=1)
    table = compare_algorithms(runs, 0.8)
    assert table["arpo"]["minus_random"] == pytest.approx({"mean": 0.02, "seeds": 2})  # of two, no interval
    assert "| +0.020 n=2 |" in algorithms_table(table, 0.8)


def test_equal_calls_and_tokens_are_compared_between_validations_and_the_ends_of_the_runs(tmp_path):
    """100 tokens a step against 150: arpo ends at 400, which grpo passes a third of the way from 300 to 600. Calls are
    the other way round, 4 and 3 a step."""
    for name, tokens, accuracies in [("grpo_seed0", 150, [0.3, 0.6]), ("arpo_seed0", 100, [0.5, 0.2])]:
        spent = {"tokens/sampled": tokens, "tools/all/calls": 500 / tokens, "group/mixed_share": 0.25}
        write_run(tmp_path / name, 0.9, [0.1] * 4, **spent)
        rows = read_jsonl(tmp_path / name / "metrics.jsonl")
        rows[2]["valid/accuracy"], rows[4]["valid/accuracy"] = accuracies
        write_jsonl(tmp_path / name / "metrics.jsonl", rows)
    runs = [read_run(tmp_path / name, name[:4], 0) for name in ("grpo_seed0", "arpo_seed0")]
    table = compare_algorithms(runs, target_reward=0.8, references=("arpo",))
    assert "minus_arpo" in table["grpo"] and "minus_grpo" not in table["arpo"]
    assert table["arpo"]["at_tokens"] == pytest.approx({"spent": 400, "mean": 0.2, "seeds": 1})
    assert table["grpo"]["at_tokens"]["mean"] == pytest.approx(0.3 + (400 - 300) / 300 * 0.3)
    # grpo ends after 13.3 calls, a third of the way from arpo's 10 to its 20
    assert table["grpo"]["at_calls"] == pytest.approx({"spent": 40 / 3, "mean": 0.6, "seeds": 1})
    assert table["arpo"]["at_calls"]["mean"] == pytest.approx(0.5 - 0.3 / 3)
    assert table["arpo"]["end"] == {"last": {"mean": 0.2, "seeds": 1}, "least": 0.2, "lost": pytest.approx(0.3)}
    text = algorithms_table(table, target_reward=0.8)
    assert "after 400 sampled tokens" in text and "after 13 tool calls" in text and "mixed groups" in text
    assert "| arpo | 0.200 | 0.200 | 0.300 |" in text


def test_an_interval_over_seeds_is_with_students_quantile_and_says_its_n(tmp_path):
    """Accuracies 0.4, 0.5, 0.6: variance of the mean 0.01 / 3, as of 0.25 * 300 = 75 answers; t of 2 degrees 4.3027.
    Wilson: 0.5 +- 4.3027 * sqrt(0.25 / 75 + 18.513 / (4 * 75^2)) / (1 + 18.513 / 75) = 0.2225.
    Differences 0.0, 0.1, 0.2 have the t interval: std 0.1, 0.1 +- 4.3027 * 0.1 / sqrt(3) = 0.2484."""
    runs = runs_of(tmp_path, "grpo", [0.4, 0.5, 0.6]) + runs_of(tmp_path, "arpo", [0.4, 0.6, 0.8])
    text = algorithms_table(compare_algorithms(runs, 0.8), 0.8)
    assert "| grpo | 3 | 0.500 [0.278, 0.722] n=3 |" in text
    assert "| +0.100 [-0.148, +0.348] n=3 |" in text


def test_an_accuracy_over_seeds_has_no_interval_beyond_1(tmp_path):
    """It was "0.901 [0.768, 1.035]". Others: confident-ai/deepeval#3077, UKGovernmentBEIS/inspect_ai#4980."""
    runs = runs_of(tmp_path, "grpo", [0.78, 0.95, 0.97]) + runs_of(tmp_path, "arpo", [1.0, 1.0, 1.0])
    text = algorithms_table(compare_algorithms(runs, 0.8), 0.8)
    assert "| grpo | 3 | 0.900 [0.469, 0.989] n=3 |" in text and "| arpo | 3 | 1.000 [1.000, 1.000] n=3 |" in text
    rng = np.random.default_rng(0)
    cells = [estimate_share(rng.beta(27.25, 1.434, size=5)) for _ in range(2000)]  # mean 0.95, deviation 0.04
    assert 0.93 < np.mean([cell["low"] <= 0.95 <= cell["high"] for cell in cells]) < 0.96  # the t interval: 0.92
    assert all(0 < cell["low"] < cell["high"] < 1 for cell in cells)


def test_the_intervals_cover_the_mean_as_often_as_they_say():
    """Of 2,000 samples of five normal numbers, 95 % (+- 1 %, two standard errors) have an interval with the mean in."""
    rng = np.random.default_rng(0)
    cells = [estimate(rng.normal(size=5)) for _ in range(2000)]
    assert 0.94 < np.mean([cell["low"] <= 0 <= cell["high"] for cell in cells]) < 0.96


def test_report_only_writes_table_and_forest_of_what_is_finished(config, capsys):
    folder = config.parent / "ab"
    cfg = load_config(AblationConfig, [str(config), "--report_only", "True"])
    with pytest.raises(UserError, match=f"^{folder}: no finished run to report; see each log.txt$"):
        ablation.run_ablation(cfg)
    write_run(folder / "grpo_seed0", 0.5)
    ablation.run_ablation(cfg)
    assert "not finished: random_seed0" in capsys.readouterr().out
    assert json.loads((folder / "table.json").read_text())["grpo"]["accuracy"]["mean"] == 0.5
    assert "| grpo | 1 |" in (folder / "TABLE.md").read_text()
    assert (folder / "forest.png").read_bytes().startswith(b"\x89PNG")


# ---- the runs


def test_all_runs_have_the_same_budget_and_differ_in_the_algorithms_flags_only(config):
    cfg = load_config(AblationConfig, [str(config), "--ablation.seeds", "0", "1"])
    jobs = ablation.make_jobs(cfg.ablation, Path("runs/ab"))
    assert [job.name for job in jobs] == ["grpo_seed0", "random_seed0", "grpo_seed1", "random_seed1"]
    trains = [job.commands[0] for job in jobs]
    for job, train in zip(jobs, trains, strict=True):
        rest = [word for word in train if word not in (*ALGORITHMS[job.algorithm], job.name)]
        expected = ["train_rl.py", *cfg.ablation.train, "--run.dir", "runs/ab", "--run.name", "--run.seed"]
        expected += [str(job.seed), "--run.num_steps", "2", "--run.validate_every", "0"]
        assert rest == expected
    assert all(job.commands[1][-2:] == ["--run.seed", "0"] for job in jobs)  # one evaluation seed for all


def test_an_algorithm_of_ones_own_comes_with_its_flags(config):
    own = "drgrpo=--branching.selector none --advantage.normalize none"
    cfg = load_config(AblationConfig, [str(config), "--ablation.algorithms", "grpo", own])
    flags = ["--branching.selector", "none", "--advantage.normalize", "none"]
    assert cfg.ablation.overrides == {"grpo": ALGORITHMS["grpo"], "drgrpo": flags}


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--ablation.algorithms", "grop"], ["'grop' is none of grpo, arpo, aepo, random"]),
        (["--ablation.algorithms", "grpo", "grpo"], ["'grpo' occurs twice"]),
        (["--ablation.seeds", "1", "1"], ["ablation.seeds", "twice"]),
        (["--ablation.num_parallel", "0"], ["ablation.num_parallel=0"]),
        (["--ablation.train", ""], ["ablation.train is empty"]),
    ],
)
def test_a_mistake_is_one_line(config, flags, words):
    with pytest.raises(UserError) as caught:
        load_config(AblationConfig, [str(config), *flags])
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


def test_help_answers_without_importing_torch():
    command = [sys.executable, "-X", "importtime", "-m", "extras.ablation", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--run.name" in done.stdout
    assert " torch\n" not in done.stderr and " tyro\n" in done.stderr


def test_a_result_of_other_inputs_is_never_taken_for_this_ones(config):
    """Neither another number of steps nor a model trained anew under the same path."""
    cfg = load_config(AblationConfig, [str(config)]).ablation
    [job, _] = ablation.make_jobs(cfg, config.parent / "ab")
    inputs = ablation.shared_inputs(cfg)
    ablation.claim_folder(job, inputs)
    ablation.claim_folder(job, ablation.shared_inputs(cfg))  # of the same inputs: it goes on
    with pytest.raises(UserError, match=r"grpo_seed0 comes from other inputs \(train;"):
        ablation.claim_folder(job, inputs | {"train": {}})
    weights = config.parent / "model" / "model.safetensors"
    os.utime(weights, ns=(0, 0))
    with pytest.raises(UserError, match=r"other inputs \(files;"):
        ablation.claim_folder(job, ablation.shared_inputs(cfg))


def test_a_missing_input_is_named_before_anything_runs(config):
    (config.parent / "train.jsonl").unlink()
    with pytest.raises(UserError, match=f"{config.parent}/train.jsonl"):
        ablation.run_ablation(load_config(AblationConfig, [str(config)]))
    assert not (config.parent / "ab").exists()


def test_each_run_is_trained_then_evaluated_and_what_is_finished_is_not_started_again(config, pretended, capsys):
    cfg = load_config(AblationConfig, [str(config), "--ablation.num_parallel", "1"])
    ablation.run_ablation(cfg)
    names = [name for name in ("grpo_seed0", "random_seed0") for _ in range(2)]
    assert pretended == list(zip(names, ["train_rl.py", "evaluate.py"] * 2, strict=True))
    assert "[2/2] random_seed0: accuracy 0.500" in capsys.readouterr().out
    ablation.run_ablation(cfg)
    assert len(pretended) == 4 and "2 runs, 2 of them finished already" in capsys.readouterr().out


def test_a_real_ablation_names_what_fails_with_its_log_and_skips_what_is_finished(config):
    bad = "bad=--branching.bas 1"
    command = ("extras/ablation/__main__.py", str(config), "--ablation.algorithms", bad, "random")
    done, folder = try_script(*command, ranks=1), config.parent / "ab"
    log, bad_log = (folder / name / "log.txt" for name in ("random_seed0", "bad_seed0"))
    assert done.code == 2 and f"1 of 2 runs failed: bad_seed0 ({bad_log}); mend it and start the same" in done.output
    assert re.search(rf"bad_seed0 FAILED with code 1 after \d+ s, see {bad_log}", done.output)
    assert "random_seed0: accuracy" in done.output, log.read_text()[-3000:]
    assert "did you mean 'branching.base'" in bad_log.read_text() and "evaluate.py" not in bad_log.read_text()
    assert "| random | 1 |" in (folder / "TABLE.md").read_text()
    table = json.loads((folder / "table.json").read_text())
    assert list(table) == ["random"] and table["random"]["sampled_tokens"]["mean"] > 0
    written = log.read_text()
    assert "2 runs, 1 of them finished already" in try_script(*command, ranks=1).output
    assert log.read_text() == written
