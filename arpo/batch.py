"""Rows and padding-free micro-batches, balanced over ranks under a token budget.

Shapes: B rows (trajectories) in a micro-batch, T response tokens of the longest row; N tokens and L loss tokens of all
rows together.
The rows are concatenated into a sequence of N tokens. Position ids restart at 0 for each row, and attention works row
by row (attention.py).

A trajectory with several contexts (rollout.context) is a single row, with a sequence for each context.

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

BUDGET_OPTION = "update.max_tokens_per_microbatch"
"""The option that limits a micro-batch in RL. SFT passes the name of its option."""


@dataclass(frozen=True)
class Row:
    """One trajectory or conversation to train on. `loss_mask` and `rollout_logprobs` are as long as `response_ids`."""

    prompt_ids: np.ndarray
    """May be empty (SFT). Then nothing predicts the first response token, and its loss_mask must be 0."""
    response_ids: np.ndarray
    loss_mask: np.ndarray
    """1 = counts in the loss."""
    rollout_logprobs: np.ndarray | None = None
    """None = no policy sampled the response (SFT)."""
    contexts: tuple[tuple[int, np.ndarray], ...] = ()
    """(response index, token ids): from this index on, tokens are read after these ids, not after the prompt."""

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
        """The sequences that the model reads. The first begins with the prompt, every other with a new context.

        Each is (first response index, number of context tokens, token ids), where the token ids begin with the context.
        """
        contexts = [(0, self.prompt_ids), *self.contexts]
        ends = [*(start for start, _ in self.contexts), len(self.response_ids)]
        return [
            (start, len(context_ids), np.concatenate([context_ids, self.response_ids[start:end]]))
            for (start, context_ids), end in zip(contexts, ends, strict=True)
        ]


def row_of(group: Group, trajectory: Trajectory) -> Row:
    """Return the row of a trajectory and its group's prompt."""
    return Row(
        prompt_ids=np.asarray(group.prompt.token_ids, dtype=np.int64),
        response_ids=np.asarray(trajectory.token_ids, dtype=np.int64),
        loss_mask=np.asarray(trajectory.loss_mask, dtype=np.int64),
        rollout_logprobs=np.asarray(trajectory.rollout_logprobs, dtype=np.float32),
        contexts=tuple(
            (context.start, np.asarray(context.token_ids, dtype=np.int64)) for context in trajectory.contexts
        ),
    )


@dataclass
class MicroBatch:
    """The input of one forward and backward pass. (B, T) tensors are aligned with responses, 0 beyond a row's end."""

    input_ids: Tensor
    """(1, N)"""
    position_ids: Tensor
    """(1, N), from 0 within each row"""
    predict_from: Tensor
    """(B, T) position in the N tokens whose hidden state predicts response token (b, t): the previous token"""
    targets: Tensor
    """(B, T) response token ids"""
    loss_mask: Tensor
    """(B, T) bool"""
    loss_index: Tensor
    """(2, L) row and column of each loss token, row after row. Index a tensor with `loss_index`, not with the mask: for
    a mask on a GPU the host would wait for the number of tokens."""
    rollout_logprobs: Tensor
    """(B, T) float32"""
    paths: RowPaths
    """Tokens that each row attends to"""
    starts_context: Tensor
    """(B, T) bool, True only at the first response token after each new context (Row.contexts)"""
    row_ids: tuple[int, ...] = ()
    """Each row's index in the global mini-batch. () = an empty micro-batch: all ranks need the same number of them"""
    num_row_tokens: int = 0
    """Number of tokens of all rows. Tokens that rows share (tree.py) count once per row"""
    old_logprobs: Tensor | None = None
    """(B, T). This field and the fields below are filled before or by the update, if an option needs the values"""
    old_entropies: Tensor | None = None
    """(B, T) nats, filled with old_logprobs"""
    ref_logprobs: Tensor | None = None
    """(B, T) under the reference policy"""
    rollout_weights: Tensor | None = None
    """(B, T) importance weights of the rollout correction"""
    advantages: Tensor | None = None
    """(B, T)"""
    old_values: Tensor | None = None
    """(B, T) the critic's values before the update"""
    returns: Tensor | None = None
    """(B, T) the critic's targets"""

    @property
    def num_loss_tokens(self) -> int:
        return self.loss_index.shape[1]

    def at_loss_tokens(self, values: Tensor) -> Tensor:
        """Return the values of (B, T) at the loss tokens, as (L,)."""
        rows, columns = self.loss_index
        return values[rows, columns]

    def head_inputs(self) -> tuple[Tensor, Tensor]:
        """Return what the head scores: (positions in the N tokens, target ids), (L,) each. See `to_rows`."""
        return self.at_loss_tokens(self.predict_from), self.at_loss_tokens(self.targets)

    def to_rows(self, values: Tensor) -> Tensor:
        """Return the head's outputs for `head_inputs`, (L, ...), as (B, T, ...) float32; 0 where the mask is 0.

        Differentiable.
        """
        rows = torch.zeros((*self.loss_mask.shape, *values.shape[1:]), dtype=torch.float32, device=values.device)
        return rows.index_put(tuple(self.loss_index), values)

    def attention_options(self) -> dict[str, Any]:
        """Return keyword arguments for the attention layers of a forward pass."""
        return {"paths": self.paths.for_one_pass()}

    def rows_to_tensor(self, values: Sequence[np.ndarray]) -> Tensor:
        """Return the values of this micro-batch's rows as (B, T) float32, 0 where the mask is 0.

        `values` has one array for each row of the global mini-batch.
        """
        # NaN, not 0: a loss token without a value must end the run, instead of training silently on a 0.
        out = torch.full(self.loss_mask.shape, float("nan"), dtype=torch.float32)
        for b, row_id in enumerate(self.row_ids):
            of_row = torch.as_tensor(values[row_id], dtype=torch.float32)
            out[b, : len(of_row)] = of_row
        return torch.where(self.loss_mask.bool(), to_device(out, self.loss_mask.device), 0.0)

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on the device. The host does not wait for work that the device is still doing."""
        moved = {}
        for name, value in vars(self).items():
            moved[name] = to_device(value, device) if isinstance(value, Tensor) else value
        moved["paths"] = self.paths.to(device)
        return type(self)(**moved)


class RowPaths:
    """The tokens of a micro-batch that each row attends to.

    In this class a row is one sequence (`Row.sequences`): a trajectory with several contexts has several.
    Not a dataclass: FSDP2 copies dataclasses before each layer, so the layers of a forward pass could not share masks.
    """

    def __init__(self, num_queries: tuple[int, ...], num_keys: tuple[int, ...], keys: Tensor | None = None) -> None:
        self.num_queries = num_queries
        """Number of tokens that each row computes itself (at least 1). They are consecutive, row after row."""
        self.num_keys = num_keys
        """Number of tokens that each row attends to: computed for the row, or shared with earlier rows."""
        self.keys = keys
        """(sum of num_keys,) positions of the tokens that each row attends to, row after row; None = all in order."""
        self.query_starts = cumulated(num_queries)
        """(rows + 1,) int32, "cu_seqlens": start of each row's queries, and at the end the number of all queries"""
        self.key_starts = self.query_starts if num_keys == num_queries else cumulated(num_keys)
        """(rows + 1,) int32, the same for the keys"""
        self.masks: dict[tuple[int, int | None], Tensor] = {}
        """(row, window) -> attention mask. `mask` fills this dict in the first layer of a forward pass. Later layers
        use the masks again."""

    def mask(self, row: int, window: int | None, like: Tensor) -> Tensor | None:
        """Return the row's attention mask (queries, keys), to be added to the scores: 0 or -inf. None = plain causal,
        also if the row fits into the window.

        `window` = number of keys that a query sees; None = all before it. The mask has the type and device of `like`.
        """
        num_queries = self.num_queries[row]
        num_keys = self.num_keys[row]
        if num_queries == num_keys and (not window or window >= num_keys):
            return None
        if (row, window) not in self.masks:
            last_key = num_keys - num_queries  # the last key that the first query sees
            sees = torch.ones(num_queries, num_keys, dtype=torch.bool, device=like.device).tril(last_key)
            if window:
                sees = sees.triu(last_key - window + 1)
            self.masks[row, window] = like.new_zeros(sees.shape).masked_fill(~sees, -torch.inf)
        return self.masks[row, window]

    def for_one_pass(self) -> RowPaths:
        """Return a copy without masks, so that masks are freed after the forward pass."""
        without_masks = copy.copy(self)
        without_masks.masks = {}
        return without_masks

    def padded(self, num_tokens: int) -> RowPaths:
        """Return a copy with `num_tokens` more rows of one token each at the end (padding of context parallelism)."""
        ones = (1,) * num_tokens
        keys = self.keys
        if keys is not None:
            start = sum(self.num_queries)
            keys = torch.cat([keys, torch.arange(start, start + num_tokens, device=keys.device)])
        return RowPaths(self.num_queries + ones, self.num_keys + ones, keys).to(self.query_starts.device)

    def to(self, device: torch.device | str) -> RowPaths:
        """Return a copy on the device, without masks."""
        moved = self.for_one_pass()
        if self.keys is not None:
            moved.keys = to_device(self.keys, device)
        moved.query_starts = to_device(self.query_starts, device)
        is_same = self.num_keys == self.num_queries
        moved.key_starts = moved.query_starts if is_same else to_device(self.key_starts, device)
        return moved


def cumulated(lengths: tuple[int, ...]) -> Tensor:
    """Return the sums of the first 0, 1, ... lengths, (rows + 1,) int32. (3, 2) -> [0, 3, 5]"""
    return torch.from_numpy(np.cumsum((0, *lengths), dtype=np.int32))


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a host tensor on a device. A copy to a GPU goes through pinned memory: any other makes the host wait."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def assign_to_ranks(lengths: list[int], num_ranks: int) -> list[list[int]]:
    """Return each rank's indices into `lengths`. The longest comes first, and goes to the rank with the fewest tokens.

    [5, 3, 4, 2], 2 ranks -> [[0, 3], [2, 1]]: 7 tokens each.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return shares


def pack(lengths: list[int], max_tokens: int, option: str = BUDGET_OPTION) -> list[list[int]]:
    """Return bins of indices with at most `max_tokens` each (first fit, longest first).

    [5, 3, 4, 2], budget 7 -> [[0, 3], [2, 1]]. Raises ValueError if a single sequence is longer; the message names
    `option`, which sets the budget.
    """
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[index] > max_tokens:
            raise ValueError(
                f"a sequence of {lengths[index]} tokens does not fit into "
                f"{option}={max_tokens}; raise it or shorten the sequences"
            )
        first_fit = next((b for b, load in enumerate(loads) if load + lengths[index] <= max_tokens), None)
        if first_fit is None:
            first_fit = len(bins)
            bins.append([])
            loads.append(0)
        bins[first_fit].append(index)
        loads[first_fit] += lengths[index]
    return bins


def microbatches(
    rows: list[Row],
    rank: int,
    world_size: int,
    max_tokens: int,
    *,
    device: torch.device | str = "cpu",
    option: str = BUDGET_OPTION,
) -> list[MicroBatch]:
    """Return this rank's micro-batches of a global mini-batch. `option` is the name of `max_tokens` in errors.

    Every rank passes the same rows and computes the same plan. All ranks get the same number of micro-batches, because
    FSDP2's collectives must match. A rank with fewer gets empty ones: a prompt token and a response token with loss
    mask 0.
    """
    lengths = [row.num_tokens for row in rows]
    shares = assign_to_ranks(lengths, world_size)
    bins_of_rank = [pack([lengths[i] for i in share], max_tokens, option) for share in shares]
    num_micros = max(1, *(len(bins) for bins in bins_of_rank))
    bins = bins_of_rank[rank] + [[]] * (num_micros - len(bins_of_rank[rank]))
    row_ids = [[shares[rank][i] for i in bin_] for bin_ in bins]
    return [collate([rows[i] for i in ids], ids).to(device) for ids in row_ids]


def collate(rows: list[Row], row_ids: Sequence[int] = ()) -> MicroBatch:
    """Return the micro-batch of the rows; `row_ids` are indices in the global mini-batch. [] = an empty micro-batch."""
    if not rows:
        one_token = np.zeros(1, np.int64)
        rows = [Row(prompt_ids=one_token, response_ids=one_token, loss_mask=one_token)]
    longest = max(len(row.response_ids) for row in rows)

    def padded(values: list[np.ndarray], dtype: torch.dtype) -> Tensor:  # (B, T)
        out = torch.zeros(len(rows), longest, dtype=dtype)
        for i, value in enumerate(values):
            out[i, : len(value)] = torch.as_tensor(value, dtype=dtype)
        return out

    token_ids: list[np.ndarray] = []  # of each sequence
    positions: list[np.ndarray] = []  # of each row: where its response tokens are in the N tokens
    num_tokens = 0
    for row in rows:
        positions_of_row = []
        for _, num_context, ids in row.sequences:
            positions_of_row.append(num_tokens + np.arange(num_context, len(ids)))
            token_ids.append(ids)
            num_tokens += len(ids)
        positions.append(np.concatenate(positions_of_row))
    lengths = tuple(len(ids) for ids in token_ids)

    no_logprobs = np.zeros(0, np.float32)  # padded with 0
    loss_mask = padded([row.loss_mask for row in rows], torch.bool)
    starts_context = torch.zeros_like(loss_mask)
    for i, row in enumerate(rows):
        for start, _ in row.contexts:
            starts_context[i, start : start + 1] = True  # a slice: the last context may have no token yet
    rollout_logprobs = [no_logprobs if row.rollout_logprobs is None else row.rollout_logprobs for row in rows]
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate(token_ids).astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None],
        # A row without prompt has no token that predicts its first one. Its index is then -1, clamped to 0, or a token
        # of the previous row. The loss mask is 0 there, so the value is not used.
        predict_from=padded([indices - 1 for indices in positions], torch.long).clamp_(min=0),
        targets=padded([row.response_ids for row in rows], torch.long),
        loss_mask=loss_mask,
        loss_index=index_of(loss_mask),
        rollout_logprobs=padded(rollout_logprobs, torch.float32) * loss_mask,
        paths=RowPaths(num_queries=lengths, num_keys=lengths),
        starts_context=starts_context,
        row_ids=tuple(row_ids),
        num_row_tokens=num_tokens,
    )


def index_of(mask: Tensor) -> Tensor:
    """Return row and column (2, L) of each 1 in a mask (B, T) on the CPU. [[0, 1], [1, 1]] -> [[0, 1, 1], [1, 0, 1]]"""
    return mask.nonzero().T.contiguous()
