"""Folding: what the policy has before it in a fold and behind it, and that no token is trained behind anything else."""

import json
from dataclasses import replace

import pytest
from helpers.fakes import EchoTool, ScriptedEngine
from helpers.families import SCHEMAS, hermes_codec
from helpers.scripted_rollout import SHORT, play

from arpo.batch import row_of
from arpo.errors import UserError
from arpo.options import BranchingConfig
from arpo.protocol import HermesCodec
from arpo.trajectory import Prompt
from arpo.tree import collate_tree
from extras.fold import OPENED, Fold

CFG = replace(
    SHORT, group_size=1, max_tool_calls=6, max_response_tokens=3000, max_result_tokens=400, max_trajectory_tokens=20000,
    context="extras/fold.py:fold",
)  # fmt: skip
ALONE = BranchingConfig(selector="none", num_initial_rollouts=1)
MESSAGES = [{"role": "system", "content": "help"}, {"role": "user", "content": "who built it and when?"}]


def block(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SEARCH = block("search", query="q")
TURNS = [
    SEARCH,
    block("fold", question="when?"),
    SEARCH,
    block("fold", question="which year?"),
    "<think>sure</think>1894",
    "It was 1894.",
    SEARCH,
    "Eiffel, \\boxed{1894}.",
]


@pytest.fixture(scope="module")
def played():
    """(codec, engine, group) of a search, a fold with a search and a fold in it, another search, and the answer."""
    codec = HermesCodec(hermes_codec("qwen2_5").tokenizer, tools=[*SCHEMAS, Fold.schema])
    prompt = Prompt("p0", MESSAGES, ["1894"], token_ids=tuple(codec.render_prompt(MESSAGES)))
    engine = ScriptedEngine(codec.tokenizer, lambda _p, _t, turn: TURNS[turn])
    tools = [EchoTool("search", "found"), EchoTool("python", "2"), Fold()]
    [group] = play(None, cfg=CFG, branching=ALONE, engine=engine, tools=tools, prompts=[prompt], codec=codec)
    return codec, engine, group


def test_a_fold_sees_its_question_alone_and_its_answer_is_all_that_comes_back(played):
    codec, engine, group = played
    asked = [codec.tokenizer.decode(token_ids) for _, token_ids, _ in engine.submitted]
    questions = [MESSAGES[1]["content"], "when?", "which year?"]
    opening = [
        codec.tokenizer.decode(codec.render_prompt([MESSAGES[0], {"role": "user", "content": q}])) for q in questions
    ]
    where = [next(i for i, text in enumerate(opening) if one.startswith(text)) for one in asked]
    assert where == [0, 0, 1, 1, 2, 1, 0, 0] and not any(OPENED in one for one in asked)
    assert asked[2] == opening[1] and asked[4] == opening[2]
    assert asked[5].startswith(asked[3] + TURNS[3]) and "1894" in asked[5] and "sure" not in asked[5]
    assert asked[6].startswith(asked[1] + TURNS[1]) and "It was 1894." in asked[6] and "which year?" not in asked[6]
    [trajectory] = group.trajectories
    assert trajectory.segments[-1][0] == TURNS[-1] and len(trajectory.tool_calls) == 5


def test_what_stood_before_a_fold_is_computed_once(played):
    _, engine, group = played
    [trajectory] = group.trajectories
    row = row_of(group, trajectory)
    for _, token_ids, _ in engine.submitted:
        assert any(list(ids[: len(token_ids)]) == token_ids for _, _, ids in row.sequences)
    prefixes = {tuple(ids[:n].tolist()) for _, _, ids in row.sequences for n in range(1, len(ids) + 1)}
    assert collate_tree([row], [0]).input_ids.numel() == len(prefixes) < 0.7 * row.num_tokens


def test_with_tags_it_says_what_to_set():
    with pytest.raises(UserError, match=r"set protocol\.format"):
        play(lambda *_: "<answer>1</answer>", cfg=CFG, branching=ALONE)
