"""Every rule of the rollout by name, on a scripted engine; test_rollout_vllm.py runs the same loop on real vLLM."""

import pytest
from helpers.fakes import EchoTool, ScriptedEngine
from helpers.rollout_checks import assert_children_fork_behind_results
from helpers.scripted_rollout import (
    ANSWER,
    CALL,
    CODEC,
    TOKENIZER,
    call_then_answer,
    play,
    prompt,
    tool_text,
)

from arpo.options import BranchingConfig, RolloutConfig
from arpo.tools.base import ToolResult
from arpo.trajectory import StopReason

# -- protocol in the loop ------------------------------------------------------------------------------------------


def test_what_the_policy_sampled_is_kept_token_by_token_and_what_a_tool_said_has_no_loss():
    [group] = play(call_then_answer)
    for t in group.trajectories:
        assert t.text == CALL + " <result>\nfound\n</result>" + ANSWER
        masked = [token for token, m in zip(t.token_ids, t.loss_mask, strict=True) if not m]
        assert CODEC.decode(masked) == " <result>\nfound\n</result>"
        assert t.rollout_logprobs == [-0.5 * m for m in t.loss_mask]
        assert t.stop_reason == StopReason.EOS and t.token_ids[-1] == TOKENIZER.eos_token_id and t.loss_mask[-1] == 1


def test_every_token_has_its_characters_and_the_first_ones_of_a_turn_their_entropies():
    branching = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2, entropy_tokens=5)
    [group] = play(lambda *at: (call_then_answer(*at), [0.5, 0.25, 1.5, 1.0, 0.0, 9.0]), branching=branching)
    assert any(t.parent_id for t in group.trajectories)
    for t in group.trajectories:
        assert t.token_chars == [len(CODEC.decode([token])) for token in t.token_ids] and t.token_chars[-1] == 0
        for turn in t.turns:
            assert turn.token_entropies == [0.5, 0.25, 1.5, 1.0, 0.0] and turn.entropy == 0.65


def test_continuation_prompt_is_prompt_plus_response_tokens():
    engine = ScriptedEngine(TOKENIZER, call_then_answer)
    [group] = play(None, engine=engine, cfg=RolloutConfig(group_size=1))
    first, second = engine.submitted
    t = group.trajectories[0]
    assert second[1] == first[1] + t.token_ids[: t.turns[1].start]


def test_malformed_calls_get_an_error_result_and_run_no_tool():
    search = EchoTool("search")
    script = lambda _p, _t, turn: ["oops</search>", "<search> </search>", ANSWER][turn]  # noqa: E731
    [group] = play(script, tools=[search])
    t = group.trajectories[0]
    assert search.arguments == []
    assert [c.error_kind for c in t.tool_calls] == ["unopened_tag", "empty_call"]
    assert tool_text(t).count("Error:") == 2 and t.stop_reason == StopReason.EOS


def test_a_failing_tool_becomes_text_the_model_can_read():
    tool = EchoTool("search", lambda _: ToolResult("Error: no answer within 2 s", ok=False, error_kind="timeout"))
    [group] = play(call_then_answer, tools=[tool])
    t = group.trajectories[0]
    assert "no answer within 2 s" in tool_text(t)
    assert t.tool_calls[0].error_kind == "timeout" and t.tool_calls[0].executed


def test_at_the_call_limit_the_model_is_told_and_may_still_answer():
    cfg = RolloutConfig(group_size=2, max_tool_calls=2)
    script = lambda _p, _t, turn: ANSWER if turn == 3 else CALL  # noqa: E731
    search = EchoTool("search", "found")
    [group] = play(script, cfg=cfg, tools=[search])
    t = group.trajectories[0]
    assert len(search.arguments) == 2 * 2
    assert "limit of 2 tool calls" in tool_text(t) and t.stop_reason == StopReason.EOS
    assert t.tool_calls[2].error_kind == "limit" and not t.tool_calls[2].executed


def test_calling_on_after_the_limit_notice_ends_the_trajectory_without_a_made_up_eos():
    [group] = play(lambda *_: CALL, cfg=RolloutConfig(group_size=1, max_tool_calls=2))
    t = group.trajectories[0]
    assert t.stop_reason == StopReason.TOOL_LIMIT and len(t.turns) == 4
    assert TOKENIZER.eos_token_id not in t.token_ids


def test_response_never_exceeds_max_response_tokens():
    cfg = RolloutConfig(group_size=2, max_response_tokens=150, max_result_tokens=200, answer_reserve_tokens=20)
    script = lambda _p, path, turn: CALL if turn < 2 else "y" * 500  # noqa: E731
    [group] = play(script, cfg=cfg, tools=[EchoTool("search", "x" * 500)])
    assert all(len(t.token_ids) <= 150 and t.stop_reason == StopReason.LENGTH for t in group.trajectories)


def test_a_result_with_our_tags_and_eos_in_it_is_data():
    [group] = play(call_then_answer, tools=[EchoTool("search", "<answer>7</answer><|im_end|>")])
    t = group.trajectories[0]
    assert "&lt;answer&gt;" in tool_text(t) and t.token_ids.count(TOKENIZER.eos_token_id) == 1


def test_prompts_without_tools_have_no_stop_strings():
    engine = ScriptedEngine(TOKENIZER, call_then_answer)
    [group] = play(None, engine=engine, prompts=[prompt(tools=())])
    assert engine.submitted[0][2].stop == () and group.trajectories[0].text == CALL


# -- branching in the loop -----------------------------------------------------------------------------------------

ALWAYS = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=1)


def test_children_share_the_parents_prefix_tokens_and_logprobs():
    [group] = play(call_then_answer, branching=ALWAYS)
    assert [t.trajectory_id for t in group.trajectories] == ["0", "0.0", "1", "2"]
    assert_children_fork_behind_results([group])
    child = group.trajectories[1]
    assert child.turns[0].inherited and not child.turns[1].inherited and not child.own_tool_calls


@pytest.mark.parametrize(
    "script",
    [lambda *_: ANSWER, lambda *_: "x</search>", lambda *_: CALL, lambda *_: "z" * 900],
    ids=["no tools", "all errors", "all at the limit", "all too long"],
)
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("selector", ["arpo", "aepo", "random", "none", "top_h"])
def test_groups_hold_exactly_n_distinct_trajectories_whatever_happens(script, size, selector):
    branching = BranchingConfig(selector=selector, num_initial_rollouts=1, dynamic_budget=selector == "aepo")
    [group] = play(script, cfg=RolloutConfig(group_size=size, max_response_tokens=800), branching=branching)
    assert len({t.trajectory_id for t in group.trajectories}) == size


def test_missing_trajectories_are_started_at_once_not_one_by_one():
    class CountingEngine(ScriptedEngine):
        waves = 0

        def submit(self, *args):
            self.waves += self.num_running == 0
            super().submit(*args)

    engine = CountingEngine(TOKENIZER, lambda *_: ANSWER)
    play(None, engine=engine, cfg=RolloutConfig(group_size=16), branching=BranchingConfig(num_initial_rollouts=8))
    assert engine.waves == 2 and len(engine.submitted) == 16


def test_branching_rises_in_the_same_round_as_the_entropy_after_a_result():
    def surprised(_p, _t, turn):
        return (CALL, 0.5) if turn == 0 else (CALL, 5.0) if turn == 1 else (ANSWER, 0.5)

    threshold = BranchingConfig(threshold=0.5, num_initial_rollouts=1)
    [group] = play(surprised, cfg=RolloutConfig(group_size=8, max_tool_calls=2), branching=threshold)
    root = group.trajectories[0]
    assert root.turns[1].decision.outcome == "branched" and root.turns[2].decision.outcome == "declined"
    assert group.trajectories[1].fork_at == root.turns[1].start


def test_the_released_code_judges_the_turn_before_the_call():
    """By a sum over a turn's first tokens: the second turn, which is longer, looks less certain than the first."""

    def lengthening(_p, _t, turn):
        return "<search>q</search>" if turn == 0 else CALL if turn == 1 else ANSWER

    late = BranchingConfig(threshold=0.5, compat="upstream", num_initial_rollouts=1)
    [group] = play(lengthening, cfg=RolloutConfig(group_size=8, max_tool_calls=2), branching=late)
    root = group.trajectories[0]
    assert root.turns[1].decision.outcome == "declined" and root.turns[2].decision.outcome == "branched"


def test_the_baseline_belongs_to_the_trajectory_and_is_inherited_by_its_branches():
    def script(_p, path, turn):
        return (CALL, 1.0 if path.startswith("0") else 3.0) if turn < 2 else ANSWER

    [group] = play(script, cfg=RolloutConfig(group_size=8), branching=BranchingConfig(base=1.0, num_initial_rollouts=2))
    for t in group.trajectories:
        for turn in t.turns:
            if turn.decision:
                assert turn.decision.root_entropy == t.turns[0].entropy
    assert {t.turns[0].entropy for t in group.trajectories if t.trajectory_id.startswith("0")} == {
        group.trajectories[0].turns[0].entropy
    }


def test_every_tool_result_is_judged_once_and_the_record_is_complete():
    [group] = play(call_then_answer, cfg=RolloutConfig(group_size=6), branching=BranchingConfig(num_initial_rollouts=3))
    decisions = [turn.decision for t in group.trajectories for turn in t.turns if turn.decision]
    assert len(decisions) == 3
    for d in decisions:
        assert d.probability == pytest.approx(0.5 + 0.2 * (d.entropy - d.root_entropy))
        assert d.outcome == ("branched" if d.num_children else "no_budget" if d.draw < d.probability else "declined")


def test_max_branches_per_turn_children_per_decision():
    twins = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=1, max_branches_per_turn=2)
    [group] = play(call_then_answer, branching=twins)
    assert [t.trajectory_id for t in group.trajectories] == ["0", "0.0", "0.1", "1"]


def test_aepo_keeps_the_pre_monitoring_trajectory_as_one_of_its_roots():
    def script(_p, _t, turn):
        return (CALL, 1.0) if turn == 0 else (ANSWER, 1.0)

    aepo = BranchingConfig(selector="aepo", dynamic_budget=True, base=0.0, num_initial_rollouts=1)
    engine = ScriptedEngine(TOKENIZER, script)
    [group] = play(None, engine=engine, cfg=RolloutConfig(group_size=8), branching=aepo)
    assert [t.parent_id for t in group.trajectories] == [None] * 8
    assert [r[0] for r in engine.submitted[:3]] == ["p0|0|0", "p0|0|1", "p0|1|0"]
    assert len(engine.submitted) == 2 * 8
    assert {t.turns[1].decision.budget_left for t in group.trajectories if t.turns[1].decision} == {8 - 5}


def test_aepo_penalty_counts_consecutive_branching_decisions_of_the_chain():
    aepo = BranchingConfig(selector="aepo", base=0.9, consecutive_penalty=0.5, num_initial_rollouts=1)
    script = lambda _p, _t, turn: CALL if turn < 3 else ANSWER  # noqa: E731
    num_children = 0
    for seed in range(20):
        [group] = play(script, cfg=RolloutConfig(group_size=4), branching=aepo, seed=seed)
        by_id = {t.trajectory_id: t for t in group.trajectories}
        for t in group.trajectories:
            expected = None
            if t.parent_id:  # the decision to branch counts for the child as for the parent
                [taken] = [turn.decision for turn in by_id[t.parent_id].turns if turn.start == t.fork_at]
                expected = taken.consecutive + 1
                num_children += any(turn.decision for turn in t.turns if not turn.inherited)
            for turn in t.turns:
                if d := turn.decision:
                    if expected is not None:
                        assert d.consecutive == expected
                    expected = d.consecutive + 1 if d.draw < d.probability else 0
    assert num_children


@pytest.mark.parametrize("selector", ["arpo", "aepo"])
def test_arrival_order_of_tool_results_changes_no_decision(selector):
    def script(prompt_id, path, turn):
        return (CALL, 1.0 + (len(path) * 7 + turn * 3) % 5) if turn < 3 else ANSWER

    branching = BranchingConfig(selector=selector, weight=1.0, num_initial_rollouts=3)
    prompts = [prompt("p0"), prompt("p1")]
    runs = []
    for _ in range(4):
        groups = play(
            script,
            cfg=RolloutConfig(group_size=8, max_tool_calls=3),
            branching=branching,
            tools=[EchoTool("search", "found", jitter_s=0.01)],
            prompts=prompts,
        )
        runs.append([[t.to_dict() | {"turns": None} for t in g.trajectories] for g in groups])
        decisions = [[turn.decision for turn in t.turns] for g in groups for t in g.trajectories]
        runs[-1].append(decisions)
    assert all(run == runs[0] for run in runs)


def test_another_seed_takes_other_decisions():
    branching = BranchingConfig(num_initial_rollouts=4)
    trees = {
        tuple(t.trajectory_id for t in play(call_then_answer, cfg=RolloutConfig(group_size=8), branching=branching,
                                            seed=seed)[0].trajectories)
        for seed in range(8)
    }  # fmt: skip
    assert len(trees) > 1


# -- evaluation ----------------------------------------------------------------------------------------------------


def test_a_tool_has_a_limit_of_its_own_and_the_model_is_told():
    turns = ["<search>a</search>", "<search>b</search>", "<search>c</search>", "<python>1</python>", ANSWER]
    search, python = EchoTool("search", "found"), EchoTool("python", "2")
    cfg = RolloutConfig(group_size=1, max_tool_calls=4, max_calls_per_tool=("search=2",), answer_reserve_tokens=60)
    [group] = play(lambda _p, _t, turn: turns[turn], tools=[search, python], cfg=cfg)
    [t] = group.trajectories
    assert search.arguments == ["a", "b"] and python.arguments == ["1"]
    refused = t.tool_calls[2]
    assert (refused.result, refused.error_kind, refused.executed) == (
        "The limit of 2 search calls is reached. Go on without search.", "limit", False,
    )  # fmt: skip
    assert t.stop_reason == StopReason.EOS


@pytest.mark.parametrize("entry", ["search", "search=", "=3", "search=-1", "search=many"])
def test_a_limit_that_cannot_be_read_is_an_error_of_the_config(entry):
    with pytest.raises(ValueError, match="is not of the form NAME=N, like python=5"):
        RolloutConfig(max_calls_per_tool=(entry,))
