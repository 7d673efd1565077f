"""Micro-batches in which the rows form trees: a prefix that rows share is computed once (update.layout=tree).

Equal token ids from the first token on are one path, whoever sampled them, so prompts are shared as well. A node is one
unique token; nodes are numbered depth first. Two rows, prompt a b:

    rows           a b c d e      a b c x
    input_ids      a b c d e x                   (N,) one per node
    position_ids   0 1 2 3 4 3                   the depth: what the token's position is in its row
    paths          0 1 2 3 4, 0 1 2 5            what attention sees (attention.py): a row's own tokens query all of it
    nodes          [[2, 3, 4], [2, 5, -1]]       (B, T) each response token's node
    predict_from   [[1, 2, 3], [1, 2, 0]]        (B, T) its parent

Everything aligned with the rows, (B, T), is as in batch.py, so losses, gradients and metrics are those of flat packing.

Rows in the order of their token ids are the trees' leaves from left to right. Cutting that order in front of a row
computes again what the row shares with the one before it, and nothing else. A row of several contexts (batch.py) is
several leaves, which share what they can with each other too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from arpo.batch import MicroBatch, Row, RowPaths, assign_to_ranks, collate, pack, row_of
from arpo.options import AdvantageConfig
from arpo.selection import training_trajectories
from arpo.trajectory import Group


@dataclass(kw_only=True)
class TreeBatch(MicroBatch):
    """A MicroBatch of N unique tokens. The head scores each node once, however many rows go through it."""

    parents: torch.Tensor
    """(N,) each node's parent; 0 for a first token, which has none"""
    nodes: torch.Tensor
    """(B, T) each response token's node; -1 beyond a row's end"""
    loss_nodes: torch.Tensor
    """(U,) nodes that are a loss token of at least one row, ascending"""

    def gather(self, node_values: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) value (N, ...) of each response token's node, 0 beyond a row's end. Differentiable."""
        values = node_values[self.nodes.clamp(min=0)]
        return torch.where(expanded(self.nodes >= 0, values), values, 0)

    def head_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.parents[self.loss_nodes], self.input_ids[0, self.loss_nodes]

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        node_values = torch.zeros((len(self.parents), *values.shape[1:]), dtype=torch.float32, device=values.device)
        rows = self.gather(node_values.index_put((self.loss_nodes,), values))
        return torch.where(expanded(self.loss_mask, rows), rows, 0)


def expanded(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the mask (B, T) with further dimensions of size 1, as many as `values` (B, T, ...) has."""
    return mask.view(*mask.shape, *(1,) * (values.ndim - mask.ndim))


# ----------------------------------------------------------------------------------------- which rows come together


def pack_trees(groups: list[Group], max_tokens: int, cfg: AdvantageConfig | None = None) -> list[TreeBatch]:
    """Return all training rows of `groups` on one rank, at most `max_tokens` unique tokens in each micro-batch."""
    rows = [row_of(groups[index], t) for index, t in training_trajectories(groups, cfg or AdvantageConfig())]
    return tree_microbatches(rows, 0, 1, max_tokens) if rows else []


def tree_microbatches(
    rows: list[Row], rank: int, world_size: int, max_tokens: int, *, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Return what `batch.microbatches` does, with budget and balance counted in unique tokens."""
    plans = plan(rows, world_size, max_tokens)
    num_bins = max(1, *(len(bins) for bins in plans))
    bins = plans[rank] + [[]] * (num_bins - len(plans[rank]))
    return [collate_tree([rows[i] for i in ids], ids).to(device) for ids in bins]


def plan(rows: list[Row], world_size: int, max_tokens: int) -> list[list[list[int]]]:
    """Return [rank][micro-batch] -> indices into `rows`. Raises ValueError where a row alone exceeds `max_tokens`.

    Smaller pieces spread better over the ranks but compute more prefixes again. Of some sizes, the one is chosen that
    leaves the busiest rank the least to compute.
    """
    sequences = [[ids for _, _, ids in row.sequences] for row in rows]
    order, shared = depth_first([ids[0] for ids in sequences])
    lengths = [num_unique(sequences[i]) for i in order]
    for place, (before, after) in enumerate(pairwise(order), 1):  # with several sequences they may share more
        if len(sequences[before]) + len(sequences[after]) > 2:
            both = num_unique(sequences[before] + sequences[after])
            shared[place] = lengths[place - 1] + lengths[place] - both
    per_rank = (sum(lengths) - sum(shared)) / world_size
    limits = {max_tokens} | {min(max_tokens, int(per_rank / k) + 1) for k in range(1, 9) if world_size > 1}
    plans = []
    for limit in sorted(limits, reverse=True):
        pieces = cut(lengths, shared, limit)
        costs = [sum(lengths[a:b]) - sum(shared[a + 1 : b]) for a, b in pieces]
        shares = assign_to_ranks(costs, world_size)
        plans.append((max(sum(costs[p] for p in share) for share in shares), pieces, costs, shares))
    _, pieces, costs, shares = min(plans, key=lambda p: p[0])  # of equals the coarsest, with the fewest micro-batches
    return [
        [
            [i for p in bin_ for i in order[slice(*pieces[share[p]])]]
            for bin_ in pack([costs[p] for p in share], max_tokens)
        ]
        for share in shares
    ]


def cut(lengths: Sequence[int], shared: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Pieces [first, last) of the rows in depth-first order, of at most `limit` unique tokens (one row may have more).

    Of all ways the one that computes the fewest tokens again, and of equals the most even. `shared[i]` = tokens that
    row i shares with row i - 1. Two prompts of two rows, lengths [5, 5, 5, 5], shared [0, 4, 0, 4], limit 11:
    [(0, 2), (2, 4)], 6 tokens each.
    """
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # by number of rows: (tokens again, sum of squares, last cut)
    for end in range(1, len(lengths) + 1):
        cost, options = 0, []
        for first in range(end - 1, -1, -1):
            cost += lengths[first] - (shared[first + 1] if first + 1 < end else 0)
            if cost > limit and options:
                break
            again, squares, _ = best[first]
            options.append((again + shared[first], squares + cost**2, first))
        best.append(min(options))
    pieces, end = [], len(lengths)
    while end:
        first = best[end][2]
        pieces.append((first, end))
        end = first
    return pieces[::-1]


def num_unique(sequences: list[np.ndarray]) -> int:
    """Return the number of nodes of the trees of these sequences."""
    return sum(map(len, sequences)) - (sum(depth_first(sequences)[1]) if len(sequences) > 1 else 0)


def depth_first(sequences: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return the indices of sequences in the order of their token ids, a prefix first, and for each of them the number
    of tokens that it shares with the one before it, 0 for the first."""
    ids = [sequence.astype(">u4") for sequence in sequences]  # bytes sort like numbers
    keys = [i.tobytes() for i in ids]
    order = sorted(range(len(ids)), key=keys.__getitem__)
    shared = [0]
    for before, after in pairwise(order):
        n = min(len(ids[before]), len(ids[after]))
        different = ids[before][:n] != ids[after][:n]
        shared.append(int(different.argmax()) if different.any() else n)
    return order, shared


# ------------------------------------------------------------------------------------------------- rows -> tensors


def collate_tree(rows: list[Row], row_ids: Sequence[int]) -> MicroBatch:
    """Return the TreeBatch of rows in any order, which it has depth first; without rows an empty micro-batch."""
    if not rows:
        return collate([])
    order, _ = depth_first([row.sequences[0][2] for row in rows])
    rows = [rows[i] for i in order]
    flat = collate(rows, [row_ids[i] for i in order])
    sequences = [(b, *sequence) for b, row in enumerate(rows) for sequence in row.sequences]
    order, shared = depth_first([ids for *_, ids in sequences])
    sequences = [sequences[i] for i in order]
    paths = number_nodes([len(ids) for *_, ids in sequences], shared)
    num_nodes = sum(map(len, paths)) - sum(shared)
    input_ids, depths, parents = (np.zeros(num_nodes, np.int64) for _ in range(3))
    nodes = np.full(flat.targets.shape, -1)
    for (b, start, num_before, ids), path in zip(sequences, paths, strict=True):
        input_ids[path] = ids
        depths[path] = np.arange(len(path))
        parents[path[1:]] = path[:-1]
        nodes[b, start : start + len(path) - num_before] = path[num_before:]
    seen = [(path, n) for path, n in zip(paths, shared, strict=True) if len(path) > n]  # that have tokens of their own
    changed = {
        "input_ids": torch.from_numpy(input_ids)[None],
        "position_ids": torch.from_numpy(depths)[None],
        "predict_from": torch.from_numpy(np.where(nodes >= 0, parents[nodes], 0)),
        "paths": RowPaths(
            num_queries=tuple(len(path) - n for path, n in seen),
            num_keys=tuple(len(path) for path, _ in seen),
            keys=torch.from_numpy(np.concatenate([path for path, _ in seen])),
        ),
    }
    return TreeBatch(
        **vars(flat) | changed,
        parents=torch.from_numpy(parents),
        nodes=torch.from_numpy(nodes),
        loss_nodes=torch.from_numpy(np.unique(nodes[flat.loss_mask.numpy()])),
    )


def number_nodes(lengths: Sequence[int], shared: Sequence[int]) -> list[np.ndarray]:
    """Return each row's nodes from its first token on, of rows in depth-first order."""
    paths: list[np.ndarray] = []
    count, path = 0, np.zeros(0, np.int64)
    for length, num_shared in zip(lengths, shared, strict=True):
        path = np.concatenate([path[:num_shared], np.arange(count, count + length - num_shared)])
        count += length - num_shared
        paths.append(path)
    return paths
