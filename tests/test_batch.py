import numpy as np
import pytest
import torch

import train_sft
from arpo.batch import Row, assign_to_ranks, collate, microbatches, pack
from arpo.ranks import Ranks


def make_row(num_prompt: int, mask: list[int], first_id: int = 0) -> Row:
    """Token ids count up from first_id; logprobs are -1, -2, ..."""
    n = len(mask)
    return Row(
        prompt_ids=np.arange(first_id, first_id + num_prompt),
        response_ids=np.arange(first_id + num_prompt, first_id + num_prompt + n),
        loss_mask=np.asarray(mask),
        rollout_logprobs=-np.arange(1, n + 1, dtype=np.float32),
    )


def test_rows_lie_one_behind_the_other_and_each_token_is_predicted_from_the_one_before_it_in_its_row():
    micro = collate([make_row(3, [1, 1, 0, 1]), make_row(2, [1, 1, 1], first_id=50)], [7, 4])
    assert micro.input_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 50, 51, 52, 53, 54]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]]
    assert micro.loss_mask.tolist() == [[True, True, False, True], [True, True, True, False]]
    assert micro.rollout_logprobs.tolist() == [[-1.0, -2.0, 0.0, -4.0], [-1.0, -2.0, -3.0, 0.0]]
    assert micro.row_ids == (7, 4)
    assert micro.num_loss_tokens == 6
    sources = micro.predict_from[micro.loss_mask]
    assert torch.equal(micro.input_ids[0][sources + 1], micro.targets[micro.loss_mask])
    assert torch.equal(micro.position_ids[0][sources + 1], micro.position_ids[0][sources] + 1)


def test_values_of_global_rows_find_their_place_and_spare_the_tool_output():
    micro = collate([make_row(3, [1, 1, 0, 1]), make_row(2, [1, 1, 1])], [2, 0])
    by_row = [np.array([-1.0, -2.0, -3.0]), np.array([9.0]), np.array([4.0, 5.0, 6.0, 7.0])]
    assert micro.rows_to_tensor(by_row).tolist() == [[4.0, 5.0, 0.0, 7.0], [-1.0, -2.0, -3.0, 0.0]]


def test_a_row_without_prompt_cannot_train_its_first_token():
    micro = collate([Row(np.array([]), np.array([5, 6, 7]), np.array([0, 1, 1]))])
    assert micro.input_ids.tolist() == [[5, 6, 7]] and micro.input_ids.dtype == torch.int64
    assert micro.predict_from[micro.loss_mask].tolist() == [0, 1]
    with pytest.raises(ValueError, match="first token"):
        Row(np.array([]), np.array([5]), np.array([1]))


def test_packing_respects_the_budget_and_keeps_every_row_once():
    lengths = np.random.default_rng(0).integers(1, 100, size=200).tolist()
    bins = pack(lengths, 128)
    assert sorted(i for b in bins for i in b) == list(range(200))
    assert all(sum(lengths[i] for i in b) <= 128 for b in bins)
    assert len(bins) <= 1.25 * sum(lengths) / 128
    assert pack([5, 3, 4, 2], 7) == [[0, 3], [2, 1]]  # both are full to the last token


def test_a_row_over_the_budget_is_an_error_that_names_the_option_of_rl_or_sft():
    with pytest.raises(ValueError, match=r"update\.max_tokens_per_microbatch=10"):
        pack([5, 11], 10)
    alone = Ranks(0, 1, torch.device("cpu"), None)
    with pytest.raises(ValueError, match=r" data\.max_tokens_per_microbatch=4;"):
        train_sft.local_microbatches([make_row(3, [1, 1])], 4, alone)


def test_ranks_get_about_the_same_number_of_tokens():
    lengths = np.random.default_rng(1).integers(100, 4000, size=64).tolist()
    shares = assign_to_ranks(lengths, 8)
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert sorted(i for share in shares for i in share) == list(range(64))
    assert max(loads) - min(loads) <= max(lengths) and max(loads) < 1.1 * sum(loads) / 8


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_row_is_trained_once_and_all_ranks_have_equally_many_microbatches(world_size):
    rows = [make_row(1 + i % 3, [1] * (1 + i)) for i in range(5)]
    per_rank = [microbatches(rows, rank, world_size, max_tokens=9) for rank in range(world_size)]
    assert len({len(micros) for micros in per_rank}) == 1
    assert sorted(i for micros in per_rank for micro in micros for i in micro.row_ids) == list(range(5))
    assert all(micro.input_ids.numel() <= 9 for micros in per_rank for micro in micros)


def test_the_rank_with_the_fewest_microbatches_gets_empty_ones():
    rows = [make_row(1, [1] * 8), make_row(1, [1] * 5), make_row(1, [1] * 5)]
    row_ids = [[micro.row_ids for micro in microbatches(rows, rank, 2, max_tokens=9)] for rank in range(2)]
    assert row_ids == [[(0,), ()], [(1,), (2,)]]


def test_an_empty_microbatch_counts_nowhere():
    [micro] = microbatches([make_row(1, [1])], rank=1, world_size=2, max_tokens=8)
    assert micro.row_ids == () and not micro.loss_mask.any() and micro.num_loss_tokens == 0
    assert micro.input_ids.numel() >= 1
