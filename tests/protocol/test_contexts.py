"""Context policies: what the engine is asked, what is kept of it, and what a branch inherits."""

from dataclasses import replace

import pytest
from helpers.fakes import EchoTool, ScriptedEngine
from helpers.families import TEMPLATES, hermes_codec, opening_template
from helpers.scripted_rollout import ANSWER, CALL, CODEC, SHORT, TOKENIZER, play, prompt

from arpo.batch import collate, row_of
from arpo.errors import UserError
from arpo.log.dumps import dump_line, read_dump
from arpo.options import BranchingConfig
from arpo.protocol import HermesCodec, TagsCodec
from arpo.protocol.contexts import NOTES, REQUEST
from arpo.protocol.hermes import HermesRules
from arpo.sampling.carried_state import from_plain, to_plain
from arpo.trajectory import Group, Prompt, StopReason, Trajectory
from extras.viewer.groups import trajectory_view

ALONE = replace(SHORT, group_size=1)
ONE = BranchingConfig(selector="none", num_initial_rollouts=1)
SUMMARY = replace(
    ALONE, context="summary", context_tokens=80, note_tokens=40, answer_reserve_tokens=350, max_response_tokens=900,
    max_tool_calls=5, max_trajectory_tokens=4000,
)  # fmt: skip
ASKED = f"<|im_start|>user\nquestion{NOTES}what I know<|im_end|>\n<|im_start|>assistant\n"


def sampled(engine: ScriptedEngine) -> list[str]:
    """What the engine was asked, request by request."""
    return [TOKENIZER.decode(token_ids) for _, token_ids, _ in engine.submitted]


def texts_of(trajectory: Trajectory) -> list[str]:
    return [CODEC.decode(trajectory.token_ids[turn.start : turn.end]) for turn in trajectory.turns]


def script(_prompt, _path, turn):
    return [CALL, CALL, "what I know", CALL, ANSWER][turn]


@pytest.fixture
def noted() -> tuple[ScriptedEngine, Group, Trajectory]:
    """A rollout that sums up once, in its third turn."""
    engine = ScriptedEngine(TOKENIZER, script)
    [group] = play(None, cfg=SUMMARY, branching=ONE, engine=engine)
    [trajectory] = group.trajectories
    return engine, group, trajectory


def test_notes_take_the_place_of_what_was_before_them(noted):
    engine, _, trajectory = noted
    asked = sampled(engine)
    assert asked[2].endswith(f"found{REQUEST}\n</result>") and asked[3] == ASKED
    assert asked[4].startswith(ASKED + CALL) and REQUEST not in asked[4]
    stops = ("</python>", "</search>")
    assert [spec.stop for _, _, spec in engine.submitted] == [stops, stops, (), stops, stops]
    assert engine.submitted[2][2].max_tokens == 40
    assert texts_of(trajectory) == [CALL, CALL, "what I know", CALL, ANSWER]
    assert [turn.is_note for turn in trajectory.turns] == [False, False, True, False, False]
    assert len(trajectory.tool_calls) == 3 and trajectory.stop_reason == StopReason.EOS
    [context] = trajectory.contexts
    assert context.start == trajectory.turns[3].start and TOKENIZER.decode(context.token_ids) == ASKED


def test_the_policy_learns_its_notes_and_not_what_it_was_told(noted):
    _, _, trajectory = noted
    by_model = "".join(text for text, ours in trajectory.segments if ours)
    assert by_model == CALL * 2 + "what I know" + CALL + ANSWER and REQUEST in trajectory.text
    assert ("what I know", True) in trajectory.segments and sum(trajectory.token_chars) == len(trajectory.text)
    for turn in trajectory.turns:
        assert all(trajectory.loss_mask[turn.start : turn.end])
        assert not any(trajectory.loss_mask[turn.end : turn.result_end])


def test_a_row_is_what_the_engine_was_asked_and_answered(noted):
    engine, group, trajectory = noted
    row = row_of(group, trajectory)
    for _, token_ids, _ in engine.submitted:
        assert any(list(ids[: len(token_ids)]) == token_ids for _, _, ids in row.sequences)
    # the turn after the note, which follows it without a tool result between (loss.ratio_over turn)
    assert collate([row]).starts_context.nonzero().tolist() == [[0, trajectory.turns[3].start]]


def test_a_tool_that_is_called_in_a_note_does_not_run():
    [group] = play(lambda _p, _t, turn: CALL if turn < 3 else ANSWER, cfg=SUMMARY, branching=ONE)
    [trajectory] = group.trajectories
    assert trajectory.turns[2].is_note and texts_of(trajectory)[2] == CALL and len(trajectory.tool_calls) == 2
    assert trajectory.stop_reason == StopReason.EOS


def test_a_note_that_is_cut_off_is_a_note():
    cfg = replace(SUMMARY, note_tokens=12)
    [group] = play(lambda *at: "x" * 100 if at[2] == 2 else script(*at), cfg=cfg, branching=ONE)
    [trajectory] = group.trajectories
    assert TOKENIZER.decode(trajectory.contexts[0].token_ids).count("x" * 12) == 1
    assert trajectory.turns[2].end - trajectory.turns[2].start == 12 and trajectory.stop_reason == StopReason.EOS


def test_thoughts_of_earlier_turns_are_left_out_and_all_are_trained_behind_what_was_read():
    engine = ScriptedEngine(TOKENIZER, lambda _p, _t, turn: ANSWER if turn == 2 else CALL)
    [group] = play(None, cfg=replace(ALONE, context="strip_thoughts"), branching=ONE, engine=engine)
    [trajectory] = group.trajectories
    asked = sampled(engine)
    turn = "<search>q</search> <result>\nfound\n</result>"
    assert [text.removeprefix(asked[0]) for text in asked] == ["", turn, turn * 2]
    assert texts_of(trajectory) == [CALL, CALL, ANSWER]
    assert [len(ids) for _, _, ids in row_of(group, trajectory).sequences] == [
        len(token_ids) + turn.end - turn.start + (turn.result_end - turn.end) * (turn is not trajectory.turns[-1])
        for (_, token_ids, _), turn in zip(engine.submitted, trajectory.turns, strict=True)
    ]


def reasoning_codec(*, opens: bool) -> HermesCodec:
    """Qwen2.5's template, but it leaves the thoughts of earlier turns out, and may open the next one's, as QwQ's."""
    template = opening_template() if opens else (TEMPLATES / "qwen2_5.jinja").read_text()
    shown = "message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>'"
    return hermes_codec("qwen2_5", chat_template=template.replace("message.content + '<|im_end|>'", shown))


@pytest.mark.parametrize("opens", [False, True])
def test_without_thoughts_the_policy_reads_what_a_server_renders(opens):
    codec = reasoning_codec(opens=opens)
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "q"}}\n</tool_call>'
    messages = [{"role": "system", "content": "help"}, {"role": "user", "content": "question"}]
    thought = "I know.\n</think>\n\n" if opens else "<think>\nI know.\n</think>\n\n"
    turns = [f"{thought}{call}", f"{thought}{call}", f"{thought}\\boxed{{1}}"]
    engine = ScriptedEngine(codec.tokenizer, lambda _p, _t, turn: turns[turn])
    asked = Prompt("p0", messages, ["1"], token_ids=tuple(codec.render_prompt(messages)))
    cfg = replace(ALONE, context="strip_thoughts", max_response_tokens=3000, max_result_tokens=400)
    [group] = play(None, cfg=cfg, branching=ONE, engine=engine, prompts=[asked], codec=codec)
    for _, token_ids, _ in engine.submitted:
        assert token_ids == codec.render_prompt(messages)
        messages += [{"role": "assistant", "content": f"<think>\nI know.\n</think>\n\n{call}"}]
        messages += [{"role": "tool", "name": "search", "content": "found"}]
    [trajectory] = group.trajectories
    assert len(engine.submitted) == 3 and HermesRules().format_error(trajectory.segments) == ""


def test_with_tags_only_the_first_thought_is_the_prompts_to_open():
    """A later turn without a thought keeps its text, and one with a thought loses it."""
    codec = TagsCodec(reasoning_codec(opens=True).tokenizer)
    messages = [{"role": "user", "content": "question"}]
    asked = Prompt("p0", messages, ["1"], token_ids=tuple(codec.render_prompt(messages)))
    call, result = "<search>q</search>", " <result>\nfound\n</result>"
    turns = [f"t</think>{call}", call, f"<think>t</think>{call}", "<answer>1</answer>"]
    engine = ScriptedEngine(codec.tokenizer, lambda _p, _t, turn: turns[turn])
    cfg = replace(ALONE, context="strip_thoughts", max_response_tokens=3000, max_tool_calls=4)
    play(None, cfg=cfg, branching=ONE, engine=engine, prompts=[asked], codec=codec)
    first, *others = (codec.tokenizer.decode(token_ids) for _, token_ids, _ in engine.submitted)
    assert first.endswith("<think>\n")
    assert others == [first.removesuffix("<think>\n") + (call + result) * n for n in (1, 2, 3)]


def test_a_thought_that_cannot_be_taken_off_is_an_error():
    codec = reasoning_codec(opens=True)
    whole = codec.encode("assistant\n<think>\n")
    assert codec.opened_thought(whole) == ("<think>\n", len(codec.encode("<think>\n")))
    assert codec.opened_thought(whole[:-1]) == ("", 0)
    codec._opened = "\n<think>\n"  # whose first token is one with the text before it
    codec.tokenizer.add_tokens(["assistant\n"])
    with pytest.raises(UserError, match=r"shares a token with what is before; set rollout\.context=append"):
        codec.opened_thought(codec.encode("assistant\n<think>\n"))


def test_a_thought_that_the_prompt_opens_is_opened_in_each_context():
    codec = reasoning_codec(opens=True)
    segments = codec.segments([*codec.encode("note"), *codec.encode("go on")], [1] * 9, [4])
    assert segments == [("<think>\nnote", True), ("<think>\ngo on", True)]


@pytest.mark.parametrize("selector", ["random", "at2po"])
def test_a_branch_has_the_contexts_of_its_parent_up_to_the_fork(selector):
    cfg = replace(SUMMARY, group_size=12)
    branching = BranchingConfig(selector=selector, num_initial_rollouts=2, base=1.0)
    engine = ScriptedEngine(TOKENIZER, script)
    [group] = play(None, cfg=cfg, branching=branching, engine=engine)
    by_id = {t.trajectory_id: t for t in group.trajectories}
    branches = [t for t in group.trajectories if t.parent_id is not None]
    assert {len([c for c in t.contexts if c.start <= t.fork_at]) for t in branches} == {0, 1}
    for branch in branches:
        parent = by_id[branch.parent_id]
        assert texts_of(branch) == texts_of(parent) and len(branch.contexts) == 1
        assert [turn.is_note for turn in branch.turns] == [turn.is_note for turn in parent.turns]
    for request_id, token_ids, _ in engine.submitted:  # whoever sampled it, behind the same
        turn = int(request_id.rpartition("|")[2])
        assert (TOKENIZER.decode(token_ids) == ASKED) == (turn == 3)
    for trajectory in group.trajectories:
        trajectory.check()


def test_a_trajectory_ends_as_too_long_where_no_further_context_fits_into_a_row():
    cfg = replace(SUMMARY, max_trajectory_tokens=1500, max_tool_calls=50)
    [group] = play(lambda _p, _t, turn: "what I know" if turn % 3 == 2 else CALL, cfg=cfg, branching=ONE)
    [trajectory] = group.trajectories
    assert trajectory.stop_reason == StopReason.LENGTH and trajectory.contexts
    assert row_of(group, trajectory).num_tokens <= 1500
    trajectory.check()


def test_without_room_for_the_request_the_trajectory_ends_as_it_was():
    cfg = replace(SUMMARY, answer_reserve_tokens=60, max_response_tokens=200)
    [group] = play(script, cfg=cfg, branching=ONE)
    [trajectory] = group.trajectories
    assert trajectory.stop_reason == StopReason.LENGTH and texts_of(trajectory) == [CALL, CALL]
    assert [call.result for call in trajectory.tool_calls] == ["found", "found"] and REQUEST not in trajectory.text
    trajectory.check()


@pytest.mark.parametrize(("room", "num_turns"), [(1000, 3), (700, 1)])
def test_no_earlier_result_is_cut_to_make_room_for_the_request(room, num_turns):
    """A codec cuts the longest result, which may be another one than the last (UKGovernmentBEIS/inspect_ai#4493)."""
    codec = hermes_codec("qwen2_5")
    call = '<tool_call>\n{{"name": "{}", "arguments": {{"{}": "q"}}}}\n</tool_call>'
    turns = [call.format("search", "query") + call.format("python", "code"), "what I know", "\\boxed{1}"]
    messages = [{"role": "user", "content": "question"}]
    asked = Prompt("p0", messages, ["1"], token_ids=tuple(codec.render_prompt(messages)))
    cfg = replace(SUMMARY, max_result_tokens=700, answer_reserve_tokens=60, max_response_tokens=room)
    tools = [EchoTool("search", "x" * 400), EchoTool("python", "2")]
    [group] = play(lambda *at: turns[at[2]], cfg=cfg, branching=ONE, tools=tools, prompts=[asked], codec=codec)
    [trajectory] = group.trajectories
    assert len(trajectory.turns) == num_turns  # without a note it ends as too long, and as it was
    assert [call.result for call in trajectory.tool_calls] == ["x" * 400, "2" + REQUEST * (num_turns == 3)]
    trajectory.check()


def test_a_policy_of_a_file_sees_the_turn_and_says_what_comes_next(tmp_path):
    (tmp_path / "own.py").write_text(
        "def forget(evidence):\n"
        "    assert evidence.num_tokens == len(evidence.trajectory.token_ids) or evidence.trajectory.contexts\n"
        "    if not evidence.is_answer:\n"
        "        return evidence.prompt_with(f'{evidence.question} again, after {len(evidence.trajectory.turns)}')\n"
    )
    engine = ScriptedEngine(TOKENIZER, lambda _p, _t, turn: ANSWER if turn == 2 else CALL)
    play(None, cfg=replace(ALONE, context=f"{tmp_path}/own.py:forget"), branching=ONE, engine=engine)
    questions = [text.partition("user\n")[2].partition("<|im_end|>")[0] for text in sampled(engine)]
    assert questions == ["question", "question again, after 1", "question again, after 2"]


def test_a_policy_that_has_no_context_for_a_note_is_named(tmp_path):
    (tmp_path / "own.py").write_text("def ask(evidence):\n    return 'sum up'\n")
    context = f"{tmp_path}/own.py:ask"
    with pytest.raises(UserError, match=rf"rollout\.context={context} must return token ids after a note, .*, not str"):
        play(script, cfg=replace(SUMMARY, context=context), branching=ONE)


def test_viewer_dumps_and_checkpoints_hold_turns_and_contexts(noted, tmp_path):
    _, group, trajectory = noted
    view = trajectory_view(trajectory)
    assert [turn["text"] for turn in view["turns"]] == [CALL, CALL, "what I know", CALL, ANSWER]
    assert view["new_contexts"] == [3]
    assert from_plain(Trajectory, to_plain(trajectory)) == trajectory
    (tmp_path / "step.jsonl").write_bytes(dump_line(group, trajectory, {}))
    [(_, read, _)] = read_dump(tmp_path / "step.jsonl")
    assert read.contexts == trajectory.contexts and read.turns == trajectory.turns


def test_a_prompt_without_a_system_message_is_asked_again_with_the_tools_that_it_offers():
    engine = ScriptedEngine(TOKENIZER, script)
    play(None, cfg=SUMMARY, branching=ONE, engine=engine, prompts=[prompt(tools=("search",))])
    assert sampled(engine)[3] == ASKED
