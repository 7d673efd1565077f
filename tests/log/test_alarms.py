"""When the numbers of a run say that it may be collapsing, and that it then ends where it is told to."""

import json

import pytest
from helpers.ranks import try_script
from helpers.toy_run import build_toy_world, train

from arpo.checkpoint import manifest
from arpo.config.sections import RunConfig
from arpo.errors import UserError
from arpo.log.alarms import Alarms
from arpo.options import LossConfig

USUAL = {"loss/entropy": 0.3, "optim/grad_norm": 0.5, "response/tokens": 60.0, "tools/all/calls": 95.0}
USUAL |= {"tools/all/not_run": 5.0, "group/reward_std": 0.3, "reward/solved_share": 0.2}


class Lines(list):
    """A console that keeps its lines."""

    line = list.append


class OneRank:
    def from_rank_0(self, value):
        return value


def watch(folder, rows: list[dict], *, done_steps: int = 0, stop: bool = False, is_corrected: bool = True) -> list[str]:
    """What is said of these steps, of which the first `done_steps` are in metrics.jsonl."""
    run, lines = RunConfig(dir=str(folder), name="run", stop_on_collapse=stop), Lines()
    run.folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows, 1))
    (run.folder / "metrics.jsonl").write_text(text)
    alarms = Alarms(run, lines, OneRank(), done_steps, is_corrected=is_corrected)
    for step, row in enumerate(rows[done_steps:], done_steps + 1):
        alarms.check(step, row)
    return lines


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("entropy", {"loss/entropy": 0.05}),
        ("entropy", {"loss/entropy": 1.2}),
        ("gradient norm", {"optim/grad_norm": 2.0}),
        ("response length", {"response/tokens": 20.0}),
        ("response length", {"response/tokens": 200.0}),
        ("share of calls that ran", {"tools/all/not_run": 80.0}),
        ("spread of a group's rewards", {"group/reward_std": 0.09}),
    ],
)
def test_a_number_that_leaves_its_band_for_two_steps_is_named_once_also_by_a_run_that_goes_on(tmp_path, name, changed):
    assert watch(tmp_path, [USUAL] * 8 + [USUAL | changed, USUAL] * 3) == []  # by chance
    rows = [USUAL] * 8 + [USUAL | changed] * 4
    for done_steps in range(10):
        [line] = watch(tmp_path, rows, done_steps=done_steps)
        assert line.startswith(f"step 10: alarm: the {name} is ") and "may be collapsing" in line


@pytest.mark.parametrize(
    "rows",
    [
        [USUAL] * 8 + [USUAL | {"group/reward_std": 0.0, "reward/solved_share": 0.97}] * 4,
        [USUAL | {"tools/all/calls": 0.0}] * 8 + [USUAL] * 4,
        [{"loss/entropy": 0.5 ** (step / 8), "optim/grad_norm": 1.1**step} for step in range(60)],
        [USUAL] * 8 + [{}] * 4 + [{"optim/grad_norm": 0.01}] * 3,  # a small step harms nothing
        [USUAL] * 8 + [USUAL | {"response/tokens": 20.0, "group/not_trained_on": 1.0}] * 2 + [USUAL] * 4,
    ],
    ids=["all is right", "no call has run yet", "slowly", "not there", "an outage of the tools"],
)
def test_what_is_usual_or_slow_or_not_there_is_no_collapse(tmp_path, rows):
    assert watch(tmp_path, rows) == []


def test_the_newest_checkpoint_from_before_is_named_and_the_run_may_end(tmp_path):
    rows = [USUAL] * 8 + [USUAL | {"loss/entropy": 3.0}] * 2
    [line] = watch(tmp_path, rows)
    assert "no checkpoint from before is left" in line
    for step in (6, 8, 9):
        (tmp_path / "run" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_000007.broken").mkdir()
    [line] = watch(tmp_path, rows)
    assert line.endswith(f"; {tmp_path}/run/checkpoints/step_000008 is from before")
    with pytest.raises(UserError, match=r"step 10: the entropy is 3, .*00008 is from before; .*resume_changed True"):
        watch(tmp_path, rows, stop=True)


@pytest.mark.slow
def test_a_run_whose_learning_rate_explodes_ends_before_it_saves_that(tmp_path):
    world = build_toy_world(tmp_path)
    usual = "--run.save_every", "1", "--run.validate_every", "0", "--optim.lr", "1e-4"
    train(world, "rl", *usual, "--run.num_steps", "6", ranks=2)
    # not so large that all answers are alike at once: then nothing is updated, and no entropy is measured
    flags = "--optim.lr", "0.03", "--run.num_steps", "24", "--run.resume_changed", "True"
    flags = *flags, "--run.stop_on_collapse", "True"
    done = try_script("train_rl.py", str(world / "config.yaml"), *usual, *flags, ranks=2)
    assert done.code == 2 and "may be collapsing" in done.output, done.output
    checkpoints = world / "runs" / "rl" / "checkpoints"
    newest = max(map(manifest.step_of, checkpoints.glob("step_*")))
    alarm = next(line for line in done.output.splitlines() if "may be collapsing" in line)
    assert f"step {newest + 1}: " in alarm and f"step_{newest - 1:06d} is from before" in alarm


def test_a_large_mismatch_names_the_correction_once(tmp_path):
    rows = [USUAL | {"mismatch/kl": kl} for kl in (9e-4, 2e-3, 2e-3)]
    assert watch(tmp_path, rows) == []  # the loss is corrected already
    [line] = watch(tmp_path, rows, is_corrected=False)
    assert line.startswith("step 2: mismatch/kl is 0.002") and "--loss.rollout_correction tis" in line


@pytest.mark.parametrize(
    ("changed", "is_corrected"),
    [({}, False), ({"rollout_correction": "mis"}, True), ({"old_logprobs": "rollout"}, True)],
)
def test_a_loss_is_corrected_by_weights_or_by_vllms_own_logprobs(changed, is_corrected):
    assert LossConfig(**changed).is_corrected == is_corrected
