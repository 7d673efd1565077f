"""What the branching signal says of itself. All numbers by hand."""

import pytest

from arpo.branching_signal import BranchingSignal, signal_metrics
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


def test_a_rule_of_ones_own_has_no_signal_for_its_p_without_entropies_is_unknown(tmp_path):
    (tmp_path / "rules.py").write_text("def constant(evidence, cfg):\n    return 0.9\n")
    own = BranchingConfig(selector=f"{tmp_path / 'rules.py'}:constant")
    values = BranchingSignal(own).add(groups(trajectory(1.0, decided(1.6, 0.9), decided(0.7, 0.9))))
    assert "branching/signal" not in values and values["branching/probability_std"] == 0.0


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


def test_a_run_whose_entropies_do_nothing_in_three_steps_with_decisions_is_told_so_once():
    signal, warnings = BranchingSignal(BranchingConfig()), []
    for step in range(9):
        decides = step >= 4
        signal.add(groups(trajectory(1.0, decided(1.01, 0.51) if decides else Turn(0, entropy=1.0))))
        warnings.append(signal.warning)
    assert [bool(warning) for warning in warnings] == [False] * 6 + [True] + [False] * 2
    assert "of 3 steps moved P(branch) by 0.010 at most" in warnings[6] and "branching.threshold" in warnings[6]


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
