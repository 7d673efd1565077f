"""One run of RL that is killed again and again, each time at another place, and ends as the run that was never killed.

docs/training.md has the table of what happens at each of these places.
"""

from pathlib import Path

import pytest
from helpers.models import searching_model
from helpers.runs import differing
from helpers.saving import tensors_of
from helpers.toy_run import build_toy_world, train, train_and_kill

# What is called when the rank dies, at which call since the start of the process, and which rank.
SAVE = [
    ("begin of a save", "arpo.checkpoint.checkpoints:Checkpoints.write", 2, 1),
    ("files of a save", "arpo.checkpoint.writer:MeasuredFiles.create_stream", 2, 1),
    ("manifest", "arpo.checkpoint.manifest:write", 2, 0),
    ("rename done, pointer not", "arpo.checkpoint.manifest:sync", 16, 0),
]
EXPORT = [
    ("weights of an export", "safetensors.torch:save_file", 2, 0),
    ("link to an export", "arpo.checkpoint.export:point_to", 2, 0),
]
PLACES = [
    ("loading of the model", "arpo.model:load_policy", 1, 1),
    ("start of the engine", "arpo.engine:Engine.__init__", 1, 0),
    ("validation before step 1", "arpo.sampling.sampler:Sampler.run", 1, 1),
    ("step 1, which nothing was saved before", "arpo.update:fill_advantages", 1, 0),
    ("rollout", "arpo.engine:Engine.step", 30, 0),
    ("tool call", "arpo.tools.base:ToolRunner.start", 3, 1),
    ("reward", "arpo.rewards:score_groups", 3, 0),
    ("exchange of the trajectories", "arpo.engine.team:Team.all_gather_groups", 3, 1),
    ("logprobs before the update", "arpo.update:fill_old_logprobs", 3, 0),
    ("advantages", "arpo.update:fill_advantages", 2, 1),
    ("backward pass done", "arpo.update:clip_grad_norm", 3, 0),
    ("weight sync", "arpo.engine:Engine.sync_weights", 3, 1),
    ("log of the step", "arpo.log.run_log:RunLog.scalars", 2, 0),
    ("trajectory dump", "arpo.log.dumps:DumpWriter._write", 2, 0),
    *SAVE,
    ("loading of a checkpoint", "torch.distributed.checkpoint:load", 1, 1),
    ("begin of an export", "arpo.checkpoint.export:write_hf", 2, 0),
    *EXPORT,
    ("end of the run", "arpo.log.run_log:RunLog.finish", 1, 0),
]
OF_THE_THREAD = [
    *SAVE,
    *EXPORT,
    ("a step beside a save", "arpo.update:fill_advantages", 3, 1),
    ("next save, which waits for the one before", "arpo.checkpoint:Saver.wait", 3, 0),
    ("end of the run", "arpo.log.run_log:RunLog.finish", 1, 0),
]


FLAGS = (
    "--run.num_steps", "24", "--run.validate_every", "6", "--run.save_every", "1", "--run.dump_every", "1",
    "--rollout.group_size", "4", "--rollout.max_response_tokens", "32", "--branching.num_initial_rollouts", "2",
    "--optim.lr", "1e-3",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = build_toy_world(tmp_path_factory.mktemp("world"))
    searching_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def whole(world) -> Path:
    """The run that is never killed."""
    assert train(world, "whole", *FLAGS, ranks=2)[-1]["step"] == 24
    return world / "runs" / "whole"


def check(whole: Path, killed: Path) -> None:
    """They have the same numbers, the same weights, and the same moments of them."""
    assert differing(whole, killed) == []
    newest, expected = (run / "checkpoints" / "step_000024" for run in (killed, whole))
    weights = [(run / "hf" / "model.safetensors").read_bytes() for run in (whole, killed)]
    assert weights[0] == weights[1] and (killed / "hf").resolve() == newest / "hf"
    assert tensors_of(newest) == tensors_of(expected) and len(tensors_of(newest)) == 2


@pytest.mark.slow
def test_a_run_that_is_killed_at_every_place_ends_as_the_one_that_never_was(world, whole):
    """Every step is saved, so each start goes on a step or two, or none, until it is killed in its turn."""
    train_and_kill(world, "killed", *FLAGS, places=PLACES)
    check(whole, world / "runs" / "killed")


@pytest.mark.slow
def test_so_does_one_that_saves_beside_its_steps_with_moments_in_host_memory(world, whole):
    own = "--run.async_save", "True", "--run.save_hf_every", "2", "--optim.offload", "True"  # which change no number
    train_and_kill(world, "beside", *FLAGS, *own, places=OF_THE_THREAD)
    check(whole, world / "runs" / "beside")
