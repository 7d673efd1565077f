"""Who samples what, and when is a step full: the one owner of that question.

    rollouts.next(step)      draws prompts, has them sampled and scored, and returns the step's groups, on every rank

    who waits for whom       a step ends here when
    ------------------------------------------------------------------------------------------------------------------
    OneRollout, dealt        this rank's share of the prompts is whole; ranks meet at the exchange
    OneRollout, pulled       the common queue is empty, and what this rank took of it is whole
    Refilled                 enough groups of all ranks can teach (advantage.dead_groups=resample); the rest is cut off
    CarryOver                enough groups of all ranks are whole (rollout.carry_over); the rest stays, and goes on

A source (driver.py) says which prompt begins and when it is done; `drive`, there, is the only loop. A validation is
one too, whose groups go to the scores instead of the update.

The invariant: each prompt that was drawn is trained on exactly once, or is drawn again. What a rank samples depends on
seed, step, prompt and path only, so who sampled it changes nothing but time.

`BranchingSignal` and `ToolHealth` hear of each whole step.
"""

from arpo.sampling.rollouts import Batch, Rollouts
from arpo.sampling.sampler import Sampler

__all__ = ["Batch", "Rollouts", "Sampler"]
