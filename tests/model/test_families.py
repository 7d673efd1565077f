"""Which model families are exact, on packed rows and on trees, and that the others are refused in one line."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.models import cfg_of, random_rows, row_by_row, some_loss
from helpers.ranks import mesh_of_one
from transformers import AutoConfig, AutoModelForCausalLM

from arpo.batch import Row, collate
from arpo.errors import UserError
from arpo.model import load_policy
from arpo.model.context_parallel import check_model
from arpo.model.loading import build_on_meta
from arpo.tree import collate_tree

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


def config_of(family: str, **changes):
    return AutoConfig.for_model(family, **SIZES | changes)


HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GATED_DELTA = HYBRID | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8
}  # fmt: skip
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXACT = {
    "qwen2": {}, "qwen3": {}, "llama": {}, "mistral": {"sliding_window": 4}, "ministral3": {}, "smollm3": {},
    "olmo2": {}, "olmo3": SLIDING, "phi3": {}, "granite": {}, "glm": {}, "glm4": {}, "exaone4": SLIDING,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "arcee": {}, "hunyuan_v1_dense": {}, "ernie4_5": {},
    "lfm2": HYBRID | {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_5_text": GATED_DELTA,
}  # fmt: skip


def some_rows() -> list[Row]:
    """Two prompts; of the first, three responses that fork, one within the other's."""
    prompt, other = [3, 4, 5, 6, 7], [8, 9]
    responses = [(prompt, range(10, 90)), (prompt, [10, 11, 12, 30, 31]), (prompt, [40, 41, 42]), (other, [10, 11])]
    rows = []
    for ids, response in responses:
        mask = np.ones(len(response), np.int64)
        mask[1::4] = 0
        rows.append(Row(np.array(ids), np.array(response), mask))
    return rows


@pytest.fixture(scope="module")
def mesh():
    with mesh_of_one() as mesh:
        yield mesh


@pytest.mark.parametrize("family", EXACT)
def test_rows_together_give_the_logprobs_and_gradients_of_each_row_alone(family, mesh, tmp_path):
    """By transformers' own forward pass and attention, in float32."""
    config = config_of(family, **EXACT[family])
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").train()
    hf.save_pretrained(tmp_path)
    rows = some_rows()
    pairs = list(row_by_row(hf, rows, 1.0))
    alone = [torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in zip(*pairs, strict=True)]
    some_loss(*alone).backward()
    expected = {name: p.grad for name, p in hf.named_parameters()}
    # The chunks of gated delta: 5e-4 off a recurrence in float64 for rows alone too, most in A_log, at small weights.
    tolerance = 1e-4 if "linear_attention" in getattr(config, "layer_types", []) else 1e-5
    for collated, recompute in ((collate, 0), (collate_tree, 1)):
        micro = collated(rows, range(len(rows)))
        policy = load_policy(cfg_of(tmp_path, recompute_every_n_layers=recompute), mesh, device=CPU)
        outputs = policy(micro)
        for ours, theirs in zip(outputs, alone, strict=True):
            torch.testing.assert_close(ours, theirs[list(micro.row_ids)], atol=3e-6, rtol=1e-6)
        some_loss(*outputs).backward()
        for name, parameter in policy.hf.named_parameters():
            gradient, scale = parameter.grad.full_tensor(), expected[name].abs().max().item()
            torch.testing.assert_close(
                gradient, expected[name], atol=tolerance * scale, rtol=0, msg=f"{name}: {{}}".format
            )


def test_the_table_in_the_docs_names_what_is_exact():
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    table = text.split("| `model_type` |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(EXACT)


@pytest.mark.parametrize(
    "family, changes, words",
    [
        ("qwen3_moe", EXPERTS, "Qwen3MoeForCausalLM is a mixture of experts, which is not supported"),
        ("mixtral", {"num_local_experts": 2}, "is a mixture of experts"),
        ("qwen3_next", EXPERTS | {"num_hidden_layers": 4}, "is a mixture of experts"),
        ("gpt2", {}, "GPT2LMHeadModel does not have its layers in model.layers"),
        ("bart", {}, "does not have its layers in model.layers"),
        ("gptj", {}, "GPTJForCausalLM does not support an attention implementation"),
        ("mamba", {}, "MambaForCausalLM does not support an attention implementation"),
        ("recurrent_gemma", {}, "do not attend by the common interface"),
        ("falcon_h1", {}, "has layers of the kind hybrid"),
        ("llama", {"layer_types": ["full_attention", "chunked_attention"]}, "has layers of the kind chunked_attention"),
    ],
)
def test_what_cannot_be_exact_is_refused_in_one_line(family, changes, words, tmp_path):
    config_of(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=words) as error:
        build_on_meta(str(tmp_path), "sdpa")
    assert str(error.value).startswith(f"model.path={tmp_path}: ") and "\n" not in str(error.value)


def test_what_runs_along_the_tokens_is_refused_with_spread_rows():
    config = config_of("lfm2", **EXACT["lfm2"])
    with pytest.raises(UserError, match="full attention in all layers, which lfm2 has not; set it to 1"):
        check_model(config, 2)


@pytest.mark.parametrize("family", ["nemotron", "stablelm", "doge"])
def test_layers_that_make_a_mask_of_their_own_or_drop_the_rows_are_refused(family, mesh, tmp_path):
    AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="Attention cannot attend row by row"):
        load_policy(cfg_of(tmp_path), mesh, device=CPU)(collate(random_rows()))
