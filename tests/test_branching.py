import math
import random

import pytest

from arpo.branching import (
    RULES,
    BranchBudget,
    Evidence,
    decide,
    exact_turn_entropy,
    initial_rollouts,
    neutral_probability,
    turn_entropy,
    upstream_branch_probability,
    upstream_turn_entropy,
)
from arpo.options import PER_NAT, RELEASED_WEIGHT, BranchingConfig, RolloutConfig
from arpo.start.checks import forecast
from arpo.trajectory import BranchDecision


def seen(entropy: float, root_entropy: float, consecutive: int = 0) -> Evidence:
    """What a rule sees of a turn, where only the means matter."""
    return Evidence((), (), entropy, root_entropy, consecutive, turn=1)


def test_turn_entropy_is_the_mean_over_the_first_k_tokens_or_those_that_there_are():
    assert (exact_turn_entropy([1.5, 0.0, 100.0], 2), exact_turn_entropy([1.5], 20)) == (0.75, 1.5)


def test_upstream_entropy_is_a_sum_over_at_most_twenty_tokens_and_ten_candidates():
    row = [math.log(0.05)] * 11
    released = 20 * 10 * -0.05 * math.log(0.05) / math.log(1000)
    assert upstream_turn_entropy([row] * 30, 1000) * PER_NAT == pytest.approx(released)
    assert released > 1.0


def test_upstream_entropy_of_twenty_tokens_is_their_mean_in_nats_under_the_papers_vocabulary():
    row = [math.log(0.1)] * 10
    assert upstream_turn_entropy([row] * 20, 151_669) == pytest.approx(math.log(10), rel=1e-3)
    assert upstream_turn_entropy([row] * 5, 151_669) == pytest.approx(math.log(10) / 4, rel=1e-3)  # as released


@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 151_669])
def test_the_released_decisions_come_out_of_the_weight_per_nat(vocab_size):
    """2,000 random turns: ours with the default weight, against the released 0.2 on sums / ln V."""
    cfg, rng, both = BranchingConfig(compat="upstream"), random.Random(vocab_size), [0, 0]
    for _ in range(2_000):
        turns = [[[-rng.expovariate(0.5) for _ in range(10)] for _ in range(rng.randint(1, 25))] for _ in range(2)]
        root, after = (turn_entropy((), turn, cfg, vocab_size) for turn in turns)
        sums = [sum(-math.exp(lp) * lp for row in turn[:20] for lp in row) / math.log(vocab_size) for turn in turns]
        released = min(max(0.5 + 0.2 * (sums[1] - sums[0]), 0.0), 1.0)
        seed = rng.random()
        wants, probability, _ = decide(seen(after, root), cfg, random.Random(seed))
        assert probability == pytest.approx(released, abs=1e-12)
        assert wants == (random.Random(seed).random() < released)
        both[wants] += 1
    assert min(both) > 200


@pytest.mark.parametrize(
    "selector, options, delta, consecutive, expected",
    [
        ("arpo", {}, 0.0, 4, 0.5),  # which has no penalty
        ("arpo", {}, 0.2, 0, 0.567),  # the released constants: the table of ALGORITHMS 2
        ("arpo", {}, 0.5, 0, 0.668),
        ("arpo", {}, 1.0, 0, 0.835),
        ("arpo", {}, 5.0, 0, 1.0),
        ("arpo", {}, -5.0, 0, 0.0),
        ("arpo", {"base": 0.2, "weight": 1.0}, 0.0, 0, 0.2),
        ("random", {"base": 0.25, "weight": 5.0}, 1.0, 3, 0.25),
        ("aepo", {}, 0.0, 4, 0.4),
        ("aepo", {"weight": 0.2}, 0.5, 2, 0.54),
        ("aepo", {}, 0.0, 40, 0.0),
        ("aepo", {"compat": "upstream"}, 0.0, 1, 0.4737),  # the released gate
        ("aepo", {"compat": "upstream"}, 0.0, 5, 0.3333),
        ("aepo", {"compat": "upstream"}, 0.0, 10, 0.0),
        ("aepo", {"compat": "upstream"}, 0.0, 20, 0.0),
    ],
)
def test_each_rule_gives_the_published_probabilities(selector, options, delta, consecutive, expected):
    cfg = BranchingConfig(selector=selector, **options)
    assert RULES[selector](seen(0.3 + delta, 0.3, consecutive), cfg) == pytest.approx(expected, abs=5e-4)


def test_upstream_probability_is_what_the_released_gate_does_in_100000_draws():
    rng = random.Random(0)
    for delta, consecutive in [(0.3, 0), (-0.4, 2), (1.0, 6)]:
        damping = 1 - 0.05 * consecutive
        gate = sum(min(max((rng.random() + 0.2 * delta) * damping, 0), 1) >= 0.5 for _ in range(100_000)) / 100_000
        ours = upstream_branch_probability(delta, weight=0.2, consecutive=consecutive, penalty=0.05)
        assert ours == pytest.approx(gate, abs=0.006)


def test_initial_rollouts_span_the_published_range():
    assert [initial_rollouts(16, d, 0.0, beta=0.5) for d in (-1.5, 0.0, 1.5)] == [6, 9, 11]
    published = {-2.0: 3, -1.0: 5, -0.5: 7, -0.2: 8, 0.0: 9, 0.2: 9, 0.5: 10, 1.0: 12, 2.0: 14}  # ALGORITHMS 2
    beta = BranchingConfig().budget_weight
    assert {nats: initial_rollouts(16, nats, 0.0, beta=beta) for nats in published} == published
    assert initial_rollouts(16, 1000.0, 0.0, beta=1.0) == 16
    assert initial_rollouts(1, -5.0, 5.0, beta=1.0) == 1
    assert initial_rollouts(16, 0.0, 1.0, beta=1e6) == 1 and initial_rollouts(16, 1.0, 0.0, beta=1e6) == 16


def test_threshold_rule_branches_exactly_above_tau_and_draws_nothing():
    cfg = BranchingConfig(threshold=0.5)
    assert decide(seen(0.31, 0.3), cfg, random.Random(0)) == (True, pytest.approx(0.5 + 0.01 * RELEASED_WEIGHT), None)
    assert decide(seen(0.30, 0.3), cfg, random.Random(0))[0] is False


def test_neutral_probability_is_p_without_the_entropies():
    decision = BranchDecision(2.0, 1.0, 0.9, 0.1, consecutive=4, budget_left=1, num_children=1, outcome="branched")
    for cfg, expected in [
        (BranchingConfig(), 0.5),
        (BranchingConfig(selector="aepo"), 0.4),
        (BranchingConfig(selector="aepo", compat="upstream"), 1 - 0.5 / 0.8),
    ]:
        assert neutral_probability(decision, cfg) == pytest.approx(expected)


@pytest.mark.parametrize(
    "branching, line",
    [
        (BranchingConfig(selector="none"), "none, 16 roots a prompt"),
        (
            BranchingConfig(selector="top_h", num_initial_rollouts=2),
            "2 roots, 14 forks a prompt by top_h in 2 rounds, after up to 3 calls",
        ),
        (  # 8 roots decide three times, and their 8 children, of the first calls, twice
            BranchingConfig(),
            "at least 8 roots, at most 8 forks a prompt in at most 40 decisions by arpo, after up to 3 calls; the rest "
            "are fresh roots",
        ),
        (
            BranchingConfig(selector="aepo", dynamic_budget=True),
            "at least 1 root, at most 15 forks a prompt in at most 48 decisions by aepo, after up to 3 calls; the "
            "rest are fresh roots",
        ),
    ],
)
def test_the_forecast_says_how_many_roots_forks_and_decisions_a_prompt_has(branching, line):
    assert forecast(RolloutConfig(), branching) == f"branching: {line}"


def ledger(total_children: int | None, last_turn: int, num_roots: int) -> BranchBudget:
    """Each root may branch once after its first turn."""
    budget = BranchBudget(total_children, max_children=1, last_turn=last_turn)
    for root in range(num_roots):
        budget.expect((root,), 1)
    return budget


def test_first_round_claims_are_granted_without_waiting_when_the_budget_covers_everybody():
    budget = ledger(8, 3, num_roots=8)
    budget.decided(1, (7,), wants=True)
    assert budget.settle() == [(1, (7,), [(7, 0)])]


def test_a_claim_waits_while_an_earlier_one_may_still_take_the_last_place():
    budget = ledger(1, 1, num_roots=2)
    budget.decided(1, (1,), wants=True)
    assert budget.settle() == []
    budget.decided(1, (0,), wants=False)
    assert budget.settle() == [(1, (1,), [(1, 0)])]


def test_nothing_is_granted_before_the_budget_is_known():
    budget = ledger(None, 3, num_roots=1)
    budget.decided(1, (0,), wants=True)
    assert budget.settle() == []
    budget.total_children = 1
    assert budget.settle() == [(1, (0,), [(0, 0)])]
