"""What the branching signal keeps of earlier steps, and what it says of itself. All numbers by hand."""

import json

import pytest

from arpo.branching_signal import MIN_DECISIONS, WINDOW_STEPS, BranchingSignal, signal_metrics
from arpo.options import BranchingConfig
from arpo.trajectory import BranchDecision, Group, Prompt, StopReason, Trajectory, Turn


def decided(entropy: float, probability: float = 0.5, root_entropy: float = 1.0, consecutive: int = 0) -> Turn:
    record = BranchDecision(entropy, root_entropy, probability, 0.3, consecutive, 4, 1, "branched")
    return Turn(0, entropy=entropy, decision=record)


def trajectory(reward: float | None, *turns: Turn, root_entropy: float = 1.0, **fields) -> Trajectory:
    parts = {} if reward is None else {"accuracy": max(reward, 0.0)}
    turns = [Turn(0, entropy=root_entropy), *turns]
    return Trajectory("p", "0", turns=turns, reward=reward, reward_parts=parts, **fields)


def groups(*trajectories: Trajectory) -> list[Group]:
    return [Group(Prompt("p", [], []), [t]) for t in trajectories]


def step_of(values: list[float]) -> list[Group]:
    return groups(*(trajectory(1.0, decided(value)) for value in values))


def test_nothing_is_compared_before_enough_decisions_and_the_user_is_told():
    signal = BranchingSignal(BranchingConfig(selector="standardized"))
    assert signal.statistics is None
    signal.add(step_of([0.1] * (MIN_DECISIONS - 1)))
    assert signal.statistics is None
    assert signal.warning == "P(branch) was branching.base: standardized had 0 earlier decisions, and needs 32"
    signal.add(step_of([0.1]))
    assert "had 31 earlier decisions" in signal.warning and signal.statistics is not None
    signal.add(groups(trajectory(1.0, decided(0.1, probability=0.6))))
    assert signal.warning == ""


def test_statistics_are_of_the_signal_that_was_asked_for():
    values = [0.0, 0.1, 0.2, 0.3] * 10
    for option, shift in [("entropy", 0.0), ("delta", -1.0)]:
        signal = BranchingSignal(BranchingConfig(selector="quantile", signal=option, branch_rate=0.25))
        signal.add(step_of(values))
        known = signal.statistics
        assert known.count == 40
        assert known.mean == pytest.approx(0.15 + shift)
        assert known.std == pytest.approx((40 / 39 * 0.0125) ** 0.5)  # variance of 0, .1, .2, .3: 0.0125
        assert known.bound == pytest.approx(0.2 + shift)  # exceeded by a quarter of them


@pytest.mark.parametrize("rate, share", [(0.0, 0.0), (0.1, 0.1), (0.5, 0.5), (0.99, 0.99)])
def test_the_bound_is_exceeded_by_the_wanted_share(rate, share):
    signal = BranchingSignal(BranchingConfig(selector="quantile", branch_rate=rate))
    values = [i / 100 for i in range(100)]
    signal.add(step_of(values))
    assert sum(value > signal.statistics.bound for value in values) / 100 == pytest.approx(share)


@pytest.mark.parametrize(
    "num_decisions, children, share",
    [(8, 1, 0.5), (16, 1, 0.25), (16, 2, 0.125), (4, 1, 1.0), (2, 1, 1.0)],
)
def test_the_automatic_rate_is_the_budget_over_the_decisions(num_decisions, children, share):
    cfg = BranchingConfig(selector="quantile", branch_rate=None, max_branches_per_turn=children)
    signal = BranchingSignal(cfg)
    many = Trajectory("p", "0", turns=[decided(i / 100) for i in range(num_decisions)])  # 4 may fork, by their records
    none = Trajectory("q", "0", turns=[Turn(0, entropy=0.5)])  # answered at once: no decision could use its budget
    for _ in range(4):
        signal.add(groups(*[many] * 8, none))
    values = [value for step in signal.state for value in step]
    above = sum(value > signal.statistics.bound for value in values) / len(values)
    assert above == pytest.approx(min(share, 1 - 1 / num_decisions))  # the smallest value is above none
    again = BranchingSignal(cfg, *json.loads(json.dumps([signal.state, signal.budgets])))
    assert again.statistics == signal.statistics and signal.budgets == [32] * 4


def test_the_window_forgets_and_a_resumed_run_remembers_the_same():
    cfg = BranchingConfig(selector="standardized")
    signal = BranchingSignal(cfg)
    signal.add(step_of([100.0] * 40))
    for number in range(WINDOW_STEPS):
        assert signal.statistics.mean > 1.0
        signal.add(step_of([0.1 * number] * 5))
    assert signal.statistics.mean == pytest.approx(0.45) and signal.statistics.count == 5 * WINDOW_STEPS
    again = BranchingSignal(cfg, json.loads(json.dumps(signal.state)))
    assert again.statistics == signal.statistics
    signal.add(step_of([0.7]))
    again.add(step_of([0.7]))
    assert again.statistics == signal.statistics


def test_signal_is_the_mean_distance_of_p_from_where_it_would_be():
    values = BranchingSignal(BranchingConfig()).add(
        groups(trajectory(1.0, decided(1.6, 0.7), decided(0.7, 0.4)), trajectory(0.0, decided(1.0, 0.5)))
    )
    assert values["branching/signal"] == pytest.approx((0.2 + 0.1 + 0.0) / 3)
    assert values["branching/probability_std"] == pytest.approx(0.124722, abs=1e-6)  # .7 .4 .5: variance 0.14 / 9
    assert values["branching/delta_entropy_std"] == pytest.approx(0.374166, abs=1e-6)  # .6 -.3 0: mean .1, var .14


def test_aepos_penalty_is_not_taken_for_a_signal():
    aepo = BranchingConfig(selector="aepo")
    damped = decided(1.0, 0.5 * 0.9, consecutive=2)
    assert BranchingSignal(aepo).add(groups(trajectory(1.0, damped)))["branching/signal"] == pytest.approx(0.0)


def test_what_the_signal_is_worth():
    """Failures at H 3 and 4, successes at 1 and 2: correlation 2 / sqrt(5); the root's entropies turn it round."""
    values = BranchingSignal(BranchingConfig(selector="none")).add(
        groups(
            trajectory(1.0, Turn(0, entropy=1.0)),
            trajectory(1.0, Turn(0, entropy=2.0)),
            trajectory(0.0, Turn(0, entropy=3.0), root_entropy=6.0),
            trajectory(-1.0, Turn(0, entropy=4.0), root_entropy=6.0),
        )
    )
    assert values["branching/predicts_failure"] == pytest.approx(2 / 5**0.5)
    assert values["branching/predicts_failure_delta"] == pytest.approx(-3 / 10**0.5)  # 0 1 | -3 -2
    assert (values["branching/failed_low_entropy"], values["branching/failed_high_entropy"]) == (0.0, 1.0)
    assert "branching/signal" not in values  # nothing was decided


def test_how_often_a_trajectory_succeeds_where_it_branched():
    declined = BranchDecision(1.0, 1.0, 0.5, 0.9, 0, 4, 0, "declined")
    values = BranchingSignal(BranchingConfig()).add(
        groups(
            trajectory(1.0, decided(1.0), Turn(0, decision=declined)),
            trajectory(0.0, decided(1.0), decided(1.0)),
            trajectory(-1.0, decided(1.0), stop_reason=StopReason.ERROR),
        )
    )
    assert values["branching/solved_where_branched"] == pytest.approx(1 / 3)
    assert values["branching/solved_where_declined"] == 1.0


def test_whether_a_branch_turns_out_otherwise_where_the_entropy_was_high():
    """H 1 and 2: as the parent; 3 and 4: otherwise. Correlation 2 / sqrt(5). A branch whose call failed is no judge."""
    turns = [Turn(0, entropy=0.5), *(Turn(10 * i, entropy=float(i)) for i in (1, 2, 3, 4))]
    parent = Trajectory("p", "0", turns=turns, reward=1.0)
    rewards = {10: 1.0, 20: 1.0, 30: 0.0, 40: -1.0}
    of_parent = {"parent_id": "0", "turns": [Turn(0, inherited=True)]}
    branches = [Trajectory("p", f"0.{at}", fork_at=at, reward=r, **of_parent) for at, r in rewards.items()]
    lost = Trajectory("p", "0.x", fork_at=10, reward=-1.0, stop_reason=StopReason.ERROR, **of_parent)
    values = signal_metrics([Group(Prompt("p", [], []), [parent, *branches, lost])], BranchingConfig())
    assert values["branching/branches_differ"] == 0.5
    assert values["branching/predicts_difference"] == pytest.approx(2 / 5**0.5)
    alike = signal_metrics([Group(Prompt("p", [], []), [parent, branches[0]])], BranchingConfig())
    assert alike["branching/branches_differ"] == 0.0 and "branching/predicts_difference" not in alike


def test_inherited_turns_and_failures_of_ours_do_not_count():
    values = BranchingSignal(BranchingConfig()).add(
        groups(
            trajectory(1.0, Turn(0, entropy=1.0)),
            trajectory(0.0, Turn(0, entropy=3.0)),
            trajectory(0.0, Turn(0, entropy=0.0, inherited=True)),
            trajectory(-1.0, Turn(0, entropy=0.0), stop_reason=StopReason.ERROR),
            trajectory(None, Turn(0, entropy=0.0)),
        )
    )
    assert values["branching/predicts_failure"] == pytest.approx(1.0)


def test_a_run_whose_entropies_do_nothing_is_told_so_once():
    signal, warnings = BranchingSignal(BranchingConfig()), []
    for _ in range(5):
        signal.add(groups(trajectory(1.0, decided(1.01, 0.51))))
        warnings.append(signal.warning)
    assert [bool(warning) for warning in warnings] == [False, False, True, False, False]
    assert "moved P(branch) by 0.010 at most" in warnings[2] and "branching.selector=standardized" in warnings[2]


def test_neither_steps_without_decisions_nor_late_steps_of_a_resumed_run_are_taken_for_an_inert_signal():
    silent, resumed = BranchingSignal(BranchingConfig()), BranchingSignal(BranchingConfig(), [[0.1] * 40])
    for _ in range(4):
        silent.add(groups(trajectory(1.0, Turn(0, entropy=1.0))))
        resumed.add(groups(trajectory(1.0, decided(1.01, 0.501))))
        assert silent.warning == resumed.warning == ""
    for _ in range(3):
        silent.add(groups(trajectory(1.0, decided(1.01, 0.501))))
    assert "in the first 3 steps" in silent.warning


def test_equal_entropies_say_nothing_of_failure():
    """Eight alike: the quarters are those that come first and last, whatever became of them."""
    rewards = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    values = BranchingSignal(BranchingConfig()).add(groups(*(trajectory(r, Turn(0, entropy=0.5)) for r in rewards)))
    assert (values["branching/failed_low_entropy"], values["branching/failed_high_entropy"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    "cfg, probability",
    [
        (BranchingConfig(), 0.53),
        (BranchingConfig(threshold=0.5), 0.51),  # any rise counts there
        (BranchingConfig(selector="random"), 0.5),
    ],
)
def test_a_run_that_does_what_it_says_is_not_warned(cfg, probability):
    signal = BranchingSignal(cfg)
    for _ in range(4):
        signal.add(groups(trajectory(1.0, decided(1.1, probability))))
        assert signal.warning == ""
