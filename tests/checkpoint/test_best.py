"""RUN/best: the export of the best validation stays, whatever is saved, removed, killed and begun again after it."""

import json
import shutil

import pytest
from helpers.edits import ROOT
from helpers.ranks import run_ranks, run_ranks_until_killed
from helpers.saving import begin, begin_again, change, watch_files

from arpo.checkpoint.best import keep_best, why_no_best
from arpo.config.sections import RunConfig


def add_row(run, step: int, accuracy: float | None = None, **values: float) -> None:
    """As a run logs a step, with or without a validation."""
    if accuracy is not None:
        around = {"valid/accuracy_low": accuracy - 0.05, "valid/accuracy_high": accuracy + 0.05}
        values |= {"valid/accuracy": accuracy, "valid/reward": -accuracy, **around}
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **values}) + "\n")


def saved(run, *steps: int) -> list:
    """Checkpoints with exports that say of which step they are."""
    folders = [run / "checkpoints" / f"step_{step:06d}" for step in steps]
    for step, folder in zip(steps, folders, strict=True):
        (folder / "hf").mkdir(parents=True, exist_ok=True)
        (folder / "hf" / "weights").write_text(str(step))
    return folders


def kept(run) -> str:
    return (run / "best" / "weights").read_text()


def test_the_best_stays_when_its_checkpoint_goes_and_only_a_better_one_takes_its_place(tmp_path):
    run, said = tmp_path / "run", []
    add_row(run, 0, 0.95)  # before step 1, of which there is no export
    for step, accuracy in ((5, 0.50), (10, 0.75), (15, 0.75), (20, 0.60), (25, 0.78)):
        add_row(run, step, accuracy)
        folders = saved(run, step)
        said.append(keep_best(run, folders, step))
        shutil.rmtree(folders[0])
        assert kept(run) == {5: "5", 25: "25"}.get(step, "10")
    assert said[1:4] == [
        "best validation so far: step 10, accuracy 0.750 [0.700, 0.800], before: step 5, accuracy 0.500 [0.450, 0.550]",
        "",
        "",
    ]
    assert said[4].endswith("before: step 10, accuracy 0.750 [0.700, 0.800]")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best_000025"]


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [("reward", (-0.5, 0.25, 0.0), "step 10, reward +0.250"), ("nll", (0.5, 0.4, 0.45), "step 10, loss 0.4000")],
)
def test_without_an_accuracy_the_best_is_that_of_the_highest_reward_or_the_lowest_loss(tmp_path, name, values, said):
    run = tmp_path / "run"
    for step, value in zip((5, 10, 15), values, strict=True):
        add_row(run, step, **{f"valid/{name}": value})
    assert keep_best(run, saved(run, 5, 10, 15), 15) == f"best validation so far: {said}"
    assert kept(run) == "10"


@pytest.mark.parametrize("name", ["valid/accuracy", "valid/reward", "valid/nll"])
def test_a_number_that_is_none_is_never_the_best(tmp_path, name):
    """A NaN compares as the maximum that nothing beats: trl #4501's kind, for the rest of the run."""
    run, around = tmp_path / "run", {"valid/accuracy_low": 0.1, "valid/accuracy_high": 0.9}
    for step, value in ((5, float("nan")), (10, 0.25)):
        add_row(run, step, **{name: value}, **around)
    (run / "checkpoints" / "best_000005").mkdir(parents=True)  # as an older version has chosen
    (run / "best").symlink_to("checkpoints/best_000005")
    assert "best validation so far: step 10, " in keep_best(run, saved(run, 5, 10), 10) and kept(run) == "10"


def test_folders_and_links_of_the_user_stay_and_his_link_in_the_place_of_ours_is_replaced(tmp_path):
    """Folders that only begin like a checkpoint's: pytorch/torchtitan#4292."""
    run = tmp_path / "run"
    mine = run / "checkpoints" / "best_000005_mine"
    mine.mkdir(parents=True)
    (run / "checkpoints" / "best_000003").symlink_to("best_000005_mine")
    (run / "best").symlink_to("checkpoints/best_000005_mine")
    for step, accuracy in ((5, 0.5), (10, 0.9)):
        add_row(run, step, accuracy)
        assert f"step {step}, " in keep_best(run, saved(run, step), step)
    assert kept(run) == "10"
    assert {path.name for path in mine.parent.glob("best_*")} == {"best_000003", "best_000005_mine", "best_000010"}


def test_steps_without_an_export_do_not_count(tmp_path):
    run = tmp_path / "run"
    add_row(run, 3)
    assert keep_best(run, saved(run, 3), 3) == "" and not (run / "best").exists()
    add_row(run, 5, 0.6)
    add_row(run, 7, 0.9)  # validated, but not saved
    add_row(run, 10)
    assert "step 5, accuracy 0.600" in keep_best(run, saved(run, 5, 10), 10)
    assert kept(run) == "5"


def test_what_a_run_that_begins_anew_will_do_again_is_no_longer_the_best(tmp_path):
    run = tmp_path / "run"
    for step, accuracy in ((5, 0.5), (10, 0.9)):
        add_row(run, step, accuracy)
        keep_best(run, saved(run, step), step)
    assert "step 5, " in keep_best(run, saved(run, 5), 5)  # its newest intact checkpoint is of step 5
    assert kept(run) == "5"
    assert keep_best(run, [], 0) == "" and not (run / "best").exists()  # from step 0


# ---- with real ranks and checkpoints


def save_steps(ranks, model: str, folder, event: int) -> int:
    """Saves at steps 1 to 4, of which 2 is best; rank 0 is killed just before its event-th file operation that makes
    step 2 the best. Returns how many there were."""

    def is_of_the_best(name: str, args: tuple) -> bool:
        return name in ("os.mkdir", "os.link", "os.rename", "os.symlink", "shutil.rmtree") and "best" in str(args)

    saver, _ = begin(ranks, model, str(folder))
    for step, accuracy in enumerate((0.3, 0.8, 0.5, 0.5), 1):
        if ranks.rank == 0:
            add_row(saver.run.folder, step, accuracy)
        ranks.barrier()
        change(saver)
        if step == 2:
            found = watch_files(is_of_the_best, kill_at=0 if ranks.rank else event)
        saver.save(step, is_final=step == 4)
        if step == 2:
            num_operations = len(found)
    return num_operations


def test_the_best_outlives_its_checkpoint_and_a_start_has_nothing_to_say(tiny_model_dir, tmp_path):
    run_ranks(2, save_steps, str(tiny_model_dir), tmp_path, 0)
    checkpoints = tmp_path / "run" / "checkpoints"
    names = ["best_000002", "latest", "step_000003", "step_000004"]
    assert sorted(path.name for path in checkpoints.iterdir()) == names
    assert (tmp_path / "run" / "best").resolve() == checkpoints / "best_000002"
    weights = [path.joinpath("model.safetensors").read_bytes() for path in (tmp_path / "run/best", tmp_path / "run/hf")]
    assert weights[0] != weights[1]
    assert run_ranks(2, begin_again, str(tiny_model_dir), str(tmp_path)) == [(4, []), (4, [])]


@pytest.mark.slow
def test_a_kill_in_the_choice_is_made_good_by_the_next_start(tiny_model_dir, tmp_path):
    model = str(tiny_model_dir)
    num_events, _ = run_ranks(2, save_steps, model, tmp_path / "whole", 0)
    expected = (tmp_path / "whole" / "run" / "best" / "model.safetensors").read_bytes()
    for event in (1, num_events // 2, num_events - 3, num_events - 2, num_events - 1, num_events):
        folder = tmp_path / str(event)
        folder.mkdir()
        run_ranks_until_killed(2, save_steps, model, folder, event)
        assert [step for step, _ in run_ranks(2, begin_again, model, str(folder))] == [2, 2]
        assert (folder / "run" / "best").resolve().name == "best_000002", event
        assert (folder / "run" / "best" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize(
    ("changes", "valid", "reasons"),
    [
        ({}, "valid.jsonl", ""),
        ({}, "", "data.valid is empty"),
        ({"validate_every": 0}, "valid.jsonl", "run.validate_every=0"),
        ({"save_hf_every": 0}, "", "data.valid is empty, run.save_hf_every=0"),
        ({"keep_best": False, "validate_every": 0}, "", ""),
    ],
)
def test_a_run_that_will_have_no_best_model_says_so_at_the_start(changes, valid, reasons):
    """Others found out at the end: ashleve/lightning-hydra-template#390, i-machine-think/machine#72."""
    said = why_no_best(RunConfig(name="mine", **changes), valid, num_steps=100)
    expected = f"there will be no runs/mine/best ({reasons}): docs/data.md#hold-some-rows-out"
    assert said == (expected if reasons else "")
    assert "\n## Hold some rows out\n" in (ROOT / "docs" / "data.md").read_text()


@pytest.mark.parametrize(
    ("changes", "num_steps", "is_said"),
    [
        ({"validate_every": 10, "save_every": 15}, 30, True),
        ({"validate_every": 10, "save_every": 15}, 31, False),  # step 30 can be chosen
        ({"validate_every": 10, "save_every": 5, "save_hf_every": 3}, 25, True),
        ({"validate_every": 10, "save_every": 5}, 20, False),
        ({"validate_every": 10, "save_every": 15}, 8, False),  # a short run has nothing to choose from
        ({"validate_every": 10, "save_every": 0}, 30, False),  # its last step alone is saved, as was asked for
    ],
)
def test_intervals_that_never_meet_are_told_at_the_start(changes, num_steps, is_said):
    """huggingface/transformers PR 12786 refuses them; here the best was the last step, and nothing told."""
    said = why_no_best(RunConfig(name="mine", **changes), "valid.jsonl", num_steps)
    assert said.startswith("runs/mine/best will be the last step: ") == is_said == bool(said)


def test_scores_of_other_questions_are_not_compared(tmp_path):
    """Here no later score could beat the first ones. (In allenai/allennlp PR 359 a resumed run forgot its best.)"""
    run = tmp_path / "run"
    for step, accuracy in ((5, 0.9), (10, 0.8)):  # of the first fifty questions
        add_row(run, step, accuracy)
        keep_best(run, saved(run, step), step)
    changes = {"data.num_valid_prompts": [50, 0]}
    (run / "changes.jsonl").write_text(json.dumps({"step": 10, "changes": changes}) + "\n")
    assert keep_best(run, saved(run, 10), 10) == "" and kept(run) == "5"  # until there is another validation
    for step, accuracy in ((15, 0.5), (20, 0.6), (25, 0.55)):
        add_row(run, step, accuracy)
        said = keep_best(run, saved(run, step), step)
        assert kept(run) == {15: "15"}.get(step, "20")
    assert said == ""
    assert sorted(path.name for path in (run / "checkpoints").glob("best_*")) == ["best_000005", "best_000020"]
