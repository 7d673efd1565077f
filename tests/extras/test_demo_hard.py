"""The hard demo task: an honest world whose results leave open what to do, and a demonstrator torn between moves."""

import random
import re
from collections import Counter

import pytest

from arpo.rewards import score
from arpo.tools.search.bm25 import Bm25Index
from extras.demo import build as demo
from extras.demo.hard import KINDS, HardTrace, HardWorld, kind_of
from extras.demo.world import ATTRIBUTES, Demonstrator, World


@pytest.fixture(scope="module")
def world() -> HardWorld:
    return HardWorld(0)


@pytest.fixture(scope="module")
def search(corpus):
    """Query -> what stands behind "is" in the best document."""
    index = Bm25Index(str(corpus))

    def ask(query: str) -> str:
        [text] = index.search(query, 1)
        assert text.startswith(f"{query} is "), (query, text)
        return text.removeprefix(f"{query} is ")

    return ask


@pytest.fixture(scope="module")
def demonstrator(corpus) -> Demonstrator:
    return demo.searching_demonstrator(corpus, HardTrace)


def work_out(search, attribute: str, entity: str) -> str:
    """The value, as an agent that makes all the right moves finds it in the corpus."""
    told = search(f"{attribute} of {entity}")
    if " or " in told:
        value = search(f"survey of {attribute} of {entity}")
        assert value in told.split(" or ")
        return value
    if told.startswith("under "):
        return search(f"{attribute} of {told.removeprefix('under ')}")
    dated = re.search(r"new (\d+)", told)
    return dated[1] if dated else told


def test_every_answer_follows_from_the_corpus(world, search):
    rng = random.Random(1)
    for _ in range(300):
        q = world.question(rng, rng.choice(["train", "test"]))
        entity = search(f"owner of {q.entity}") if q.family == "hop" else q.entity
        value = work_out(search, q.attribute, entity)
        assert value.isdigit() and q.answer == str(q.factor * int(value) if q.factor else value), q


def test_all_kinds_are_there_in_their_shares_and_a_result_shows_its_kind_but_not_which_number_is_right(world):
    for part in world.entities.values():
        kinds = Counter(world.kinds[attribute, entity] for attribute in ATTRIBUTES for entity in part)
        for kind, share in KINDS.items():
            assert abs(kinds[kind] / kinds.total() - share) < 0.06
    assert all(kind_of(world.told[fact]) == kind for fact, kind in world.kinds.items())
    for kind in ("disputed", "dated"):
        facts = [fact for fact, k in world.kinds.items() if k == kind]
        first = sum(re.search(r"\d+", world.told[fact])[0] == world.facts[fact] for fact in facts)
        assert 0.4 < first / len(facts) < 0.6


def test_held_out_entities_are_held_out_of_pointers_too(world):
    test_names = set(world.entities["test"])
    for (_, entity), told in world.told.items():
        if told.startswith("under "):
            assert (told.removeprefix("under ") in test_names) == (entity in test_names)


def test_the_demonstrator_is_mediocre_where_results_are_not_plain(world, demonstrator):
    rng = random.Random(4)
    right = {kind: [] for kind in KINDS}
    for _ in range(2000):
        q = world.question(rng, "train")
        entity = world.facts["owner", q.entity] if q.family == "hop" else q.entity
        parts = score(demonstrator.trajectory(q, rng), [q.answer], "demo").parts
        right[world.kinds[q.attribute, entity]].append(parts.get("accuracy", 0.0))
    accuracy = {kind: sum(hits) / len(hits) for kind, hits in right.items()}
    everything = [hit for hits in right.values() for hit in hits]
    assert 0.3 < sum(everything) / len(everything) < 0.5
    assert all(accuracy[kind] < accuracy["plain"] - 0.1 for kind in KINDS if kind != "plain"), accuracy


def test_results_stay_short_and_the_vocabulary_has_the_same_size(world, demonstrator):
    tokenizer = demo.build_tokenizer(world, demonstrator, 0)
    assert len(tokenizer) == world.vocab_size
    texts = [f"<result>\nPage 1: {document['text']}\n</result>" for document in world.documents()]
    assert max(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"])) < 40


def test_names_owners_and_the_split_are_those_of_the_plain_task(world):
    plain = World(0)
    assert plain.entities == world.entities
    assert all(world.facts[fact] == value for fact, value in plain.facts.items() if fact[0] == "owner")
