"""Metrics of the tools agree with the trajectories' records; and what the calls cost."""

import asyncio
import random
import re
from collections import Counter

import pytest
from helpers.files import write_jsonl
from helpers.scripted_rollout import ANSWER, play, prompt

from arpo.config.tools import SearchConfig, ToolsConfig
from arpo.errors import UserError
from arpo.metrics import Metrics, rollout_metrics
from arpo.options import BranchingConfig, RolloutConfig
from arpo.tools import make_tools, prices, prices_of, take_counts
from arpo.tools.base import ToolResult
from arpo.tools.interface import Tool, answer
from arpo.tools.search import SearchTool
from arpo.trajectory import Group, ToolCall, Trajectory, Turn

SEARCHES = ["otter", "fox", "zebra", "nothing at all"]


@pytest.fixture(scope="module")
def groups(tmp_path_factory) -> list[Group]:
    """A rollout with branches: real searches from a priced tool, some repeated, some malformed, some over the limit."""
    folder = tmp_path_factory.mktemp("ledger")
    corpus = write_jsonl(folder / "corpus.jsonl", [{"contents": f"the {x} is wet, Straße"} for x in SEARCHES[:3]])
    search = SearchConfig(backend="local", corpus=str(corpus), cache=str(folder / "cache.sqlite"))

    def script(prompt_id: str, path: str, turn: int) -> tuple[str, float]:
        rng = random.Random(f"{prompt_id} {path} {turn}")
        if turn == 3 or rng.random() < 0.2:
            return ANSWER, 1.0
        query = rng.choice([*SEARCHES, " ", "\x00"])
        return f"<think>t</think><search>{query}</search>", rng.choice([1.0, 3.0])

    groups = play(
        script,
        cfg=RolloutConfig(group_size=6, max_response_tokens=800, max_tool_calls=2, answer_reserve_tokens=60),
        branching=BranchingConfig(num_initial_rollouts=2, entropy_tokens=5),
        tools=[SearchTool(search)],
        prices={"search": 0.25},
        prompts=[prompt(f"p{i}", tools=("search",)) for i in range(4)],
        seed=1,
    )
    for number, trajectory in enumerate(t for group in groups for t in group.trajectories):
        trajectory.reward = [1.1, 0.0, -1.0][number % 3]
        trajectory.reward_parts = {"accuracy": float(trajectory.reward > 0)}
    return groups


def records(groups: list[Group]) -> list:
    """Calls of the dumps, as a reader of trajectories/step_*.jsonl would find them."""
    dumps = [t.to_dict() for group in groups for t in group.trajectories]
    return [call for d in dumps for turn in d["turns"] if not turn["inherited"] for call in turn["tool_calls"]]


def test_sums_equal_the_records(groups):
    values, calls = rollout_metrics(groups).values(), records(groups)
    ran = [call for call in calls if call["executed"]]
    assert len(ran) > 10 and len(ran) < len(calls) and any(t.parent_id for g in groups for t in g.trajectories)
    kinds = Counter(call["error_kind"] for call in ran if not call["ok"])
    for name in ("search", "all"):
        assert values[f"tools/{name}/calls"] == len(ran)
        assert values[f"tools/{name}/not_run"] == len(calls) - len(ran)
        assert values[f"tools/{name}/cached"] == sum(call["cached"] for call in ran) > 0
        assert values[f"tools/{name}/cost"] == sum(call["cost"] for call in ran)
        assert values[f"tools/{name}/failed"] == kinds.total() > 0
    assert {kind: values[f"tools/search/failed_{kind}"] for kind in kinds} == kinds
    assert values["tools/search/bytes_in"] == sum(len(call["argument"].encode()) for call in ran)
    assert values["tools/search/bytes_out"] == sum(len(call["result"].encode()) for call in ran)
    assert values["tools/search/seconds_max"] == max(call["seconds"] for call in ran)


def test_the_numbers_of_a_step_each_have_one_name():
    calls = [ToolCall("search", "q", "r", ok=True, cost=1.0), ToolCall("search", "", "limit", False, executed=False)]
    calls += [ToolCall("python", "1 / 0", "Error", ok=False, error_kind="error")]
    trajectory = Trajectory("p", "0", reward=1.0, reward_parts={"accuracy": 1.0})
    trajectory.turns = [Turn(0, tool_calls=[call]) for call in calls]
    values = rollout_metrics([Group(prompt(), [trajectory])]).values()
    each = ("calls", "cached", "failed", "bytes_in", "bytes_out", "seconds_p50", "seconds_p95", "seconds_max")
    assert sorted(name.removeprefix("tools/") for name in values if name.startswith("tools/")) == sorted([
        "calls_per_trajectory", "inherited",
        *(f"all/{name}" for name in (*each[:3], "not_run", "cost", "calls_per_correct", "cost_per_correct")),
        *(f"search/{name}" for name in (*each, "not_run", "cost")),
        *(f"python/{name}" for name in (*each, "failed_error")),
    ])  # fmt: skip


def test_money_is_paid_for_answers_and_not_for_cache_hits_or_errors(groups):
    calls, values = records(groups), rollout_metrics(groups).values()
    for call in calls:
        assert call["cost"] == (0.25 if call["executed"] and call["ok"] and not call["cached"] else 0)
    distinct = {call["argument"] for call in calls if call["executed"] and call["ok"]}
    assert values["tools/search/cost"] == 0.25 * len(distinct)
    num_correct = sum(t.reward > 0 for group in groups for t in group.trajectories)
    assert values["response/solved"] == num_correct == 8  # wrong answers cost too
    assert values["tools/all/calls_per_correct"] == values["tools/all/calls"] / num_correct
    assert values["tools/all/cost_per_correct"] == values["tools/all/cost"] / num_correct


def test_ranks_that_each_count_their_share_get_the_whole(groups):
    merged = Metrics()
    for rank in range(3):
        merged.merge(rollout_metrics(groups[rank::3]))
    assert merged.values() == pytest.approx(rollout_metrics(groups).values())


def test_without_calls_their_number_is_zero_and_without_a_correct_answer_it_has_no_quotient():
    def of_a_wrong_one(*calls: ToolCall) -> dict[str, float]:
        wrong = Trajectory("p", "0", reward=0.0, turns=[Turn(0, tool_calls=list(calls))])
        values = rollout_metrics([Group(prompt(), [wrong])]).values()
        return {name: value for name, value in values.items() if name.startswith("tools/")}

    assert of_a_wrong_one().keys() == {"tools/all/calls", "tools/calls_per_trajectory", "tools/inherited"}
    values = of_a_wrong_one(ToolCall("search", "q", "r", ok=True, cost=1.0))
    assert values["tools/all/cost"] == 1.0 and not any(name.endswith("_per_correct") for name in values)


def test_percentiles_are_those_of_all_values():
    one, two = Metrics(), Metrics()
    for value in range(1, 91):
        one.percentiles("s", value)
    for value in range(91, 101):
        two.percentiles("s", value)
    one.merge(two)
    assert one.values() == {"s_p50": 50, "s_p95": 95, "s_max": 100}


def test_identical_searches_at_once_are_paid_once(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"contents": "the otter is wet"}])
    tool = SearchTool(SearchConfig(backend="local", corpus=str(corpus)))

    async def eight() -> list[ToolResult]:
        results = await asyncio.gather(*(answer(tool, "otter", None, price=1.0) for _ in range(8)))
        await tool.aclose()
        return results

    results = asyncio.run(eight())
    assert sum(result.cost for result in results) == 1.0 and len({result.text for result in results}) == 1


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("search", "must be NAME=PRICE"),
        ("search=cheap", "must be NAME=PRICE"),
        ("search=-1", "a price of 0 or more"),
        ("search=nan", "a price of 0 or more"),
        ("serach=1", "no tool 'serach' in tools.names; there are python, search"),
    ],
)
def test_a_price_that_makes_no_sense_is_refused(entry, complaint):
    with pytest.raises(UserError, match=rf"tools\.price_per_call: .*{complaint}"):
        prices([entry], ("python", "search"))


def test_a_tool_of_a_frozen_class_can_have_a_price(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from arpo.protocol.prompts import About\n"
        "from arpo.protocol.schema import text_schema\n"
        "from arpo.tools.interface import ToolResult\n"
        "@dataclass(frozen=True)\n"
        "class Frozen:\n"
        "    tag = 'frozen'\n"
        "    about = About('a freezer', 'to freeze, write <frozen> text </frozen>', '<frozen> x </frozen>')\n"
        "    schema = text_schema('frozen', 'Freeze a text.', 'text', 'Any text.')\n"
        "    async def run(self, argument):\n"
        "        return ToolResult(argument, ok=True)\n"
        "    async def aclose(self): ...\n"
    )
    cfg = ToolsConfig(names=(f"{tmp_path}/mine.py:Frozen",), price_per_call=("frozen=0.5",))
    [tool] = make_tools(cfg).values()
    found = asyncio.run(answer(tool, "x", None, price=prices_of(cfg)["frozen"]))
    assert (found.ok, found.cost) == (True, 0.5)


class Counting(Tool):
    """A tool that returns this from `take_counts`."""

    def __init__(self, counts):
        self.counts = counts

    def take_counts(self):
        return self.counts() if callable(self.counts) else self.counts


def test_counts_of_several_tools_are_added_also_where_they_are_0_or_below():
    tools = {"a": Counting({"hits": 0, "balance": -3}), "b": Counting({"balance": 1.5}), "c": Counting({})}
    assert take_counts(tools) == {"hits": 0, "balance": -1.5} and "hits" in take_counts(tools)


@pytest.mark.parametrize("name", ["calls_per_trajectory", "all/calls", "search/seconds_p95"])
def test_a_count_of_a_tool_has_no_name_of_another_number(groups, name):
    """It was added to the other number, or ended the run with a traceback (the review of trl #5233)."""
    with pytest.raises(UserError, match=f"^take_counts of a tool has '{name}', which is another number's name; rename"):
        rollout_metrics(groups, tool_counts={name: 5})
    assert rollout_metrics(groups, tool_counts={"search/hits": 5})["tools/search/hits"] == 5


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        (lambda: 1 / 0, "failed (ZeroDivisionError: division by zero"),
        ({"x": "a"}, "'x' is 'a'; it must be a number"),
        ({"x": float("nan")}, "'x' is nan; it must be finite"),
        (None, "the returned value is None; it must be a Mapping"),
    ],
)
def test_counts_that_are_none_are_one_line(counts, why):
    with pytest.raises(UserError, match=rf"^the shop tool: take_counts:? {re.escape(why)}"):
        take_counts({"shop": Counting(counts)})
