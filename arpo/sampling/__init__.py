"""The rollouts of a training: the share of each rank in the prompts, and the moment when a step is full.

    rollouts.next(step)      draws prompts, has them sampled and scored, and returns the step's groups, on every rank

    source                   the step ends on a rank when
    ------------------------------------------------------------------------------------------------------------------
    OneRollout, dealt        its share of the prompts is finished; the ranks meet at the exchange
    OneRollout, pulled       the common queue is empty, and the prompts it took are finished
    Refilled                 enough groups of all ranks are mixed (advantage.dead_groups=resample); the rest is cut off
    CarryOver                enough groups of all ranks are finished (rollout.carry_over); the rest goes on next step

A source (driver.py) decides which prompt starts next, and when the sampling is done. `drive`, there, is the only loop.
A validation is a source too; its groups go to the scores, not to the update.

The invariant: no drawn prompt is lost. Its group is in exactly one step, or it is drawn again. A step in which tools or
rewards failed is not trained on (health.py). A sample depends on seed, step, prompt and path only. The rank changes
nothing but time.

`BranchingSignal`, `BranchWorth` and `ToolHealth` watch the groups of each step.
"""

from arpo.sampling.rollouts import Batch, Rollouts
from arpo.sampling.sampler import Sampler

__all__ = ["Batch", "Rollouts", "Sampler"]
