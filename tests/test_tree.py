"""Trees against flat packing: what is shared, how it is cut, and that no number changes."""

import numpy as np
import pytest
import torch
from helpers.models import assert_close_by_name, build, cfg_of
from helpers.ranks import mesh_of_one

from arpo.batch import Row, microbatches, row_of
from arpo.model import load_policy
from arpo.ranks import Ranks
from arpo.trajectory import Context, Group, Prompt, Trajectory
from arpo.tree import collate_tree, plan, tree_microbatches

CPU = torch.device("cpu")


def row(prompt: str, response: str, mask: str = "") -> Row:
    """One token per letter; the mask is all ones unless given."""
    ids = [np.array([ord(c) for c in text], np.int64) for text in (prompt, response)]
    return Row(*ids, np.array([int(m) for m in mask or "1" * len(response)]))


def letters(ids) -> str:
    return "".join(chr(i) for i in ids)


def random_rows(seed: int, num_letters: int = 380, max_contexts: int = 2) -> list[Row]:
    """Of three prompts, with branches at random places of random trajectories, of which some are repeated or end within
    another, and some go on behind other contexts from random places on; these share their beginnings too."""
    rng = np.random.default_rng(seed)
    rows = []
    for g in range(3):
        trajectories: list[Trajectory] = []
        prompt = tuple(rng.integers(0, num_letters, rng.integers(1, 5)).tolist())
        for i in range(5):
            ids = rng.integers(0, num_letters, rng.integers(3, 18)).tolist()
            if trajectories and rng.random() < 0.7:
                parent = trajectories[rng.integers(len(trajectories))].token_ids
                ids = parent[: rng.integers(1, len(parent) + 1)] + (ids if rng.random() < 0.8 else [])
            mask = [1] + [int(m) for m in rng.random(len(ids) - 1) < 0.7]
            t = Trajectory("", str(i), ids, mask, [0.0] * len(ids))
            for start in sorted(set(rng.integers(1, len(ids) + 1, rng.integers(0, max_contexts + 1)).tolist())):
                more = rng.integers(0, num_letters, rng.integers(1, 5)).tolist()
                t.contexts.append(Context(start, [*prompt, *ids[: rng.integers(0, 3)], *more]))
            trajectories.append(t)
        group = Group(Prompt(str(g), [], [], token_ids=prompt), trajectories)
        rows += [row_of(group, t) for t in trajectories]
    return rows


def num_unique(rows: list[Row]) -> int:
    """Prefixes, counted the naive way."""
    ids = [tuple(ids.tolist()) for r in rows for _, _, ids in r.sequences]
    return len({i[:n] for i in ids for n in range(1, len(i) + 1)})


# ------------------------------------------------------------------------------------------------------ what is shared


def test_the_example_of_the_module_holds():
    micro = collate_tree([row("ab", "cde"), row("ab", "cx")], [7, 4])
    assert letters(micro.input_ids[0]) == "abcdex"
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert micro.paths.num_queries == (5, 1) and micro.paths.num_keys == (5, 4)
    assert micro.paths.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5]
    assert micro.nodes.tolist() == [[2, 3, 4], [2, 5, -1]]
    assert micro.predict_from.tolist() == [[1, 2, 3], [1, 2, 0]]
    assert micro.row_ids == (7, 4) and micro.num_row_tokens == 9


def keys_of_each_token(micro) -> list[torch.Tensor]:
    """What `micro.paths` lets each token attend to, by the contract of attention.py."""
    paths, keys = micro.paths, []
    for num_own, path in zip(paths.num_queries, paths.keys.split(paths.num_keys), strict=True):
        keys += [path[: len(path) - num_own + i + 1] for i in range(num_own)]
    return keys


@pytest.mark.parametrize("seed", range(20))
def test_each_token_sees_its_own_row_up_to_itself_and_what_rows_share_is_computed_once(seed):
    """Only the tokens count: not which question they belong to, and not where the response begins."""
    rows = random_rows(seed, num_letters=3)
    micro = collate_tree(rows, range(len(rows)))
    ids, parents = micro.input_ids[0], micro.parents
    seen = [letters(ids[keys]) for keys in keys_of_each_token(micro)]
    assert len(set(seen)) == len(seen) == num_unique(rows)
    for b, row_id in enumerate(micro.row_ids):
        for start, num_before, sequence in rows[row_id].sequences:
            whole = letters(sequence)
            for position in range(num_before, len(sequence)):
                node = micro.nodes[b, start + position - num_before]
                assert seen[node] == whole[: position + 1] and micro.position_ids[0, node] == position
                assert seen[parents[node]] == whole[:position]
                assert parents[node] == micro.predict_from[b, start + position - num_before]


def test_the_head_scores_a_shared_token_once_and_only_if_it_counts_somewhere():
    micro = collate_tree([row("ab", "cde", "101"), row("ab", "cx", "10"), row("ab", "cd", "00")], range(3))
    sources, targets = micro.head_inputs()
    assert letters(targets) == "ce" and sources.tolist() == [1, 3]
    rows = {micro.row_ids[b]: values for b, values in enumerate(micro.to_rows(torch.tensor([1.0, 2.0])).tolist())}
    assert rows == {0: [1.0, 0.0, 2.0], 1: [1.0, 0.0, 0.0], 2: [0.0, 0.0, 0.0]}


# --------------------------------------------------------------------------------------------- cutting and balancing


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_row_is_in_one_microbatch_within_the_budget_of_unique_tokens(seed, world_size):
    rows, budget = random_rows(seed, num_letters=20), 50
    per_rank = [tree_microbatches(rows, rank, world_size, budget) for rank in range(world_size)]
    assert len({len(micros) for micros in per_rank}) == 1
    micros = [micro for micros in per_rank for micro in micros]
    assert sorted(i for micro in micros for i in micro.row_ids) == list(range(len(rows)))
    assert all(micro.input_ids.numel() <= budget for micro in micros)
    assert all(
        micro.input_ids.numel() == num_unique([rows[i] for i in micro.row_ids]) for micro in micros if micro.row_ids
    )
    packed = microbatches(rows, 0, 1, budget)
    assert sum(m.input_ids.numel() for m in micros if m.row_ids) < sum(m.input_ids.numel() for m in packed)


def test_a_group_over_the_budget_is_cut_where_it_shares_least():
    """Two halves that fork at the prompt; cutting within one would compute four more tokens again."""
    rows = [row("pp", r) for r in ("aaaabc", "aaaade", "bbbbcd", "bbbbef", "bbbbgh")]
    [bins] = plan(rows, 1, 13)
    assert sorted(map(sorted, bins)) == [[0, 1], [2, 3, 4]]


def test_a_lone_group_is_spread_over_the_ranks():
    rows = [row("pp", c * 40) for c in "abcdefgh"]
    loads = [sum(rows[i].num_tokens for ids in bins for i in ids) for bins in plan(rows, 4, 1000)]
    assert max(loads) == min(loads)


def test_a_row_over_the_budget_is_an_error_that_names_the_option():
    with pytest.raises(ValueError, match=r"update\.max_tokens_per_microbatch=4"):
        tree_microbatches([row("a", "bc"), row("a", "bcde")], 0, 1, 4)


def test_a_rank_without_rows_gets_the_empty_microbatch():
    [micro] = tree_microbatches([row("a", "b")], 1, 2, 8)
    assert micro.row_ids == () and not micro.loss_mask.any()


# ------------------------------------------------------------------------------------- the same numbers, on real models


@pytest.fixture(scope="module")
def ranks():
    with mesh_of_one() as mesh:
        yield Ranks(0, 1, CPU, mesh)


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def folder(request, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp(request.param))


def gradients(model) -> dict[str, np.ndarray]:
    return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


def by_row(micros, values) -> dict[int, np.ndarray]:
    return {
        i: value[b].detach().numpy()[micro.loss_mask[b].numpy()]
        for micro, value in zip(micros, values, strict=True)
        for b, i in enumerate(micro.row_ids)
    }


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_give_the_logprobs_entropies_and_gradients_of_packed_rows(folder, ranks, seed):
    rows, outcomes = random_rows(seed, num_letters=380 if seed % 2 else 3), []
    policy = load_policy(cfg_of(folder), ranks.mesh, device=CPU)
    policy.head_chunk_tokens = 16
    weights = torch.linspace(-1.0, 1.0, len(rows))
    for micros in (microbatches(rows, 0, 1, 5000), tree_microbatches(rows, 0, 1, 70)):
        outputs = [policy(micro, 0.7) for micro in micros]
        for micro, (logprobs, entropies) in zip(micros, outputs, strict=True):
            weight = weights[list(micro.row_ids)][:, None]
            (weight * logprobs + (0.5 - weight) * entropies).sum().backward()
        outcomes.append((*(by_row(micros, part) for part in zip(*outputs, strict=True)), gradients(policy)))
        policy.zero_grad()
    for ours, expected in zip(*outcomes[::-1], strict=True):
        assert_close_by_name(ours, expected)


def test_a_token_has_the_logprob_that_it_has_behind_its_own_context_alone(folder, ranks):
    """A row of several sequences against a row for each of them."""
    rows = random_rows(5)
    assert sum(len(row.contexts) for row in rows) > 5
    policy = load_policy(cfg_of(folder), ranks.mesh, device=CPU)
    alone = [
        Row(ids[:num_before], ids[num_before:], row.loss_mask[start : start + len(ids) - num_before])
        for row in rows
        for start, num_before, ids in row.sequences
    ]
    [expected_micro] = microbatches(alone, 0, 1, 5000)
    expected = policy(expected_micro, 0.7)[0].detach()
    expected = [expected[expected_micro.row_ids.index(i), : len(row.response_ids)] for i, row in enumerate(alone)]
    for cut_rows in (microbatches, tree_microbatches):
        [micro] = cut_rows(rows, 0, 1, 5000)
        logprobs, parts = policy(micro, 0.7)[0].detach(), iter(expected)
        for i, one in enumerate(rows):
            ours = logprobs[micro.row_ids.index(i), : len(one.response_ids)]
            torch.testing.assert_close(ours, torch.cat([next(parts) for _ in one.sequences]), rtol=1e-5, atol=1e-5)
