"""One run of RL that is killed again and again, each time at another place, and ends as the run that was never killed.

docs/training.md has the table of what happens at each of these places.
"""

import signal
from functools import partial

import pytest
from helpers.kill import kill_at
from helpers.models import searching_model
from helpers.ranks import run_script, script_on_ranks, wait_for_all
from helpers.runs import differing
from helpers.toy_run import build_toy_world

PLACES = [  # what is called when the rank dies, at which call since the start of the process, and which rank
    ("loading of the model", "arpo.model:load_policy", 1, 1),
    ("start of the engine", "arpo.engine:Engine.__init__", 1, 0),
    ("validation before step 1", "arpo.sampler:Sampler.__call__", 1, 1),
    ("rollout", "arpo.engine:Engine.step", 100, 0),
    ("tool call", "arpo.tools.base:ToolRunner.start", 3, 1),
    ("reward", "arpo.rewards:score_groups", 3, 0),
    ("exchange of the trajectories", "arpo.engine.team:Team.exchange", 3, 1),
    ("logprobs before the update", "arpo.update:fill_old_logprobs", 3, 0),
    ("advantages", "arpo.update:fill_advantages", 2, 1),
    ("backward pass done", "arpo.update:clip_grad_norm", 3, 0),
    ("weight sync", "arpo.engine:Engine.sync_weights", 3, 1),
    ("log of the step", "arpo.log:RunLog.scalars", 2, 0),
    ("trajectory dump", "arpo.dumps:DumpWriter._write", 2, 0),
    ("begin of a save", "arpo.checkpoint.checkpoints:Checkpoints.save", 2, 1),
    ("checksums of a save", "arpo.checkpoint.manifest:measure", 2, 1),
    ("manifest", "arpo.checkpoint.manifest:write", 2, 0),
    ("rename done, pointer not", "arpo.checkpoint.manifest:sync", 14, 0),
    ("loading of a checkpoint", "torch.distributed.checkpoint:load", 1, 1),
    ("begin of an export", "arpo.checkpoint.export:write_hf", 2, 0),
    ("weights of an export", "safetensors.torch:save_file", 2, 0),
    ("link to an export", "arpo.checkpoint.export:point_to", 2, 0),
    ("end of the run", "arpo.log:RunLog.finish", 1, 0),
]


@pytest.mark.slow
def test_a_run_that_is_killed_at_every_place_ends_as_the_one_that_never_was(tmp_path):
    """Every step is saved, so each start goes on a step or two, or none, until it is killed in its turn."""
    world = build_toy_world(tmp_path)
    searching_model(world / "model")
    flags = (str(world / "config.yaml"), "--run.num_steps", "24", "--run.save_every", "1", "--run.validate_every", "3",
             "--run.dump_every", "1", "--optim.lr", "1e-3", "--rollout.max_response_tokens", "32")  # fmt: skip
    run_script("train_rl.py", *flags, "--run.name", "whole")
    flags = (*flags, "--run.name", "killed")
    survived = []
    for name, *where in PLACES:
        with script_on_ranks("train_rl.py", *flags, prepare=partial(kill_at, *where)) as (ranks, output):
            if wait_for_all(ranks, 5) != -signal.SIGKILL:
                survived.append((name, output.read_text()[-2000:]))
    assert survived == []
    run_script("train_rl.py", *flags)
    run = world / "runs" / "killed"
    assert differing(world / "runs" / "whole", run) == []
    weights = [(world / "runs" / name / "hf" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1] and (run / "hf").resolve() == run / "checkpoints" / "step_000024" / "hf"
