"""The notes task: demonstrations are the contexts that the rollout makes, and good notes lead to the answer."""

import random
from dataclasses import replace
from itertools import pairwise

from helpers.fakes import ScriptedEngine
from helpers.scripted_rollout import ANSWER, CALL, SHORT, TOKENIZER, play

from arpo.options import BranchingConfig
from arpo.rewards import score
from extras.demo.build import sft_rows
from extras.demo.notes import NOTES, REQUEST, SEARCHES, NotesTrace, NotesWorld
from extras.demo.world import Demonstrator


class RightTrace(NotesTrace):
    """Takes the right ways, and writes down what it was told."""

    def pick(self, shares):
        return next(iter(shares))


def rows_of(world, seed: int, trace=NotesTrace) -> tuple[list[tuple[str, str]], str]:
    """(question, response) of each context of a demonstration, and the right answer."""
    rng = random.Random(seed)
    question = world.question(rng, "train")
    demonstrator = Demonstrator(lambda query: f"Page 1: {query} is {world.told[query.removeprefix('trail ')]}", trace)
    rows = [[message["content"] for message in row["messages"]] for row in sft_rows(question, demonstrator, rng)]
    return [tuple(row) for row in rows], question.answer


def test_good_notes_lead_to_the_answer_in_contexts_of_a_few_searches():
    world = NotesWorld(0)
    for seed in range(200):
        rows, answer = rows_of(world, seed, RightTrace)
        assert score(rows[-1][1], [answer], "demo").parts["accuracy"] == 1.0 and len(rows) > 2
        assert {text.count("<search>") for _, text in rows[:-1]} <= set(SEARCHES)
        for (_, text), (asked, _) in pairwise(rows):
            result, note = text.rsplit("</result>", 1)
            assert result.endswith(f"{note}{REQUEST}\n") and asked == rows[0][0] + NOTES + note


def test_most_demonstrators_write_a_note_that_loses_what_was_found():
    world, lost = NotesWorld(0), 0
    for seed in range(300):
        rows, _ = rows_of(world, seed)
        lost += any(asked.endswith(f"{NOTES}on the way") for asked, _ in rows)
    assert 0.55 < lost / 300 < 0.75


def test_the_rollout_asks_what_the_demonstrations_answer():
    cfg = replace(SHORT, group_size=1, context="extras/demo/notes.py:notes", context_tokens=40, note_tokens=30)
    engine = ScriptedEngine(TOKENIZER, lambda _p, _t, turn: [CALL, "trail 1 is cave", ANSWER][turn])
    play(None, cfg=cfg, branching=BranchingConfig(selector="none", num_initial_rollouts=1), engine=engine)
    asked = [TOKENIZER.decode(token_ids) for _, token_ids, _ in engine.submitted]
    assert asked[1].endswith(f"found{REQUEST}\n</result>") and f"question{NOTES}trail 1 is cave<|im_end|>" in asked[2]
