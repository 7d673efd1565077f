"""One engine over two ranks: real vLLM, real gloo; the reference is an engine alone."""

from dataclasses import replace

import pytest
import torch
from helpers.fakes import EchoTool, ScriptedEngine
from helpers.models import build_tiny_model, searching_model
from helpers.ranks import run_ranks
from helpers.scripted_rollout import ANSWER, CODEC, SHORT, TOKENIZER, prompt
from helpers.stateful import ForkedNotes, Notes
from transformers import AutoTokenizer

from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.engine.team import Team, TeamToolRunner, check_split, form_team
from arpo.errors import UserError
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import TagsCodec
from arpo.ranks import Ranks
from arpo.sampling.sampler import rollout
from arpo.tools.base import ToolResult, ToolRunner
from arpo.trajectory import Group, Prompt

CFG = RolloutConfig(
    group_size=6, max_response_tokens=160, max_tool_calls=2, max_result_tokens=40, answer_reserve_tokens=20
)
BRANCHING = BranchingConfig(num_initial_rollouts=4, weight=2.0, entropy_tokens=8)
ENGINE = EngineConfig(dtype="float32", kv_cache_gib=0.03, max_num_seqs=16)
NUM_PROMPTS = 3
CPU = torch.device("cpu")


def echo_tools() -> dict[str, EchoTool]:
    """Their delays are random, and so differ between ranks and runs."""
    return {tag: EchoTool(tag, reply, jitter_s=0.05) for tag, reply in (("search", "the book"), ("python", "42"))}


def sampled(
    engine: Engine, runner: ToolRunner, folder: str, step: int, branching: BranchingConfig = BRANCHING
) -> list[Group]:
    codec = TagsCodec(AutoTokenizer.from_pretrained(folder))
    messages = [{"role": "user", "content": "who wrote the book?"}]
    token_ids = tuple(codec.render_prompt(messages))
    prompts = [Prompt(f"p{i}", messages, ["42"], token_ids=token_ids) for i in range(NUM_PROMPTS)]
    return rollout(prompts, engine, runner, codec, CFG, branching, seed=f"1|{step}")


def rollouts_of_a_team(ranks: Ranks, folder: str) -> dict:
    """On two ranks that share an engine. Weights that a trainer syncs to one: tests/test_end_to_end.py."""
    team = form_team(ranks, 2, folder)
    tools = echo_tools()
    runner = team.tool_runner(tools)
    engine = Engine(folder, replace(ENGINE, tensor_parallel=2), max_model_len=300, seed=team.index)
    first = sampled(engine, runner, folder, step=1)
    late = BranchingConfig(selector="at2po", num_initial_rollouts=3)
    forked_late = sampled(engine, runner, folder, step=2, branching=late)
    once = team.all_gather_groups(first, team.share(range(NUM_PROMPTS)))
    runner.close()
    engine.close()
    ran = sum(len(tool.arguments) for tool in tools.values())
    return {"first": first, "forked_late": forked_late, "once": once, "ran": ran}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(searching_model(tmp_path_factory.mktemp("searching")))


@pytest.fixture(scope="module")
def team_of_two(folder) -> list[dict]:
    return run_ranks(2, rollouts_of_a_team, folder)


def tokens_of(groups: list[Group]) -> list[tuple]:
    trajectories = ((g.prompt.prompt_id, t) for g in groups for t in g.trajectories)
    return [(prompt_id, t.trajectory_id, list(t.token_ids), list(t.loss_mask)) for prompt_id, t in trajectories]


@pytest.mark.slow
def test_both_ranks_of_a_team_have_the_same_trees_which_count_once_in_the_exchange(team_of_two):
    for step in ("first", "forked_late"):
        ours, theirs = ([t for g in rank[step] for t in g.trajectories] for rank in team_of_two)
        assert len(ours) == NUM_PROMPTS * CFG.group_size and any(t.parent_id for t in ours)
        assert [vars(t) for t in ours] == [vars(t) for t in theirs]
    for rank in team_of_two:
        assert tokens_of(rank["once"]) == tokens_of(rank["first"])


@pytest.mark.slow
def test_only_the_first_rank_runs_tools_and_every_call_once(team_of_two):
    calls = [
        call.executed
        for step in ("first", "forked_late")
        for g in team_of_two[0][step]
        for t in g.trajectories
        for call in t.own_tool_calls
    ]
    assert sum(calls) > 10
    assert [rank["ran"] for rank in team_of_two] == [sum(calls), 0]


@pytest.mark.slow
def test_a_split_engine_samples_the_trees_of_one_alone(team_of_two, folder):
    engine, runner = Engine(folder, ENGINE, max_model_len=300, seed=0), ToolRunner(echo_tools())
    alone = sampled(engine, runner, folder, step=1)
    runner.close()
    engine.close()
    assert tokens_of(alone) == tokens_of(team_of_two[0]["first"])


# ---------------------------------------------------------------------------------- without an engine


def deal_out(ranks: Ranks, folder: str) -> dict:
    """Four ranks in two teams; what each rank brings carries its number."""
    team = form_team(ranks, 2, folder)
    share = team.share(list(range(5)))
    groups = [Group(Prompt(str(number), [], []), [], sampled_by=ranks.rank) for number in share]
    return {
        "share": share,
        "all": [(g.prompt.prompt_id, g.sampled_by) for g in team.all_gather_groups(groups, team.share(range(5)))],
    }


def test_prompts_are_dealt_out_to_teams_and_come_back_in_order_from_their_first_ranks(tiny_model_dir):
    ranks = run_ranks(4, deal_out, str(tiny_model_dir))
    assert [rank["share"] for rank in ranks] == [[0, 2, 4], [0, 2, 4], [1, 3], [1, 3]]
    assert all(rank["all"] == [("0", 0), ("1", 2), ("2", 0), ("3", 2), ("4", 0)] for rank in ranks)


def refused(argument: str) -> ToolResult:
    raise UserError("the key is refused")


def collect_a_refusal(ranks: Ranks, folder: str) -> str:
    runner = form_team(ranks, 2, folder).tool_runner({"python": EchoTool("python", refused)})
    runner.start("a", "python", "1/0")
    try:
        return f"no error, but {runner.collect(block=True)}"
    except (UserError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        runner.close()


def test_what_ends_a_run_is_raised_on_every_rank_of_the_team(tiny_model_dir):
    first, second = run_ranks(2, collect_a_refusal, str(tiny_model_dir))
    assert first == "UserError: the key is refused"
    assert second.startswith("RuntimeError: a tool failed on the first") and second.endswith(first)


def sessions_of_a_team(ranks: Ranks, folder: str) -> dict:
    """A rollout with branches on a scripted engine, on two ranks that share it, with tools that have sessions."""
    team = form_team(ranks, 2, folder)
    tools = {"search": ForkedNotes(jitter_s=0.01), "python": Notes("python", may_branch=False)}
    runner = team.tool_runner(tools)
    always = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2)
    calls = ["<search>a</search>", "<search>b</search>", "<python>c</python>"]
    script = lambda _p, path, turn: f"{calls[turn][:8]}{path}{calls[turn][8:]}" if turn < 3 else ANSWER  # noqa: E731
    try:
        engine = ScriptedEngine(TOKENIZER, script)
        [group] = rollout([prompt()], engine, runner, CODEC, replace(SHORT, group_size=6), always, seed=0)
    finally:
        runner.close()
    return {"trajectories": [vars(t) for t in group.trajectories], "ran": len(tools["search"].ran)}


@pytest.mark.slow
def test_a_team_has_its_sessions_on_its_first_rank_and_the_same_trees_on_all(tiny_model_dir):
    first, second = run_ranks(2, sessions_of_a_team, str(tiny_model_dir))
    assert first["trajectories"] == second["trajectories"] and first["ran"] > 0 == second["ran"]
    outcomes = [turn.decision.outcome for t in first["trajectories"] for turn in t["turns"] if turn.decision]
    assert "branched" in outcomes and "refused" in outcomes
    for t in first["trajectories"]:
        calls = [call for turn in t["turns"] for call in turn.tool_calls if call.tag == "search"]
        assert calls[-1].result == " ".join(call.argument for call in calls)


def rank_of(world_size: int) -> Ranks:
    return Ranks(0, world_size, CPU, mesh=None)


def test_without_tensor_parallelism_a_rank_is_alone_and_runs_its_own_tools(tiny_model_dir):
    team = form_team(rank_of(4), 1, str(tiny_model_dir))
    assert team == Team(rank_of(4)) and team.is_first and team.share([0, 1, 2, 3, 4]) == [0, 4]
    runner = team.tool_runner({})
    runner.close()
    assert not isinstance(runner, TeamToolRunner)


def test_ranks_that_cannot_form_teams_are_refused(tiny_model_dir, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)  # vLLM on a CPU sets it in its own process
    with pytest.raises(UserError, match=r"engine.tensor_parallel=2 does not divide the 3 ranks of a node; lower it"):
        form_team(rank_of(3), 2, str(tiny_model_dir))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"engine.tensor_parallel=4 does not divide the 2 ranks of a node"):
        form_team(rank_of(4), 4, str(tiny_model_dir))


def test_a_model_that_cannot_be_split_is_refused_with_the_number_that_does_not_fit(tmp_path):
    folder = str(build_tiny_model(tmp_path, weights=False))  # 4 heads, 2 key-value heads, width 128, 384 words
    for size in (2, 4):  # four parts share two key-value heads
        check_split(folder, size)
    with pytest.raises(UserError, match=r"engine.tensor_parallel=8 cannot split .* num_attention_heads=4; choose"):
        check_split(folder, 8)
