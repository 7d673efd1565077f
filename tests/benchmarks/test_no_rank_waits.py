"""The simulated ranks of no_rank_waits.py: its clock, its engine, and steps of the real queue and carried groups."""

import heapq
import random

import pytest
from helpers.scripted_rollout import CODEC

from arpo.engine import SamplingSpec
from arpo.metrics import staleness
from benchmarks import no_rank_waits
from benchmarks.shared.drawn_work import Script, Workload, call_s
from benchmarks.shared.hardware import HARDWARE
from benchmarks.shared.shapes import MODELS
from benchmarks.shared.virtual_engine import VirtualEngine, VirtualTools
from benchmarks.shared.virtual_ranks import VirtualStore, VirtualTime

SMALL = Workload("Qwen3-14B", 4, 2, median_tokens=1000, max_tokens=8000, max_num_seqs=4, unit=128)
RANKS, STEPS = 4, 4


# ---- the clock


def test_all_that_ranks_do_happens_in_the_order_of_virtual_time():
    time, seen = VirtualTime(5), []

    def body(rank: int) -> None:
        rng = random.Random(rank)
        for _ in range(20):
            seen.append((time.now[rank], rank))
            time.sleep(rank, rng.random())

    assert time.run(body) == time.now
    alone = [random.Random(rank) for rank in range(5)]
    events = [(0.0, rank) for rank in range(5)]
    expected = []
    while len(expected) < 100:
        now, rank = heapq.heappop(events)
        expected.append((now, rank))
        if sum(r == rank for _, r in expected) < 20:
            heapq.heappush(events, (now + alone[rank].random(), rank))
    assert seen == expected


def test_what_is_gathered_comes_from_all_ranks_at_the_time_of_the_last():
    time, got = VirtualTime(4), {}

    def body(rank: int) -> None:
        for turn in range(3):
            time.sleep(rank, float((rank + turn) % 4))
            values = time.gather(rank, (rank, turn))
            got[rank, turn] = values, time.now[rank]

    time.run(body)
    for (_, turn), (values, now) in got.items():
        assert values == [(r, turn) for r in range(4)] and now == 3.0 * (turn + 1)
    assert len(got) == 12


@pytest.mark.parametrize("others_wait_in", ["sleep", "gather"])
def test_an_error_on_one_rank_ends_all(others_wait_in):
    time = VirtualTime(3)

    def body(rank: int) -> None:
        if rank == 1:
            time.sleep(rank, 0.5)
            raise ValueError("rank 1 is broken")
        while True:
            time.sleep(rank, 1.0)
            if others_wait_in == "gather":
                time.gather(rank, None)

    with pytest.raises(ValueError, match="rank 1 is broken"):
        time.run(body)


def test_a_store_counts_for_all_ranks_and_its_requests_take_time():
    time = VirtualTime(3)
    store, counts = VirtualStore(time, seconds=0.25), []

    def body(rank: int) -> None:
        client = store.of(rank)
        counts.append(client.add("next", 1))
        assert time.now[rank] == 0.25
        assert not client.delete_key("other")

    time.run(body)
    assert counts == [1, 2, 3] and time.now == [0.5] * 3 and store.num_requests == 6 and store.values == {"next": 3}


# ---- the engine


def make_engine(**settings) -> VirtualEngine:
    time = VirtualTime(1)
    tools = VirtualTools(time, 0, call_s, "b", result_tokens=192)
    hardware = HARDWARE["8xH100-80GB"]
    return VirtualEngine(
        time, 0, tools, Script(SMALL, CODEC), MODELS[SMALL.model], hardware, SMALL.max_num_seqs, SMALL.unit, **settings
    )


def sampled(engine: VirtualEngine, *, cut_after: tuple[int, ...] = ()) -> dict[str, list[int]]:
    """The tokens of the first turns of six trajectories; after these steps all is cut and submitted again."""
    spec, prompt_ids = SamplingSpec(max_tokens=4096, num_entropy_tokens=4), [5, 6, 7]
    tokens = {f"p|{path}|0": [] for path in range(6)}
    entropies = dict.fromkeys(tokens, 0)
    ended = set()
    for key in tokens:
        engine.submit(key, prompt_ids, spec)
    steps = 0
    while engine.num_running:
        for chunk in engine.step():
            tokens[chunk.request_id] += chunk.token_ids
            entropies[chunk.request_id] += len(chunk.entropies)
            assert len(chunk.logprobs) == len(chunk.token_ids) and chunk.request_id not in ended
            ended |= {chunk.request_id} if chunk.finish else set()
        steps += 1
        if steps in cut_after:
            engine.sync()
            left = [key for key in tokens if key not in ended]
            engine.abort(left)
            assert not engine.num_running
            for key in left:
                rest = SamplingSpec(max_tokens=4096, num_entropy_tokens=max(4 - len(tokens[key]), 0))
                engine.submit(key, [*prompt_ids, *tokens[key]], rest)
    assert ended == set(tokens) and set(entropies.values()) == {min(4, len(t)) for t in tokens.values()}
    return tokens


def test_a_request_that_was_cut_goes_on_where_it_was_and_costs_its_prompt_again():
    uncut, parts = make_engine(), make_engine(max_step_s=1.0, sends_parts=True)
    whole = sampled(uncut)
    assert whole == sampled(parts) == {key: Script(SMALL, CODEC)(key)[0] for key in whole}
    assert parts.busy_s == pytest.approx(uncut.busy_s)
    cut = make_engine(max_step_s=1.0, sends_parts=True)
    assert sampled(cut, cut_after=(1, 2, 9)) == whole
    again = (cut.prefilled - uncut.prefilled) * cut.prefill_s
    assert again > 0 and cut.busy_s == pytest.approx(uncut.busy_s + again)


def test_a_request_that_lost_tokens_is_refused():
    engine = make_engine(max_step_s=10.0, sends_parts=True)
    engine.submit("p|0|0", [5], SamplingSpec(max_tokens=4096))
    [chunk] = engine.step()
    engine.abort(["p|0|0"])
    with pytest.raises(AssertionError, match="tokens were lost"):
        engine.submit("p|0|0", [5, *chunk.token_ids[1:]], SamplingSpec(max_tokens=4096))


def test_calls_go_on_while_they_are_parked():
    tools = make_engine().tools
    tools.start("p|0|0|0", "search", "a")
    due_s = tools.next_s
    tools.park()
    assert tools.num_pending == 0 and tools.next_s == float("inf") and tools.collect(block=False) == []
    tools.time.now[0] += due_s
    tools.unpark()
    [(call_id, result)] = tools.collect(block=False)
    assert call_id == "p|0|0|0" and result.ok and tools.num_pending == 0


# ---- steps


def run_of(mode: str, trained: list | None = None) -> no_rank_waits.Run:
    """A run whose groups to train on go to `trained`, step by step."""
    run = no_rank_waits.Run(SMALL, no_rank_waits.MODES[mode], RANKS, STEPS, CODEC)
    note = run.note

    def keep(record, number, groups, num_cut_off):
        if trained is not None:
            trained.append(groups)
        note(record, number, groups, num_cut_off)

    run.note = keep
    run()
    return run


@pytest.mark.parametrize("mode", ["fixed", "pull"])
def test_without_carry_over_each_step_is_trained_on_its_own_prompts_whole(mode):
    trained = []
    run = run_of(mode, trained)
    names = [[int(group.prompt.prompt_id) for group in groups] for groups in trained]
    assert names == [list(range(16 * step, 16 * (step + 1))) for step in range(STEPS)]
    lengths = {t.num_sampled_tokens: SMALL.tokens_of(t.prompt_id, t.trajectory_id)[0] for t in all_of(trained)}
    assert all(sampled == drawn for sampled, drawn in lengths.items())
    assert all(step.carried_s == 0.0 and step.stale == {} for step in run.steps)


@pytest.mark.parametrize("bound", [1, 2])
def test_carried_groups_are_trained_on_once_whole_and_within_the_bound(bound):
    trained = []
    run = run_of(f"pull, carry_over {bound}", trained)
    assert [len(groups) for groups in trained] == [16] * STEPS
    names = [group.prompt.prompt_id for groups in trained for group in groups]
    assert len(set(names)) == len(names)
    for t in all_of(trained):
        assert t.num_sampled_tokens == SMALL.tokens_of(t.prompt_id, t.trajectory_id)[0]
    for number, (groups, step) in enumerate(zip(trained, run.steps, strict=True), start=1):
        assert step.stale == staleness(groups, number).values() and step.stale["carry_over/staleness_max"] <= bound
        assert step.carried_s > 0
    assert run.steps[-1].stale["carry_over/tokens"] > 0


def measured(mode: str) -> no_rank_waits.Measured:
    return no_rank_waits.measure(SMALL, no_rank_waits.MODES[mode], num_ranks=RANKS, num_steps=2, codec=CODEC)


def all_of(steps: list) -> list:
    return [t for groups in steps for group in groups for t in group.trajectories]


def test_a_run_repeats_exactly_and_carried_groups_leave_engines_less_idle():
    found = {}
    for mode in ("fixed", "pull", "pull, carry_over 2"):
        found[mode], again = measured(mode), measured(mode)
        assert found[mode] == again
    assert found["fixed"].over_ideal > found["pull"].over_ideal > found["pull, carry_over 2"].over_ideal > 1.0
    assert found["fixed"].idle > found["pull, carry_over 2"].idle and found["pull"].stale_share == 0.0
    assert 0 < found["pull, carry_over 2"].staleness <= found["pull, carry_over 2"].staleness_max <= 2


@pytest.mark.parametrize("mode", ["fixed, resample", "pull, resample"])
def test_refilled_steps_hold_enough_mixed_groups(mode):
    trained = []
    run_of(mode, trained)
    for groups in trained:
        assert sum(any(t.reward for t in group.trajectories) for group in groups) >= 16


def test_a_step_takes_longer_by_its_validation(monkeypatch):
    found = {}
    for number in (12, 48):
        monkeypatch.setattr(no_rank_waits, "NUM_VALID", number)
        found[number] = measured("fixed, validates").step_s
    without = measured("fixed").step_s
    assert without < found[12] < found[48]


def test_the_last_line_is_of_the_long_contexts():
    ones = no_rank_waits.Measured(*[1.0] * 8)
    sizes = ("long", 8), ("long", 64), ("long", 1024), ("short", 2048)
    found = {
        (*size, name): ones._replace(over_ideal=size[1] / 10 + i)
        for size in sizes
        for i, name in enumerate(no_rank_waits.MODES)
    }
    line = no_rank_waits.summary(found)
    assert line["baseline"] == 6.4 and line["ratio"] == 6.4 / line["ours"] and line["baseline_1024"] == 102.4
