"""When a save fails, and when a run was killed in an export: real ranks, real limits of the file system, real kills."""

import resource
import shutil
import signal
import sys

import pytest
from helpers.ranks import mesh_of_one, ranks_of, run_ranks, run_ranks_until_killed
from helpers.records import logged
from helpers.saving import begin, begin_again, change, watch_files

from arpo.checkpoint import Saver
from arpo.checkpoint.checkpoints import verify
from arpo.config.sections import RunConfig
from arpo.errors import UserError


def limit_files_to(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


# ---- a full disk


def save_with_limits(ranks, model: str, folder: str, aside: bool) -> list[str]:
    """Saves at steps 1 to 6; on rank 1 files of 10 kB at most from step 2 to 4. What was warned of."""
    saver, _ = begin(ranks, model, folder, async_save=aside)
    with logged() as lines:
        for step in range(1, 7):
            if ranks.rank == 1:
                limit_files_to(10_000 if 2 <= step < 5 else resource.RLIM_INFINITY)
            saver.save(step, is_final=False)
            saver.wait()
    return [line for line in lines if line.startswith("warning")]


@pytest.mark.parametrize("aside", [False, True])
def test_a_save_that_fails_is_one_warning_and_the_next_one_makes_up_for_it(tiny_model_dir, tmp_path, aside):
    first, second = run_ranks(2, save_with_limits, str(tiny_model_dir), str(tmp_path), aside)
    assert [line.split(":")[1] for line in first] == [f" step {step} has no checkpoint" for step in (2, 3, 4)]
    assert all("(rank 1: " in line and "the newest checkpoint is of step 1" in line for line in first)
    assert second == []
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_000005", "step_000006"]
    assert verify(folder / "step_000006") is None
    assert (tmp_path / "run" / "hf").resolve() == folder / "step_000006" / "hf"


def save_until_it_ends(ranks, model: str, folder: str, num_bytes: int, is_final: bool, aside: bool) -> tuple[int, str]:
    """The step whose save ends the run, and its line; rank 0 may write files of `num_bytes` after step 1."""
    saver, _ = begin(ranks, model, folder, async_save=aside)
    saver.save(1, is_final=False)
    saver.wait()
    if ranks.rank == 0:
        limit_files_to(num_bytes)
    for step in range(2, 9):
        try:
            saver.save(step, is_final=is_final)
            saver.wait()
        except UserError as error:
            limit_files_to(resource.RLIM_INFINITY)  # for this value itself
            return step, str(error)
    return 0, ""


@pytest.mark.parametrize(
    ("num_bytes", "is_final", "aside", "step"),
    [
        (0, True, False, 2),  # not even the random states
        (10_000, False, False, 5),  # the fourth in a row
        (10_000, False, True, 5),
        (10_000, True, True, 2),
    ],
)
def test_a_last_save_that_fails_ends_the_run_on_all_ranks(tiny_model_dir, tmp_path, num_bytes, is_final, aside, step):
    ends = run_ranks(2, save_until_it_ends, str(tiny_model_dir), str(tmp_path), num_bytes, is_final, aside)
    assert ends[0] == ends[1]
    assert ends[0][0] == step and f"step {step} has no checkpoint: " in ends[0][1] and "\n" not in ends[0][1]
    assert "the newest checkpoint is of step 1; make space" in ends[0][1]
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_000001"]
    assert verify(folder / "step_000001") is None


def save_with_a_full_disk_in_the_export(ranks, model: str, folder: str) -> str:
    """Rank 0's files are limited to less than a weights file from the first file of the export on."""
    saver, _ = begin(ranks, model, folder)

    def limit(name: str, args: tuple) -> None:
        if name == "os.mkdir" and str(args[0]).endswith("hf.tmp") and ranks.rank == 0:
            limit_files_to(10_000)

    sys.addaudithook(limit)
    try:
        saver.save(1, is_final=True)
    except UserError as error:
        limit_files_to(resource.RLIM_INFINITY)
        return str(error)
    return ""


def test_an_export_that_fails_is_named_on_all_ranks_and_done_at_the_next_start(tiny_model_dir, tmp_path):
    errors = run_ranks(2, save_with_a_full_disk_in_the_export, str(tiny_model_dir), str(tmp_path))
    assert errors[0] == errors[1] and "step 1 has no Hugging Face folder: " in errors[0], errors
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    assert verify(checkpoint) is None and not list(checkpoint.glob("hf*"))
    assert [step for step, _ in run_ranks(2, begin_again, str(tiny_model_dir), str(tmp_path))] == [1, 1]
    assert (tmp_path / "run" / "hf").resolve() == checkpoint / "hf" and (checkpoint / "hf" / "config.json").exists()


# ---- an export with every n-th save


def exports_of(ranks, model: str, folder: str, steps: tuple[int, ...]) -> list[tuple[list[int], list[int], int]]:
    """After each save: the steps of the checkpoints, of those with an export, and the step that RUN/hf points to."""
    saver, _ = begin(ranks, model, folder, save_hf_every=2, save_every=5)

    def now() -> tuple[list[int], list[int], int]:
        there = sorted(saver.checkpoints.all())
        linked = int(saver.link.resolve().parent.name[-6:]) if saver.link.exists() else 0
        return [int(p.name[-6:]) for p in there], [int(p.name[-6:]) for p in there if (p / "hf").exists()], linked

    found = []
    for step in steps:
        change(saver)
        saver.save(step, is_final=step == 33)
        found.append(now())
    return found


def test_every_second_save_has_an_export_and_the_newest_that_has_one_stays_with_it(tiny_model_dir, tmp_path):
    [found] = run_ranks(1, exports_of, str(tiny_model_dir), str(tmp_path), (5, 10, 15, 20, 25, 30, 33))
    assert found == [
        ([5], [], 0),
        ([5, 10], [10], 10),
        ([10, 15], [10], 10),
        ([10, 15, 20], [10, 20], 20),
        ([20, 25], [20], 20),
        ([20, 25, 30], [20, 30], 30),
        ([30, 33], [30, 33], 33),
    ]


def test_a_start_after_a_checkpoint_without_an_export_makes_one(tiny_model_dir, tmp_path):
    run_ranks(1, exports_of, str(tiny_model_dir), str(tmp_path), (5, 10, 15))
    [(step, _)] = run_ranks(1, begin_again, str(tiny_model_dir), str(tmp_path))
    assert step == 15
    assert (tmp_path / "run" / "hf").resolve() == tmp_path / "run" / "checkpoints" / "step_000015" / "hf"


# ---- Ctrl-C


def save_interrupted(ranks, model: str, folder: str) -> str:
    """A save in which rank 1 gets a SIGINT as it opens its first file of tensors; how it ended."""
    saver, _ = begin(ranks, model, folder)

    def interrupt(name: str, args: tuple) -> None:
        if name == "open" and str(args[0]).endswith(".distcp") and ranks.rank == 1:
            signal.raise_signal(signal.SIGINT)

    sys.addaudithook(interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        saver.save(1, is_final=False)
    except KeyboardInterrupt:
        return "interrupted"
    return "saved, or warned"


def test_ctrl_c_in_a_save_is_no_failed_save(tiny_model_dir, tmp_path):
    """torch catches it among the failures of a save, after which a run would go on."""
    assert run_ranks(2, save_interrupted, str(tiny_model_dir), str(tmp_path)) == ["interrupted"] * 2


# ---- a kill in the export


def save_twice(ranks, model: str, folder: str, event: int) -> int:
    """Saves at step 1 and, other weights, at 2; rank 0 is killed just before its event-th file operation of the second
    export. Returns how many there were."""
    saver, _ = begin(ranks, model, folder)
    saver.save(1, is_final=False)
    change(saver)

    def is_of_the_export(name: str, args: tuple) -> bool:
        is_a_change = name in ("open", "os.mkdir", "os.rename", "os.symlink")
        return is_a_change and ("000002/hf" in str(args) or "hf.tmp" in str(args))

    found = watch_files(is_of_the_export, kill_at=0 if ranks.rank else event)
    saver.save(2, is_final=True)
    return len(found)


@pytest.mark.slow
def test_a_kill_anywhere_in_the_last_export_is_made_good_by_the_next_start(tiny_model_dir, tmp_path):
    model = str(tiny_model_dir)
    num_events, _ = run_ranks(2, save_twice, model, str(tmp_path / "whole"), 0)
    expected = (tmp_path / "whole" / "run" / "hf" / "model.safetensors").read_bytes()
    assert num_events > 5
    for event in (1, num_events // 2, num_events - 2, num_events - 1, num_events):
        folder = tmp_path / str(event)
        folder.mkdir()
        run_ranks_until_killed(2, save_twice, model, str(folder), event)
        link = folder / "run" / "hf"
        assert link.resolve().parent.name == "step_000001", event  # what nobody may take for the newest
        assert [step for step, _ in run_ranks(2, begin_again, model, str(folder))] == [2, 2]
        assert link.resolve().parent.name == "step_000002"
        assert (link / "model.safetensors").read_bytes() == expected
        assert {path.name for path in link.iterdir()} == {p.name for p in (tmp_path / "whole/run/hf").iterdir()}


def test_a_start_says_that_it_renews_and_is_silent_where_nothing_is_to_do(tiny_model_dir, tmp_path):
    run_ranks(1, save_twice, str(tiny_model_dir), str(tmp_path), 0)
    link = tmp_path / "run" / "hf"
    assert run_ranks(1, begin_again, str(tiny_model_dir), str(tmp_path)) == [(2, [])]
    shutil.rmtree(link.resolve())
    link.unlink()
    link.symlink_to("checkpoints/step_000001/hf")
    [(_, [line])] = run_ranks(1, begin_again, str(tiny_model_dir), str(tmp_path))
    assert f"{link} is renewed" in line and (link.resolve() / "config.json").exists()


@pytest.mark.parametrize("name", ["hf", "best"])
def test_a_folder_in_the_place_of_a_link_is_said_before_training_and_not_after(tmp_path, name):
    """As rsync -L leaves it. fgnt/padertorch#75: a file where the best checkpoint's link should be."""
    (tmp_path / "run" / name).mkdir(parents=True)
    words = rf"run/{name}: a folder, where the link .*; move it away"
    with mesh_of_one() as mesh, pytest.raises(UserError, match=words):
        Saver(RunConfig(name="run", dir=str(tmp_path)), ranks_of(mesh), source="")


# ---- weights that are NaN


def save_poisoned(ranks, model: str, folder: str, aside: bool) -> tuple[str, bool]:
    """What step 2 says whose weights are NaN on rank 1 alone, and whether a resume finds step 1."""
    saver, _ = begin(ranks, model, folder, async_save=aside)
    saver.save(1, is_final=False)
    if ranks.rank == 1:
        next(saver.policy.parameters()).data.to_local().view(-1)[0] = float("inf")
    with pytest.raises(UserError) as caught:
        saver.save(2, is_final=True)
    return str(caught.value), begin(ranks, model, folder)[1] == 1


@pytest.mark.parametrize("aside", [False, True])
def test_weights_that_are_not_finite_are_never_saved(tiny_model_dir, tmp_path, aside):
    """pocket-tts PR#262, micromind#64: the last good checkpoints were deleted for those of NaN, and resumed from."""
    first, second = run_ranks(2, save_poisoned, str(tiny_model_dir), str(tmp_path), aside)
    assert first == second and first[1]
    assert first[0].startswith("step 2: weights are NaN or infinite, so nothing is saved; continue at step 1")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_000001"]
