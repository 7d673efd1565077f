"""Micro-batches whose rows form trees: a prefix shared by several rows is computed once (update.layout=tree).

Two rows share all tokens up to the first different token id, even if neither is a branch of the other. So the rows of a
group share at least the prompt. A node is a unique token; nodes are numbered depth first. Two rows, prompt a b:

    rows           a b c d e      a b c x
    input_ids      a b c d e x                   (N,) a token per node
    position_ids   0 1 2 3 4 3                   the depth, which is the token's position in its row
    paths          0 1 2 3 4, 0 1 2 5            the nodes that each row attends to (attention.py)
    nodes          [[2, 3, 4], [2, 5, -1]]       (B, T) each response token's node
    predict_from   [[1, 2, 3], [1, 2, 0]]        (B, T) its parent

All (B, T) tensors are as in batch.py. So losses, gradients and metrics equal the results of flat packing.

Rows sorted by token ids are the trees' leaves from left to right. A cut of this order before a row costs only the
tokens that the row shares with the previous row. A row with several contexts (batch.py) is several leaves, which share
tokens with each other in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from arpo.batch import MicroBatch, Row, RowPaths, assign_to_ranks, collate, pack


@dataclass(kw_only=True)
class TreeBatch(MicroBatch):
    """A MicroBatch of N unique tokens. The head scores each node once, even if several rows share it."""

    parents: torch.Tensor
    """(N,) each node's parent; 0 for the first token of a tree, which has no parent"""
    nodes: torch.Tensor
    """(B, T) each response token's node; -1 beyond a row's end"""
    loss_nodes: torch.Tensor
    """(U,) nodes that are a loss token of any row, in ascending order"""

    def gather(self, node_values: torch.Tensor) -> torch.Tensor:
        """Return each response token's node value, (N, ...) -> (B, T, ...); 0 beyond a row's end. Differentiable."""
        values = node_values[self.nodes.clamp(min=0)]
        return torch.where(expanded(self.nodes >= 0, values), values, 0)

    def head_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.parents[self.loss_nodes], self.input_ids[0, self.loss_nodes]

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        node_values = torch.zeros((len(self.parents), *values.shape[1:]), dtype=torch.float32, device=values.device)
        rows = self.gather(node_values.index_put((self.loss_nodes,), values))
        return torch.where(expanded(self.loss_mask, rows), rows, 0)


def expanded(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the mask (B, T) with dimensions of size 1 at the end, so that it broadcasts to `values` (B, T, ...)."""
    return mask.view(*mask.shape, *(1,) * (values.ndim - mask.ndim))


# ------------------------------------------------------------------------------------------ rows of each micro-batch


def tree_microbatches(
    rows: list[Row], rank: int, world_size: int, max_tokens: int, *, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Return this rank's micro-batches like `batch.microbatches`, but count the budget in unique tokens."""
    bins_of_rank = plan(rows, world_size, max_tokens)
    num_micros = max(1, *(len(bins) for bins in bins_of_rank))
    bins = bins_of_rank[rank]
    bins = bins + [[]] * (num_micros - len(bins))
    return [collate_tree([rows[i] for i in ids], ids).to(device) for ids in bins]


def plan(rows: list[Row], world_size: int, max_tokens: int) -> list[list[list[int]]]:
    """Return [rank][micro-batch] -> indices into `rows`. Raises ValueError if a single row exceeds `max_tokens`.

    Small pieces balance the ranks better, but compute more shared prefixes twice. So several sizes are tried, and the
    one with the least work for the busiest rank is taken.
    """
    # ---- rows in depth-first order, the unique tokens of each, and those shared with the row before
    sequences = [[ids for _, _, ids in row.sequences] for row in rows]
    order, shared = depth_first([ids[0] for ids in sequences])
    lengths = [num_unique(sequences[i]) for i in order]
    for position, (before, after) in enumerate(pairwise(order), start=1):
        # Rows with several sequences may share more than a prefix of their first ones.
        if len(sequences[before]) + len(sequences[after]) > 2:
            num_together = num_unique(sequences[before] + sequences[after])
            shared[position] = lengths[position - 1] + lengths[position] - num_together

    # ---- a plan for each size: (work of the busiest rank, pieces, work of each piece, pieces of each rank)
    num_tokens_per_rank = (sum(lengths) - sum(shared)) / world_size
    limits = {max_tokens}
    if world_size > 1:
        limits |= {min(max_tokens, int(num_tokens_per_rank / k) + 1) for k in range(1, 9)}  # about k pieces per rank
    plans = []
    for limit in sorted(limits, reverse=True):
        pieces = cut(lengths, shared, limit)
        costs = [sum(lengths[start:end]) - sum(shared[start + 1 : end]) for start, end in pieces]
        shares = assign_to_ranks(costs, world_size)
        busiest = max(sum(costs[p] for p in share) for share in shares)
        plans.append((busiest, pieces, costs, shares))

    # ---- among equal plans the first has the largest pieces, and so the fewest micro-batches
    _, pieces, costs, shares = min(plans, key=lambda candidate: candidate[0])
    bins_of_rank = []
    for share in shares:
        bins = []
        for bin_ in pack([costs[p] for p in share], max_tokens):
            pieces_of_bin = [pieces[share[p]] for p in bin_]
            bins.append([i for start, end in pieces_of_bin for i in order[start:end]])
        bins_of_rank.append(bins)
    return bins_of_rank


def cut(lengths: Sequence[int], shared: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Cut rows in depth-first order into pieces [start, end) of at most `limit` unique tokens. One row may be longer.

    `lengths[i]` = unique tokens of row i, `shared[i]` = tokens that it shares with row i - 1. Of all cuts, the result
    computes the fewest tokens twice. Of equal ones, it has the smallest sum of squared piece sizes. So it cuts wherever
    nothing is shared.

    Two prompts with two rows each, lengths [5, 5, 5, 5], shared [0, 4, 0, 4], limit 11:
    [(0, 2), (2, 4)], 6 tokens each.
    """
    # Dynamic programming. best[n] = (tokens computed twice, sum of squared costs, start of the last piece) of n rows.
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for end in range(1, len(lengths) + 1):
        cost = 0  # unique tokens of the piece [start, end)
        options = []
        for start in range(end - 1, -1, -1):
            cost += lengths[start]
            if start + 1 < end:
                cost -= shared[start + 1]
            if cost > limit and options:
                break
            twice, squares, _ = best[start]
            options.append((twice + shared[start], squares + cost**2, start))
        best.append(min(options))
    pieces = []
    end = len(lengths)
    while end:
        start = best[end][2]
        pieces.append((start, end))
        end = start
    return pieces[::-1]


def num_unique(sequences: list[np.ndarray]) -> int:
    """Return the number of unique tokens of these sequences."""
    if len(sequences) == 1:  # the usual case: no need to sort
        return len(sequences[0])
    _, shared = depth_first(sequences)
    return sum(map(len, sequences)) - sum(shared)


def depth_first(sequences: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return (order, shared): the indices of sequences sorted by their token ids, a prefix first; and for each sequence
    in this order, the number of tokens that it shares with the one before it, 0 for the first.

    [7, 8, 9], [7], [7, 8] -> order [1, 2, 0], shared [0, 1, 2].
    """
    big_endian = [sequence.astype(">u4") for sequence in sequences]  # the bytes sort like the numbers
    keys = [ids.tobytes() for ids in big_endian]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = [0]
    for before, after in pairwise(order):
        num_common = min(len(big_endian[before]), len(big_endian[after]))
        differs = big_endian[before][:num_common] != big_endian[after][:num_common]
        shared.append(int(differs.argmax()) if differs.any() else num_common)
    return order, shared


# ------------------------------------------------------------------------------------------------- rows -> tensors


def collate_tree(rows: list[Row], row_ids: Sequence[int]) -> MicroBatch:
    """Sort the rows depth first, and return their TreeBatch. Without rows return an empty micro-batch."""
    if not rows:
        return collate([])
    row_order, _ = depth_first([row.sequences[0][2] for row in rows])
    rows = [rows[i] for i in row_order]
    flat = collate(rows, [row_ids[i] for i in row_order])

    # ---- the nodes of each sequence; a row may have several sequences
    sequences = [(b, *sequence) for b, row in enumerate(rows) for sequence in row.sequences]
    order, shared = depth_first([ids for *_, ids in sequences])
    sequences = [sequences[i] for i in order]
    paths = number_nodes([len(ids) for *_, ids in sequences], shared)

    # ---- the token, depth and parent of each node, and the node of each response token
    num_nodes = sum(map(len, paths)) - sum(shared)
    input_ids = np.zeros(num_nodes, np.int64)
    depths = np.zeros(num_nodes, np.int64)
    parents = np.zeros(num_nodes, np.int64)
    nodes = np.full(flat.targets.shape, -1)
    for (b, start, num_context, ids), path in zip(sequences, paths, strict=True):
        input_ids[path] = ids
        depths[path] = np.arange(len(path))
        parents[path[1:]] = path[:-1]
        nodes[b, start : start + len(path) - num_context] = path[num_context:]

    # ---- a sequence whose nodes are all shared has nothing to compute
    computed = [(path, num_shared) for path, num_shared in zip(paths, shared, strict=True) if len(path) > num_shared]
    changed = {
        "input_ids": torch.from_numpy(input_ids)[None],
        "position_ids": torch.from_numpy(depths)[None],
        "predict_from": torch.from_numpy(np.where(nodes >= 0, parents[nodes], 0)),
        "paths": RowPaths(
            num_queries=tuple(len(path) - num_shared for path, num_shared in computed),
            num_keys=tuple(len(path) for path, _ in computed),
            keys=torch.from_numpy(np.concatenate([path for path, _ in computed])),
        ),
    }
    return TreeBatch(
        **vars(flat) | changed,
        parents=torch.from_numpy(parents),
        nodes=torch.from_numpy(nodes),
        loss_nodes=torch.from_numpy(np.unique(nodes[flat.loss_mask.numpy()])),
    )


def number_nodes(lengths: Sequence[int], shared: Sequence[int]) -> list[np.ndarray]:
    """Return the nodes of each sequence, in depth-first order. `shared` is as in `depth_first`.

    lengths [5, 4], shared [0, 3] -> [0, 1, 2, 3, 4] and [0, 1, 2, 5].
    """
    paths: list[np.ndarray] = []
    path = np.zeros(0, np.int64)
    num_nodes = 0
    for length, num_shared in zip(lengths, shared, strict=True):
        num_new = length - num_shared
        path = np.concatenate([path[:num_shared], np.arange(num_nodes, num_nodes + num_new)])
        num_nodes += num_new
        paths.append(path)
    return paths
