"""Properties of the pure core, on inputs that hypothesis makes up: schemas, cuts, budgets, trees, numbers, states.

Each stands in for many examples. An input that fails is shrunk to the smallest one, and printed.
"""

import json
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any
from urllib.parse import quote

import jsonschema
import numpy as np
import pytest
from helpers.orders import indices
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from arpo.advantages import group_advantages
from arpo.branching import BranchBudget, Evidence
from arpo.data.hub import HubFile, parse
from arpo.data.order import PromptOrder
from arpo.protocol.schema import ToolSchema, argument_of, arguments_of, check_arguments
from arpo.protocol.stop_watch import StopWatch
from arpo.rewards.math_answer import math_equal
from arpo.sampling.carried_state import from_plain, to_plain
from arpo.trajectory import BranchDecision, ToolCall, Turn
from arpo.tree import cut

# the same inputs in every run, and no deadline on a busy machine
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("fixed")
EXAMPLES = settings(max_examples=150)

# ---- arguments of a tool's call, and its JSON schema

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.0, 1.0, 1.5, -2.0]),
    st.text(alphabet='abé"', max_size=3),
)
KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
KINDS = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null"])


def wider(schemas: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    """Return the schemas of arrays, alternatives and objects of these schemas."""
    return st.one_of(
        st.builds(lambda items: {"type": "array", "items": items}, schemas),
        st.builds(lambda some: {"anyOf": some}, st.lists(schemas, min_size=1, max_size=3)),
        st.builds(lambda fields: {"type": "object", "properties": fields}, st.dictionaries(KEYS, schemas, max_size=2)),
        st.builds(lambda other: {"type": "object", "additionalProperties": other}, schemas),
    )


SCHEMAS = st.recursive(
    st.one_of(
        st.just({}),
        st.builds(lambda kind: {"type": kind}, KINDS),
        st.builds(lambda kinds: {"type": kinds}, st.lists(KINDS, min_size=1, max_size=3, unique=True)),
        st.builds(
            lambda values: {"enum": values},
            st.lists(st.sampled_from(["a", "b", "é", None, True]), min_size=1, max_size=3),
        ),
    ),
    wider,
    max_leaves=5,
)


@settings(max_examples=500)
@given(SCHEMAS, VALUES)
def test_an_argument_is_accepted_exactly_when_jsonschema_accepts_it(schema, value):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    is_accepted = check_arguments(ToolSchema("t", "", parameters), {"a": value}) == ""
    assert is_accepted == jsonschema.Draft202012Validator(parameters).is_valid({"a": value})


@EXAMPLES
@given(st.dictionaries(KEYS, SCHEMAS, max_size=3), st.dictionaries(KEYS, VALUES, max_size=3))
def test_the_text_of_a_call_means_its_arguments(properties, arguments):
    schema = ToolSchema("t", "", {"properties": properties})
    assume(not check_arguments(schema, arguments))
    assert arguments_of(schema, argument_of(schema, arguments)) == arguments


# ---- stop strings


def first_stop(text: str, stops: list[str]) -> int | None:
    """Return the length of the shortest beginning of the text that ends with a stop string."""
    return next((n for n in range(1, len(text) + 1) if text[:n].endswith(tuple(stops))), None)


@EXAMPLES
@given(
    text=st.text(alphabet="<a>/", min_size=1, max_size=14),
    stops=st.lists(st.text(alphabet="<a>/", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    data=st.data(),
)
def test_a_stop_string_across_a_cut_is_found_whatever_the_chunks(text, stops, data):
    """The engine finds stop strings that begin behind the cut; the watch finds those that begin before it."""
    first_end = first_stop(text, stops)
    cut_at = data.draw(st.integers(0, len(text)))
    assume(first_end is None or cut_at < first_end)  # the turn would have ended before the cut
    ids = [ord(character) for character in text]
    watch = StopWatch.at_cut(ids[:cut_at], stops)
    found = None
    position = cut_at
    while watch and found is None and position < len(ids):
        size = data.draw(st.integers(1, len(ids) - position))
        hit = watch.find(ids[position : position + size], lambda tokens: "".join(map(chr, tokens)))
        if hit:
            found = position + hit[0]
            assert text[:found].endswith(hit[1])
        position += size
    begins_before = first_end is not None and any(
        text[:first_end].endswith(stop) and first_end - len(stop) < cut_at for stop in stops
    )
    if begins_before:
        assert found == first_end
    else:
        assert found in (None, first_end)


@pytest.mark.parametrize("cut_at", [2, 3, 4])
def test_a_stop_string_is_found_wherever_it_is_cut(cut_at):
    ids = [ord(character) for character in "x<a>/"]
    watch = StopWatch.at_cut(ids[:cut_at], ["<a>/"])
    assert watch.find(ids[cut_at:], lambda tokens: "".join(map(chr, tokens))) == (5 - cut_at, "<a>/")


# ---- the budget of a group


@EXAMPLES
@given(
    budget=st.integers(0, 6),
    max_children=st.integers(1, 3),
    last_turn=st.integers(0, 3),
    num_roots=st.integers(1, 3),
    seed=st.integers(0, 2**30),
)
def test_who_was_faster_decides_nothing_about_the_branches(budget, max_children, last_turn, num_roots, seed):
    def chance(*of: object) -> float:
        return np.random.default_rng(abs(hash((seed, *of)))).random()

    def granted(order: np.random.Generator | None) -> dict:
        group = BranchBudget(budget, max_children, last_turn)
        turn_of = {(root,): 0 for root in range(num_roots)}
        for path in turn_of:
            group.expect(path, 0)
        while turn_of:
            alive = sorted(turn_of)
            path = alive[order.integers(len(alive))] if order else alive[0]
            turn = turn_of[path]
            if chance(path, turn, 1) < 0.25:
                group.close(path)
                del turn_of[path]
            else:
                group.decided(turn, path, wants=chance(path, turn, 2) < 0.7)
                turn_of[path] += 1
            for at, _, children in group.settle():
                turn_of |= dict.fromkeys(children, at + 1)
            # behind the last turn a trajectory goes on, but decides no more
            turn_of = {path: turn for path, turn in turn_of.items() if turn <= last_turn}
        assert group.is_settled and sum(group.granted.values()) <= budget
        return {place: count for place, count in group.granted.items() if count}

    assert granted(None) == granted(np.random.default_rng(seed))


# ---- trees


@EXAMPLES
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=7), st.integers(5, 20))
def test_no_other_cut_of_a_tree_computes_fewer_tokens_again(pairs, max_tokens):
    lengths = [length for length, _ in pairs]
    shared = [0] + [min(overlap, left, right) for (left, _), (right, overlap) in pairwise(pairs)]

    def fits(first: int, end: int) -> bool:
        return end - first == 1 or sum(lengths[first:end]) - sum(shared[first + 1 : end]) <= max_tokens

    def cost(cuts: tuple[int, ...] | list[int]) -> int:
        return sum(shared[position] for position in cuts)

    every = (cuts for count in range(len(lengths)) for cuts in combinations(range(1, len(lengths)), count))
    least = min(cost(cuts) for cuts in every if all(fits(*part) for part in pairwise([0, *cuts, len(lengths)])))
    assert cost([first for first, _ in cut(lengths, shared, max_tokens)][1:]) == least


# ---- names of the Hub

NAME = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_]{0,5}[a-z])?", fullmatch=True)
REVISION = NAME | st.sampled_from(["refs/convert/parquet", "refs/pr/3"])


@EXAMPLES
@given(NAME, NAME, REVISION, st.lists(NAME | st.just("a b"), min_size=1, max_size=3))
def test_a_file_of_the_hub_is_read_back_from_its_name_and_its_addresses(owner, name, revision, folders):
    file = HubFile(f"{owner}/{name}", revision, "/".join(folders))
    assert parse(str(file)) == file
    quoted = quote(revision, safe="")
    assert parse(f"hf://datasets/{file.repo}@{quoted}/{file.file}") == file
    assert parse(f"https://huggingface.co/datasets/{file.repo}/resolve/{quoted}/{quote(file.file)}") == file


# ---- answers


@st.composite
def spelled_numbers(draw: st.DrawFn) -> tuple[Fraction, str]:
    """A rational number, and one of the ways to write it."""
    value = Fraction(draw(st.integers(-2000, 2000)), draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 10])))
    style = draw(st.sampled_from(["frac", "slash", "decimal", "dollar", "comma"]))
    sign = "-" if value < 0 else ""
    size = abs(value)
    is_integer = size.denominator == 1
    if style == "frac" and not is_integer:
        return value, rf"{sign}\frac{{{size.numerator}}}{{{size.denominator}}}"
    if style == "decimal" and size.denominator not in (3, 7):
        return value, f"{sign}{float(size)}"
    if is_integer:
        text = f"{sign}{size.numerator:,}" if style == "comma" else f"{sign}{size.numerator}"
    else:
        text = f"{sign}{size.numerator}/{size.denominator}"
    return value, f"${text}$" if style == "dollar" else text


@EXAMPLES
@given(spelled_numbers(), spelled_numbers(), st.booleans())
def test_numbers_are_equal_exactly_when_their_values_are(one, other, is_same):
    if is_same:
        other = one
    assert math_equal(one[1], other[1]) == math_equal(other[1], one[1]) == (one[0] == other[0])


# ---- what a checkpoint keeps


@pytest.mark.parametrize("kind", [Evidence, ToolCall, BranchDecision, Turn])
def test_a_state_comes_back_from_a_checkpoint(kind):
    @settings(max_examples=60)
    @given(st.from_type(kind))
    def comes_back(state: Any) -> None:
        try:
            text = json.dumps(to_plain(state), allow_nan=False)
        except ValueError:  # NaN and infinity never are in a state: JSON has no words for them
            assume(False)
        assert from_plain(kind, json.loads(text)) == state

    comes_back()


# ---- the order of the prompts


@EXAMPLES
@given(st.integers(1, 12), st.data(), st.integers(0, 3))
def test_an_epoch_has_each_prompt_once_but_for_those_of_an_incomplete_step(num_prompts, data, seed):
    per_step = data.draw(st.integers(1, num_prompts))
    order = PromptOrder(num_prompts, per_step, seed, option="data.n")
    for epoch in (1, 0):  # in any order: nothing depends on what was drawn before
        steps = [indices(order, epoch * order.steps_per_epoch + step) for step in range(order.steps_per_epoch)]
        taken = [index for step in steps for index in step]
        assert len(taken) == len(set(taken)) == num_prompts // per_step * per_step
        assert set(taken) <= set(range(num_prompts))


@EXAMPLES
@given(st.integers(1, 9), st.data(), st.integers(0, 40))
def test_a_queue_holds_no_prompt_twice_and_goes_on_wherever_it_was_left(num_prompts, data, num_drawn):
    per_step = data.draw(st.integers(1, num_prompts))
    order = PromptOrder(num_prompts, per_step, 0, option="data.n")
    queue = order.queue(num_drawn, data.draw(st.integers(1, 12)))
    indices = [index for index, _ in queue]
    behind = [after for _, after in queue]
    assert len(indices) == len(set(indices))
    assert behind == sorted(behind) and behind[0] > num_drawn
    for index, after in queue:
        assert order.queue(after - 1, 1) == [(index, after)]


# ---- advantages


@EXAMPLES
@given(st.lists(st.floats(-2, 2), min_size=2, max_size=16))
def test_advantages_of_a_group_have_mean_0_and_the_order_of_the_rewards(rewards):
    advantages = group_advantages(rewards, ["g"] * len(rewards)).tolist()
    assert abs(np.mean(advantages)) < 1e-3
    for (reward, advantage), (other_reward, other) in combinations(zip(rewards, advantages, strict=True), 2):
        assert (reward <= other_reward) <= (advantage <= other + 1e-6)
