"""Rows and padding-free micro-batches, balanced over ranks under a token budget.

Shapes: B rows (trajectories) in a micro-batch, T response tokens of the longest row, N tokens of all rows together.
Rows lie one behind the other in one sequence of N tokens, position ids restart at 0 for each row, and attention works
row by row (attention.py).

A trajectory whose prompt gave way to other contexts is one row, with a sequence for each of them.

    input_ids      p p p r r r r p p r r r       (N,) two rows: prompt 3 + response 4, prompt 2 + response 3
    position_ids   0 1 2 3 4 5 6 0 1 2 3 4
    predict_from   [[2, 3, 4, 5], [8, 9, 10, 0]]   (B, T) the hidden state at 2 predicts the token at 3, ...
    loss_mask      [[1, 1, 0, 1], [1, 1, 1, 0]]    (B, T)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arpo.trajectory import Group, Trajectory

BUDGET = "update.max_tokens_per_microbatch"
"""The option that limits a micro-batch in RL; SFT has one of its own."""


@dataclass(frozen=True)
class Row:
    """One sequence to train on. The response-aligned arrays have the length of `response_ids`."""

    prompt_ids: np.ndarray
    """Prompt; if empty (SFT), nothing predicts the first response token, and its loss_mask must be 0."""
    response_ids: np.ndarray
    loss_mask: np.ndarray
    """1 = counts in the loss."""
    rollout_logprobs: np.ndarray | None = None
    contexts: tuple[tuple[int, np.ndarray], ...] = ()
    """(response index, token ids) of what stands in place of all before it, for the tokens from there on."""

    def __post_init__(self) -> None:
        assert len(self.response_ids) == len(self.loss_mask)
        assert self.rollout_logprobs is None or len(self.rollout_logprobs) == len(self.response_ids)
        if not len(self.prompt_ids) and len(self.response_ids) and self.loss_mask[0]:
            raise ValueError("a row without prompt cannot train its first token; set loss_mask[0] to 0")

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return len(self.prompt_ids) + len(self.response_ids) + sum(len(ids) for _, ids in self.contexts)

    @property
    def sequences(self) -> list[tuple[int, int, np.ndarray]]:
        """(first response index, number of tokens before it, token ids) of what the model reads as one; where the
        prompt gave way to other contexts, there are several."""
        befores = [(0, self.prompt_ids), *self.contexts]
        ends = [*(start for start, _ in self.contexts), len(self.response_ids)]
        return [
            (start, len(before), np.concatenate([before, self.response_ids[start:end]]))
            for (start, before), end in zip(befores, ends, strict=True)
        ]


class RowPaths:
    """Table of the tokens of a micro-batch that each row attends to.

    Not a dataclass: FSDP2 copies those in front of each layer, and the layers of a pass could share no mask.
    """

    def __init__(self, num_queries: tuple[int, ...], num_keys: tuple[int, ...], keys: Tensor | None = None) -> None:
        self.num_queries = num_queries
        """Number of tokens that each row computes for itself (at least 1). They lie row after row in the sequence."""
        self.num_keys = num_keys
        """Number of tokens that each row attends to: its own and those that it shares with earlier rows."""
        self.keys = keys
        """(sum of num_keys,) positions of the tokens that each row attends to, row after row; None = all in order."""
        self.query_starts = cumulated(num_queries)
        """(rows + 1,) int32, "cu_seqlens": where each row's queries begin, and at the end their number"""
        self.key_starts = self.query_starts if num_keys == num_queries else cumulated(num_keys)
        """(rows + 1,) int32, the same of the keys"""
        self.masks: dict[tuple[int, int | None], Tensor] = {}
        """Masks that the layers of one forward pass have computed so far, by (row, window); filled by `mask`."""

    def mask(self, row: int, window: int | None, like: Tensor) -> Tensor | None:
        """Return the row's attention mask (queries, keys), to be added to the scores: 0 or -inf. None = just causal."""
        num_queries, num_keys = self.num_queries[row], self.num_keys[row]
        if num_queries == num_keys and not window:
            return None
        if (row, window) not in self.masks:
            last = num_keys - num_queries  # key that the first query sees last
            seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=like.device).tril(last)
            if window:
                seen = seen.triu(last - window + 1)
            self.masks[row, window] = like.new_zeros(seen.shape).masked_fill(~seen, -torch.inf)
        return self.masks[row, window]

    def for_one_pass(self) -> RowPaths:
        """Return a copy without masks, so that they live only as long as one forward pass."""
        fresh = copy.copy(self)
        fresh.masks = {}
        return fresh

    def padded(self, num_tokens: int) -> RowPaths:
        """Return a copy with `num_tokens` more rows of one token each at the end."""
        ones, keys = (1,) * num_tokens, self.keys
        if keys is not None:
            num_tokens_before = sum(self.num_queries)
            more = torch.arange(num_tokens_before, num_tokens_before + num_tokens, device=keys.device)
            keys = torch.cat([keys, more])
        return RowPaths(self.num_queries + ones, self.num_keys + ones, keys).to(self.query_starts.device)

    def to(self, device: torch.device | str) -> RowPaths:
        moved = self.for_one_pass()
        moved.keys = self.keys if self.keys is None else to_device(self.keys, device)
        moved.query_starts = to_device(self.query_starts, device)
        same = self.num_keys == self.num_queries
        moved.key_starts = moved.query_starts if same else to_device(self.key_starts, device)
        return moved


def cumulated(lengths: tuple[int, ...]) -> Tensor:
    """Return (rows + 1,) int32. (3, 2) -> [0, 3, 5]"""
    return torch.from_numpy(np.cumsum((0, *lengths), dtype=np.int32))


@dataclass
class MicroBatch:
    """The input of one forward/backward pass. (B, T) tensors are aligned with the responses, 0 beyond a row's end."""

    input_ids: Tensor
    """(1, N)"""
    position_ids: Tensor
    """(1, N), from 0 within each row"""
    predict_from: Tensor
    """(B, T) flat position whose hidden state predicts response token (b, t): the position just before it"""
    targets: Tensor
    """(B, T) response token ids"""
    loss_mask: Tensor
    """(B, T) bool"""
    loss_index: Tensor
    """(2, L) row and column of each loss token, row after row. A tensor on a GPU is indexed by these, not by the mask:
    then the host would wait until it knows how many tokens there are."""
    rollout_logprobs: Tensor
    """(B, T) float32"""
    paths: RowPaths
    """Tokens that each row attends to"""
    old_logprobs: Tensor | None = None
    """(B, T), like all that follow filled before the update or by it, and only what the options ask for"""
    old_entropies: Tensor | None = None
    """(B, T) nats, filled with old_logprobs"""
    ref_logprobs: Tensor | None = None
    """(B, T) of the reference policy"""
    rollout_weights: Tensor | None = None
    """(B, T) importance weights of the rollout correction"""
    advantages: Tensor | None = None
    """(B, T)"""
    old_values: Tensor | None = None
    """(B, T) of the critic before the update"""
    returns: Tensor | None = None
    """(B, T) what the critic learns"""
    row_ids: tuple[int, ...] = ()
    """Each row's index in the global mini-batch; () = an empty micro-batch, which only keeps the ranks in step"""
    num_row_tokens: int = 0
    """Tokens of all rows, those that rows share (tree.py) counted for each of them"""

    @property
    def num_loss_tokens(self) -> int:
        return self.loss_index.shape[1]

    def at_loss_tokens(self, values: Tensor) -> Tensor:
        """Return the values (L,) that (B, T) ones have at the loss tokens."""
        rows, columns = self.loss_index
        return values[rows, columns]

    def head_inputs(self) -> tuple[Tensor, Tensor]:
        """Return the flat positions and the target ids that the head scores; `to_rows` takes its outputs."""
        return self.at_loss_tokens(self.predict_from), self.at_loss_tokens(self.targets)

    def to_rows(self, values: Tensor) -> Tensor:
        """Return what each of `head_inputs` has, (L, ...), as (B, T, ...) float32, 0 where the mask is 0.

        Differentiable."""
        rows = torch.zeros((*self.loss_mask.shape, *values.shape[1:]), dtype=torch.float32, device=values.device)
        return rows.index_put(tuple(self.loss_index), values)

    def attention_options(self) -> dict[str, Any]:
        """Return keyword arguments for the model's attention layers."""
        return {"paths": self.paths.for_one_pass()}

    def rows_to_tensor(self, values: Sequence[np.ndarray]) -> Tensor:
        """Return `values`, an array for each row of the global mini-batch, as (B, T) float32; 0 where the mask is.

        NaN at a loss token that has no value, which ends the run; a 0 would train on, and say nothing.
        """
        out = torch.full(self.loss_mask.shape, float("nan"), dtype=torch.float32)
        for b, row_id in enumerate(self.row_ids):
            out[b, : len(values[row_id])] = torch.as_tensor(values[row_id], dtype=torch.float32)
        return torch.where(self.loss_mask.bool(), to_device(out, self.loss_mask.device), 0.0)

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on the device. The host does not wait for what the device is busy with."""
        moved = {k: to_device(v, device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return type(self)(**moved | {"paths": self.paths.to(device)})


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the host on a device; to a GPU from pinned memory, as other copies make the host wait."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def row_of(group: Group, trajectory: Trajectory) -> Row:
    """Return the row of a trajectory and its group's prompt."""
    return Row(
        prompt_ids=np.asarray(group.prompt.token_ids, dtype=np.int64),
        response_ids=np.asarray(trajectory.token_ids, dtype=np.int64),
        loss_mask=np.asarray(trajectory.loss_mask, dtype=np.int64),
        rollout_logprobs=np.asarray(trajectory.rollout_logprobs, dtype=np.float32),
        contexts=tuple((c.start, np.asarray(c.token_ids, dtype=np.int64)) for c in trajectory.contexts),
    )


def assign_to_ranks(lengths: list[int], num_ranks: int) -> list[list[int]]:
    """Return the indices of each rank: longest first, each to the rank that has the fewest tokens so far.

    [5, 3, 4, 2], 2 ranks -> [[0, 3], [2, 1]]: 7 tokens each.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return shares


def pack(lengths: list[int], max_tokens: int, option: str = BUDGET) -> list[list[int]]:
    """Return the indices of bins of at most `max_tokens` each (first fit, longest first): [5, 3, 4, 2], budget 7 ->
    [[0, 3], [2, 1]]. Raises ValueError where one alone has more; it names the `option` that sets the budget.
    """
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] > max_tokens:
            raise ValueError(
                f"a sequence of {lengths[index]} tokens does not fit into "
                f"{option}={max_tokens}; raise it or shorten the sequences"
            )
        b = next((b for b, load in enumerate(loads) if load + lengths[index] <= max_tokens), len(bins))
        if b == len(bins):
            bins.append([])
            loads.append(0)
        bins[b].append(index)
        loads[b] += lengths[index]
    return bins


def microbatches(
    rows: list[Row],
    rank: int,
    world_size: int,
    max_tokens: int,
    *,
    device: torch.device | str = "cpu",
    option: str = BUDGET,
) -> list[MicroBatch]:
    """Return this rank's micro-batches of a global mini-batch. `option` is the name of `max_tokens` in errors.

    Every rank passes the same rows and computes the same plan. All ranks get the same number of micro-batches (FSDP2's
    collectives must match): a rank that has fewer gets empty ones, of one token that counts nowhere.
    """
    lengths = [row.num_tokens for row in rows]
    shares = assign_to_ranks(lengths, world_size)
    plans = [pack([lengths[i] for i in share], max_tokens, option) for share in shares]
    num_bins = max(1, *(len(plan) for plan in plans))
    plan = plans[rank] + [[]] * (num_bins - len(plans[rank]))
    row_ids = [[shares[rank][i] for i in bin_] for bin_ in plan]
    return [collate([rows[i] for i in ids], ids).to(device) for ids in row_ids]


def collate(rows: list[Row], row_ids: Sequence[int] = ()) -> MicroBatch:
    """Return the micro-batch of rows, `row_ids` in the global list. Without rows it is an empty one."""
    rows = rows or [Row(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))]
    longest = max(len(row.response_ids) for row in rows)

    def padded(values: list[np.ndarray], dtype: torch.dtype) -> Tensor:  # (B, T)
        out = torch.zeros(len(rows), longest, dtype=dtype)
        for i, value in enumerate(values):
            out[i, : len(value)] = torch.as_tensor(value, dtype=dtype)
        return out

    sequences = [sequence for row in rows for sequence in row.sequences]
    lengths = tuple(len(ids) for _, _, ids in sequences)
    begin = iter(np.cumsum([0, *lengths]))
    places = [  # of each row's response tokens in the sequence of all
        np.concatenate([next(begin) + np.arange(num_before, len(ids)) for _, num_before, ids in row.sequences])
        for row in rows
    ]
    no_logprobs = np.zeros(0, np.float32)  # padded with 0
    loss_mask = padded([row.loss_mask for row in rows], torch.bool)
    rollout_logprobs = [no_logprobs if row.rollout_logprobs is None else row.rollout_logprobs for row in rows]
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate([ids for _, _, ids in sequences]).astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None],
        predict_from=padded([p - 1 for p in places], torch.long).clamp_(min=0),  # -1 without a prompt, where it is 0
        targets=padded([row.response_ids for row in rows], torch.long),
        loss_mask=loss_mask,
        loss_index=index_of(loss_mask),
        rollout_logprobs=padded(rollout_logprobs, torch.float32) * loss_mask,
        paths=RowPaths(lengths, lengths),
        row_ids=tuple(row_ids),
        num_row_tokens=sum(lengths),
    )


def index_of(mask: Tensor) -> Tensor:
    """Return row and column (2, L) of each 1 in a mask (B, T) on the CPU. [[0, 1], [1, 1]] -> [[0, 1, 1], [1, 0, 1]]"""
    return mask.nonzero().T.contiguous()
