"""The noise of a step's gradient, on gradients with a known share of signal."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student

from arpo.options import AdvantageConfig
from arpo.sampling.estimates import jackknife
from arpo.sampling.gradient_noise import (
    SKETCH_SIZE,
    GradientNoise,
    SketchedMinibatch,
    half_advantages,
    prompt_similarity,
    signal_share,
)
from arpo.trajectory import Group, Prompt, StopReason, Trajectory


class Lines:
    """A console that keeps what is said."""

    def __init__(self):
        self.said: list[str] = []

    def line(self, text: str) -> None:
        self.said.append(text)


def test_similarity_and_the_share_of_signal_are_those_of_their_formulas():
    assert prompt_similarity(np.array([[1.0, 0.0], [1.0, 0.0]])) == pytest.approx(1.0)
    assert prompt_similarity(np.array([[1.0, 0.0], [0.0, 1.0]])) == pytest.approx(0.0)
    assert prompt_similarity(np.zeros((3, 2))) is None
    assert signal_share(0.5, 2) == pytest.approx(2 / 3) and signal_share(-0.1, 8) == pytest.approx(0.0, abs=1e-6)


def test_the_jackknife_of_an_exponential_of_the_mean_is_students_interval_of_the_logarithms():
    logs = np.random.default_rng(1).normal(0.3, 0.5, size=12)
    found = jackknife(logs, math.exp)
    half_width = student.ppf(0.975, 11) * logs.std(ddof=1) / math.sqrt(12)
    assert found.value == pytest.approx(math.exp(logs.mean()))
    bounds = [math.exp(logs.mean() - half_width), math.exp(logs.mean() + half_width)]
    assert [found.low, found.high] == pytest.approx(bounds, rel=0.01)


@pytest.mark.parametrize("signal", [0.05, 0.3, 2.0])
def test_the_share_of_signal_is_that_of_gradients_with_a_known_mean_and_noise(signal):
    rng = np.random.default_rng(0)
    mean = np.zeros(40)
    mean[0] = signal**0.5  # |E g|^2 = signal, tr Var g = 1
    units = [prompt_similarity(mean + rng.normal(size=(8, 40)) / 40**0.5) for _ in range(4000)]
    assert np.mean(units) == pytest.approx(signal / (signal + 1), abs=0.01)
    assert signal_share(np.mean(units), 8) == pytest.approx(signal / (signal + 1 / 8), abs=0.05)


# ---- a softmax policy over two moves, whose exact gradient is known


def step_of_bandit(p: float, num_prompts: int, group_size: int, rng: np.random.Generator) -> SketchedMinibatch:
    """A step of GRPO on a policy that is right with probability p: the gradient of log p by its one logit."""
    groups, rows, sketches = [], [], {}
    for index in range(num_prompts):
        right = rng.random(group_size) < p
        z = (right - right.mean()) / (right.std(ddof=1) + 1e-6)
        group = Group(Prompt(str(index), [], []), [])
        for i in range(group_size):
            t = Trajectory(str(index), str(i), stop_reason=StopReason.EOS, reward=float(right[i]))
            score = float(right[i]) - p
            sketches[len(rows)] = np.zeros((2, SKETCH_SIZE), dtype=np.float32)  # as model/sketch.py has them
            sketches[len(rows)][:, 7] = z[i] * score, score
            rows.append((index, t))
            group.trajectories.append(t)
        groups.append(group)
    return SketchedMinibatch(groups, rows, sketches)


def noise_of(
    p: float, num_prompts: int, group_size: int, num_steps: int, **options
) -> tuple[dict[str, float], list[str]]:
    """The metrics of a window of such steps, and what is said."""
    rng, log = np.random.default_rng(1), Lines()
    noise = GradientNoise(AdvantageConfig(), num_prompts, log, **options)
    values: dict[str, float] = {}
    for step in range(num_steps):
        minibatch = step_of_bandit(p, num_prompts, group_size, rng)
        updates = [minibatch] if any(sketch.any() for sketch in minibatch.rows.values()) else []
        values |= noise.of_step(step, minibatch.groups, updates)
    return values, log.said


def exact_share(p: float, num_prompts: int, group_size: int) -> float:
    """The share of signal by Monte Carlo of the group's gradient itself, 50,000 groups."""
    rng = np.random.default_rng(2)
    right = rng.random((50_000, group_size)) < p
    z = (right - right.mean(1, keepdims=True)) / (right.std(1, ddof=1, keepdims=True) + 1e-6)
    gradients = (z * (right - p)).sum(1)
    return gradients.mean() ** 2 / (gradients.mean() ** 2 + gradients.var() / num_prompts)


@pytest.mark.parametrize(("p", "group_size"), [(0.5, 8), (0.1, 8), (0.05, 4)])
def test_share_and_the_steps_with_half_the_group_are_those_of_the_exact_gradient(p, group_size):
    values, _ = noise_of(p, 64, group_size, 40)
    full, half = exact_share(p, 64, group_size), exact_share(p, 64, group_size // 2)
    assert values["gradient/signal_share"] == pytest.approx(full, rel=0.15)
    assert values["gradient/half_group_steps"] == pytest.approx((full / half) ** 0.5, rel=0.1)
    assert values["gradient/half_group_steps_low"] < values["gradient/half_group_steps_high"]


def test_the_advantages_of_a_half_are_those_after_the_kl_penalty():
    """loss.kl_in=reward, as the advantages of the full group are."""
    plain = [Trajectory("p", str(i), reward=float(i % 3)) for i in range(6)]
    charged = [replace(t, reward=t.reward + i, kl_penalty=float(i)) for i, t in enumerate(plain)]
    of_plain, of_charged = (half_advantages(group, random.Random(0), AdvantageConfig()) for group in (plain, charged))
    assert of_plain.any() and (of_plain == of_charged).all()


def test_half_of_a_group_says_nothing_if_the_rewards_decide_about_its_size():
    values, said = noise_of(0.5, 64, 16, 10, sizes_vary=True)
    assert values.keys() == {"gradient/signal_share", "gradient/noise_scale"} and not said


def test_it_says_so_where_half_the_group_would_do_and_where_the_groups_are_all_alike():
    _, said = noise_of(0.5, 64, 16, 10)
    assert len(said) == 1 and "half the group would teach as much" in said[0]
    _, said = noise_of(0.02, 8, 4, 10)
    assert len(said) == 1 and said[0].endswith(
        'different rewards; "What to choose" says what helps (docs/branching.md)'
    )


@pytest.mark.parametrize(("group_size", "is_told"), [(2, True), (8, False)])
def test_groups_of_two_that_are_mostly_alike_are_told_of(group_size, is_told):
    """jsboige/CoursIA#10603: p = 0.1819; of two generations 30 % of the groups are mixed, of eight 80 %."""
    values, said = noise_of(0.1819, 8, group_size, 40)
    assert any("different rewards" in line for line in said) is is_told
    assert all(math.isfinite(value) for value in values.values())


def test_gradients_without_anything_in_common_have_no_signal_and_no_noise_scale():
    """An estimate of |E g|^2 may be negative (EleutherAI/gpt-neox#257, ray-project/ray#3907 log it); ours says 0."""
    noise, rng = GradientNoise(AdvantageConfig(), 8, Lines()), np.random.default_rng(0)
    values: dict[str, float] = {}
    for step in range(10):
        groups = [Group(Prompt(str(i), [], []), [Trajectory(str(i), "0", reward=1.0)]) for i in range(8)]
        gradients = rng.normal(size=(8, SKETCH_SIZE))
        gradients -= gradients.mean(0)  # their sum is 0, so they are less alike than chance has them
        rows = {i: np.stack([gradients[i], gradients[i]]) for i in range(8)}
        minibatch = SketchedMinibatch(groups, [(i, group.trajectories[0]) for i, group in enumerate(groups)], rows)
        values |= noise.of_step(step, groups, [minibatch])
    assert values == {"gradient/signal_share": 0.0} and not noise.log.said


def test_small_updates_are_put_together_until_they_can_be_compared():
    """Of one gradient there is no noise: kingoflolz/mesh-transformer-jax#95 divided by zero."""
    values, _ = noise_of(0.5, 1, 8, 79)
    assert not values
    values, _ = noise_of(0.5, 1, 8, 80)
    assert values["gradient/signal_share"] == pytest.approx(exact_share(0.5, 1, 8), rel=0.3)


@pytest.mark.parametrize("num_done", [0, 3, 11])
def test_a_resumed_window_ends_as_the_undisturbed_one(num_done):
    """With twelve prompts a step, the open unit of eight prompts is saved too."""
    rng = np.random.default_rng(1)
    steps = [step_of_bandit(0.4, 12, 8, rng) for _ in range(20)]

    def play(noise: GradientNoise, first: int, last: int) -> list[dict[str, float]]:
        return [noise.of_step(step, steps[step].groups, [steps[step]]) for step in range(first, last)]

    undisturbed = play(GradientNoise(AdvantageConfig(), 12, Lines()), 0, 20)
    before, after = (GradientNoise(AdvantageConfig(), 12, Lines()) for _ in range(2))
    first = play(before, 0, num_done)
    after.resume(json.loads(json.dumps(before.state())))
    assert first + play(after, num_done, 20) == undisturbed and sum(map(bool, undisturbed)) == 2
