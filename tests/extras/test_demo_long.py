"""The long demo task: every trail ends where its question says, and only the moves at a place leave a choice."""

import random
from collections import Counter

import pytest

from arpo.rewards import score
from arpo.tools.search.bm25 import Bm25Index
from extras.ablation.right_moves import RightTrace
from extras.demo import build as demo
from extras.demo.long import HABITS, NUM_SEARCHES, FirstWorld, LongTrace, LongWorld, SilentWorld, UnreadyWorld

WORLDS = {"long": LongWorld, "long_silent": SilentWorld, "long_unready": UnreadyWorld, "long_first": FirstWorld}


@pytest.fixture(scope="module", params=WORLDS)
def world(request) -> LongWorld:
    return WORLDS[request.param](0)


def told_by(world):
    return lambda query: f"Page 1: {query} is {world.told[query.removeprefix('trail ')]}"


def walk(world, question, trace=LongTrace, seed=0) -> str:
    return trace(told_by(world), question, random.Random(seed)).write()


def test_right_moves_lead_to_the_answer_in_six_to_nine_searches_of_which_one_or_two_decide(world):
    rng, searches, decisive = random.Random(1), Counter(), Counter()
    for _ in range(300):
        question = world.question(rng, rng.choice(["train", "test"]))
        text = walk(world, question, RightTrace)
        assert score(text, [question.answer], "demo").parts["accuracy"] == 1.0
        searches[text.count("<search>") + isinstance(world, FirstWorld)] += 1
        decisive[text.count("<think>try")] += 1
        # the question tells what the first search would have
        assert text.startswith("<think>try") == isinstance(world, FirstWorld) == ("is" in question.text.split()[:3])
    assert set(searches) == set(range(NUM_SEARCHES[0], NUM_SEARCHES[1] + 1)) and min(searches.values()) > 40
    assert set(decisive) == {1, 2} and min(decisive.values()) > 100


def test_a_wrong_way_is_lost_at_once_or_looks_like_the_right_one(world):
    num_searches, ways = Counter(), Counter()
    for seed in range(1500):
        question = world.question(random.Random(seed), "train")
        text = walk(world, question, seed=seed)
        is_right = score(text, [question.answer], "demo").parts["accuracy"] == 1.0
        assert ("is lost" in text) == (not is_right and not world.is_silent)
        num_searches[text.count("<search>")] += 1
        for place, (right, *_) in HABITS.items():
            _, *after_place = (question.text + text).split(f" is {place}")
            ways[place] += len(after_place)
            ways[right, place] += sum(f"<think>try {right}" in part[:60] for part in after_place)
    if world.is_silent:
        assert set(num_searches) == set(range(NUM_SEARCHES[0], NUM_SEARCHES[1] + 1))
    for place, (right, *_) in HABITS.items():
        assert abs(ways[right, place] / ways[place] - 0.25) < 0.05


def test_held_out_trails_share_no_place_with_those_of_training(world):
    names = {}
    for part in ("train", "test"):
        names[part] = set()
        for code, end in world.trails[part]:
            asked = [code]
            question = world.question_of(code, end)
            LongTrace(lambda q, a=asked: a.append(q) or told_by(world)(q), question, random.Random(0)).write()
            names[part] |= {name.removeprefix("trail ").split()[0] for name in asked}
    assert not names["train"] & names["test"]


def test_the_search_tool_finds_every_name_and_the_tokenizer_has_its_size(world, tmp_path):
    demo.write_jsonl(tmp_path / "corpus.jsonl", world.documents())
    index, rng = Bm25Index(str(tmp_path / "corpus.jsonl")), random.Random(0)
    for name in rng.sample(list(world.told), 300):
        [text] = index.search(f"trail {name}", 1)
        assert text == f"trail {name} is {world.told[name]}"
    demonstrator = demo.searching_demonstrator(tmp_path / "corpus.jsonl", LongTrace)
    assert len(demo.build_tokenizer(world, demonstrator, 0)) == world.vocab_size
