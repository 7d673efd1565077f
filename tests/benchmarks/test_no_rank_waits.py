"""The simulated ranks of no_rank_waits.py: its clock, its engine, and steps of the real queue and carried groups."""

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


def test_what_is_gathered_or_counted_is_of_all_ranks_at_the_time_of_the_last():
    time, got = VirtualTime(4), {}
    store, counts = VirtualStore(time, seconds=0.25), []

    def body(rank: int) -> None:
        for turn in range(3):
            time.sleep(rank, float((rank + turn) % 4))
            values = time.gather(rank, (rank, turn))
            got[rank, turn] = values, time.now[rank]
        counts.append(store.of(rank).add("next", 1))

    time.run(body)
    for (_, turn), (values, now) in got.items():
        assert values == [(r, turn) for r in range(4)] and now == 3.0 * (turn + 1)
    assert len(got) == 12
    assert counts == [1, 2, 3, 4] and time.now == [9.25] * 4 and store.num_requests == 4


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


@pytest.mark.parametrize("bound", [1, 2])
def test_carried_groups_are_trained_on_once_whole_and_within_the_bound(bound):
    trained = []
    run = no_rank_waits.Run(SMALL, no_rank_waits.MODES[f"pull, carry_over {bound}"], RANKS, STEPS, CODEC)
    note = run.note

    def keep(record, number, groups, num_cut_off):
        trained.append(groups)
        note(record, number, groups, num_cut_off)

    run.note = keep
    run()
    assert [len(groups) for groups in trained] == [16] * STEPS
    names = [group.prompt.prompt_id for groups in trained for group in groups]
    assert len(set(names)) == len(names)
    for t in (t for groups in trained for group in groups for t in group.trajectories):
        assert t.num_sampled_tokens == SMALL.tokens_of(t.prompt_id, t.trajectory_id)[0]
    for number, (groups, step) in enumerate(zip(trained, run.steps, strict=True), start=1):
        assert step.stale == staleness(groups, number).values() and step.stale["carry_over/staleness_max"] <= bound
        assert step.carried_s > 0
    assert run.steps[-1].stale["carry_over/tokens"] > 0


def measured(mode: str) -> no_rank_waits.Measured:
    return no_rank_waits.measure(SMALL, no_rank_waits.MODES[mode], num_ranks=RANKS, num_steps=2, codec=CODEC)


def test_a_run_repeats_exactly_and_carried_groups_leave_engines_less_idle():
    found = {}
    for mode in ("fixed", "pull", "pull, carry_over 2"):
        found[mode], again = measured(mode), measured(mode)
        assert found[mode] == again
    assert found["fixed"].over_ideal > found["pull"].over_ideal > found["pull, carry_over 2"].over_ideal > 1.0
    assert found["fixed"].idle > found["pull, carry_over 2"].idle and found["pull"].stale_share == 0.0
    assert 0 < found["pull, carry_over 2"].staleness <= found["pull, carry_over 2"].staleness_max <= 2
