"""The ledger: what it says is what the trajectories' records say."""

import asyncio
import json
import random
from collections import Counter

import pytest
from helpers.fakes import ScriptedEngine
from helpers.scripted_rollout import ANSWER, CODEC, TOKENIZER, prompt

from arpo.errors import UserError
from arpo.metrics import rollout_metrics
from arpo.options import BranchingConfig, RolloutConfig
from arpo.rollout import rollout
from arpo.tools import make_tools
from arpo.tools.base import ToolResult, ToolRunner
from arpo.tools.ledger import PricedTool, ledger, prices
from arpo.tools.options import SearchConfig, ToolsConfig
from arpo.tools.search import SearchTool
from arpo.trajectory import Group, Metrics, Trajectory, Turn

SEARCHES = ["otter", "fox", "zebra", "nothing at all"]


@pytest.fixture(scope="module")
def groups(tmp_path_factory) -> list[Group]:
    """A rollout with branches: real searches from a priced tool, some repeated, some malformed, some over the limit."""
    folder = tmp_path_factory.mktemp("ledger")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"contents": f"the {x} is wet, Straße"}) + "\n" for x in SEARCHES[:3]))
    search = SearchConfig(backend="local", corpus=str(corpus), cache=str(folder / "cache.sqlite"))

    def script(prompt_id: str, path: str, turn: int) -> tuple[str, float]:
        rng = random.Random(f"{prompt_id} {path} {turn}")
        if turn == 3 or rng.random() < 0.2:
            return ANSWER, 1.0
        query = rng.choice([*SEARCHES, " ", "\x00"])
        return f"<think>t</think><search>{query}</search>", rng.choice([1.0, 3.0])

    runner = ToolRunner(make_tools(ToolsConfig(names=("search",), search=search, price_per_call=("search=0.25",))))
    cfg = RolloutConfig(group_size=6, max_response_tokens=800, max_tool_calls=2, answer_reserve_tokens=60)
    branching = BranchingConfig(num_initial_rollouts=2, entropy_tokens=5)
    try:
        groups = rollout(
            [prompt(f"p{i}", tools=("search",)) for i in range(4)],
            ScriptedEngine(TOKENIZER, script), runner, CODEC, cfg, branching, seed=1,
        )  # fmt: skip
    finally:
        runner.close()
    for number, trajectory in enumerate(t for group in groups for t in group.trajectories):
        trajectory.reward = [1.1, 0.0, -1.0][number % 3]
    return groups


def records(groups: list[Group]) -> list:
    """Calls of the dumps, as a reader of trajectories/step_*.jsonl would find them."""
    dumps = [t.to_dict() for group in groups for t in group.trajectories]
    return [turn["tool_call"] for d in dumps for turn in d["turns"] if turn["tool_call"] and not turn["inherited"]]


def test_sums_equal_the_records(groups):
    values, calls = ledger(groups).values(), records(groups)
    ran = [call for call in calls if call["executed"]]
    assert len(ran) > 10 and len(ran) < len(calls) and any(t.parent_id for g in groups for t in g.trajectories)
    for name in ("search", "all"):
        assert values[f"ledger/{name}/calls"] == len(ran)
        assert values[f"ledger/{name}/not_run"] == len(calls) - len(ran)
        assert values[f"ledger/{name}/cached"] == sum(call["cached"] for call in ran) > 0
        assert values[f"ledger/{name}/bytes_in"] == sum(len(call["argument"].encode()) for call in ran)
        assert values[f"ledger/{name}/bytes_out"] == sum(len(call["result"].encode()) for call in ran)
        assert values[f"ledger/{name}/cost"] == sum(call["cost"] for call in ran)
        kinds = Counter(call["error_kind"] for call in ran if not call["ok"])
        assert values[f"ledger/{name}/failed"] == kinds.total() > 0
        assert {kind: values[f"ledger/{name}/failed_{kind}"] for kind in kinds} == kinds
        assert values[f"ledger/{name}/seconds_max"] == max(call["seconds"] for call in ran)


def test_money_is_paid_for_answers_and_not_for_cache_hits_or_errors(groups):
    calls = records(groups)
    assert all(
        call["cost"] == (0.25 if call["executed"] and call["ok"] and not call["cached"] else 0) for call in calls
    )
    distinct = {call["argument"] for call in calls if call["executed"] and call["ok"]}
    assert ledger(groups)["ledger/search/cost"] == 0.25 * len(distinct)


def test_costs_per_correct_answer_count_wrong_answers_too(groups):
    values = ledger(groups).values()
    num_correct = sum(t.reward > 0 for group in groups for t in group.trajectories)
    assert values["ledger/correct"] == num_correct == 8
    assert values["ledger/search/calls_per_correct"] == values["ledger/search/calls"] / num_correct
    assert values["ledger/all/cost_per_correct"] == values["ledger/all/cost"] / num_correct


def test_ranks_that_each_book_their_share_get_the_whole_ledger(groups):
    merged = Metrics()
    for rank in range(3):
        merged.merge(ledger(groups[rank::3]))
    assert merged.values() == pytest.approx(ledger(groups).values())
    step = rollout_metrics(groups).values()
    assert {name: value for name, value in step.items() if name.startswith("ledger/")} == ledger(groups).values()


def test_without_a_correct_answer_there_is_no_price_of_one():
    wrong = Trajectory("p", "0", reward=0.0, turns=[Turn(0)])
    assert ledger([Group(prompt(), [wrong])]).values() == {"ledger/correct": 0}


def test_percentiles_are_those_of_all_values():
    one, two = Metrics(), Metrics()
    for value in range(1, 91):
        one.percentiles("s", value)
    for value in range(91, 101):
        two.percentiles("s", value)
    one.merge(two)
    assert one.values() == {"s_p50": 50, "s_p95": 95, "s_max": 100}


def test_identical_searches_at_once_are_paid_once(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"contents": "the otter is wet"}\n')
    tool = PricedTool(SearchTool(SearchConfig(backend="local", corpus=str(corpus))), 1.0)

    async def eight() -> list[ToolResult]:
        results = await asyncio.gather(*(tool.run("otter") for _ in range(8)))
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
