"""Validation beside the next step's rollout: both are what they are alone, and so is a run that dies meanwhile."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cut_rollout import plain, sampler_with
from helpers.fakes import EchoTool
from helpers.files import read_jsonl
from helpers.ranks import mesh_of_one, ranks_of
from helpers.runs import differing
from helpers.scripted_rollout import prompt
from helpers.stateful import ForkedNotes, Notes
from helpers.toy_run import build_toy_world, train_and_kill
from helpers.toy_run import train as train_toy

from arpo.config.sections import RunConfig
from arpo.data import PromptOrder
from arpo.log import RunLog, read_metrics
from arpo.log.metrics_file import MetricsFile
from arpo.options import AdvantageConfig, BranchingConfig, RolloutConfig
from arpo.ranks import Timers
from arpo.sampling import Rollouts
from arpo.trajectory import Group

CFG = RolloutConfig(
    group_size=6, max_response_tokens=900, max_result_tokens=200, answer_reserve_tokens=60, max_tool_calls=4
)
BRANCHES = BranchingConfig(num_initial_rollouts=2, weight=1.0, entropy_tokens=6)
PROMPTS = [prompt(f"p{i}") for i in range(12)]
KEEP, RESAMPLE = AdvantageConfig(), AdvantageConfig(dead_groups="resample", max_resample=1)
WAYS = {
    "fixed": (CFG, KEEP),
    "pull": (replace(CFG, dispatch="pull"), KEEP),
    "refilled": (replace(CFG, dispatch="pull"), RESAMPLE),
    "carried": (replace(CFG, carry_over=1), KEEP),
}


def script(name: str, path: str, turn: int) -> tuple[str, float]:
    """A question has the same answers whoever asks it; a validation's are shorter or longer than a rollout's."""
    question = f"p{name.rsplit(' ')[-1]}" if name.startswith("validation") else name
    rng = random.Random(f"{question}|{path}|{turn}")
    think = f"<think>{'word ' * rng.choice([0, 1, 8, 30])}</think>"
    call = rng.random() < 0.6 and turn < 4
    return think + (f"<search>{turn}@{path}</search>" if call else "<answer>\\boxed{1}</answer>"), rng.uniform(0.2, 2.0)


class Score:
    on_group = None

    def __call__(self, groups: list[Group]) -> None:
        for t in (t for group in groups for t in group.trajectories):
            t.reward = float(len(t.token_ids) % 2)
            t.reward_parts = {"accuracy": t.reward}


@pytest.fixture(scope="module")
def alone():
    with mesh_of_one() as mesh:
        yield ranks_of(mesh)


def steps(ranks, folder: Path, cfg: RolloutConfig, advantage: AdvantageConfig, tool, **run) -> tuple:
    """Three steps with a validation before each, on questions that they sample too. Returns what is trained on."""
    sampler = sampler_with(ranks, script, [tool], cfg, BRANCHES, score=Score())
    log = RunLog(folder, RunConfig(), is_main=True)
    rollouts = Rollouts(sampler, PromptOrder(len(PROMPTS), 4, 0, option="n"), PROMPTS, advantage, num_steps=3)
    groups = []
    try:
        rollouts.validate_on(PROMPTS[:5], log, RunConfig(validate_every=1, **run), done_steps=0)
        for step in range(1, 4):
            groups.append(plain(rollouts.next(step, Timers()).sampled))
            assert sampler.tools.num_pending == sampler.engine.num_running == 0
            if values := rollouts.after_update(step, Timers()):
                log.scalars(step, values)
    finally:
        sampler.tools.close()
        log.close()
    return groups, rollouts


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [EchoTool, Notes, ForkedNotes])
def test_a_rollout_and_its_guests_are_what_each_is_alone(alone, tmp_path, way, kind):
    results = {}
    for overlaps in (False, True):
        tool = EchoTool("search", "found", jitter_s=0.002) if kind is EchoTool else kind(max_sessions=3, jitter_s=0.002)
        folder = tmp_path / str(overlaps)
        results[overlaps], rollouts = steps(alone, folder, *WAYS[way], tool, overlap_validation=overlaps)
        assert not rollouts.sampler.tools.sessions.records() and not getattr(rollouts.plan, "carried", [])
    if way != "carried":  # where the engine's load decides which group is whole first
        assert results[False] == results[True]
    else:
        drawn = [sorted({row["prompt_id"] for rows in results[x] for row in rows}) for x in (False, True)]
        assert drawn[0] == drawn[1] == sorted(p.prompt_id for p in PROMPTS)
    assert read_metrics(tmp_path / "False") == read_metrics(tmp_path / "True")
    assert [row["step"] for row in read_metrics(tmp_path / "True")] == [0, 1, 2, 3]
    for step in range(4):
        file = f"trajectories/valid_{step:06d}.jsonl.gz"
        before, beside = (
            [{key: row[key] for key in ("prompt_id", "token_ids", "reward")} for row in read_jsonl(tmp_path / x / file)]
            for x in ("False", "True")
        )
        assert before == beside and [row["prompt_id"] for row in beside] == ["p0", "p1", "p2", "p3", "p4"]


# ---- whole runs

VALIDATES = (
    "--run.num_steps", "9", "--run.validate_every", "2", "--run.save_every", "1", "--run.dump_every", "1",
    "--optim.lr", "1e-3",
)  # fmt: skip
PLACES = [  # what is called when the rank dies, at which call since the start of the process, and which rank
    ("begin of the first validation", "arpo.sampling.validation:Beside.start", 1, 1),
    ("end of one of its trajectories", "arpo.sampling.validation:Beside.whole", 2, 0),
    ("step 1 saved, and its scores", "arpo.checkpoint.checkpoints:Checkpoints.write", 2, 1),
    ("scores of step 2, which was saved", "arpo.sampling.validation:Validation.end", 2, 1),
    ("step 2's scores are logged, step 3 is not", "arpo.update:fill_advantages", 1, 0),
    ("the last validation", "arpo.sampling.validation:Validation._scores", 4, 0),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return build_toy_world(tmp_path_factory.mktemp("world"))


@pytest.mark.slow
def test_a_run_that_dies_beside_a_validation_ends_as_the_one_that_does_not(world):
    flags = *VALIDATES, "--run.overlap_validation", "True"
    rows = train_toy(world, "whole", *flags, ranks=2)
    assert [row["step"] for row in rows if "valid/reward" in row] == [0, 2, 4, 6, 8, 9]
    lines = [json.loads(line) for line in (world / "runs/whole/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9]
    train_and_kill(world, "killed", *flags, places=PLACES)
    assert differing(world / "runs" / "whole", world / "runs" / "killed") == []


@pytest.mark.slow
def test_the_scores_beside_a_rollout_are_those_of_the_weights_that_it_samples_from(world):
    """A learning rate of 0 keeps the weights, so each validation repeats the first; with another, the scores are those
    of a run that validates alone."""

    def scores(name: str, lr: str, overlaps: str) -> dict[float, float]:
        flags = (*VALIDATES, "--run.num_steps", "5", "--optim.lr", lr, "--run.overlap_validation", overlaps)
        rows = train_toy(world, name, *flags, ranks=1)
        return {row["step"]: row["valid/reward"] for row in rows if "valid/reward" in row}

    kept, alone, beside = (
        scores("kept", "0", "True"),
        scores("alone", "1e-3", "False"),
        scores("beside", "1e-3", "True"),
    )
    assert len({round(score, 6) for score in kept.values()}) == 1 < len({round(score, 6) for score in beside.values()})
    assert alone == pytest.approx(beside, abs=1e-6) and len(kept) == len(alone) == 4


def test_a_second_line_of_the_step_that_a_run_goes_on_from_is_written_again(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    for row in (
        {"step": 0, "v": 0},
        {"step": 1, "x": 1},
        {"step": 2, "x": 2},
        {"step": 2, "v": 2},
        {"step": 3, "x": 3},
    ):
        assert file.append(row) == ""
    assert read_metrics(tmp_path) == [
        {"step": 0, "v": 0}, {"step": 1, "x": 1}, {"step": 2, "x": 2, "v": 2}, {"step": 3, "x": 3}
    ]  # fmt: skip
    again = MetricsFile(tmp_path / "metrics.jsonl", 2)
    assert read_metrics(tmp_path)[-1] == {"step": 2, "x": 2}
    again.append({"step": 2, "v": 7})
    assert read_metrics(tmp_path)[-1] == {"step": 2, "x": 2, "v": 7}
    MetricsFile(tmp_path / "metrics.jsonl", 3)
    assert read_metrics(tmp_path)[-1] == {"step": 2, "x": 2, "v": 7}
