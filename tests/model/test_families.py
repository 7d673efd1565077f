"""Which model families are exact, on packed rows and on trees, and that the others are refused in one line."""

import pytest
import torch
from helpers.models import cfg_of, random_rows
from helpers.ranks import mesh_of_one
from transformers import AutoConfig, AutoModelForCausalLM

from arpo.batch import collate
from arpo.errors import UserError
from arpo.model import load_policy
from arpo.model.loading import build_on_meta

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


def config_of(family: str, **changes):
    return AutoConfig.for_model(family, **SIZES | changes)


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


@pytest.mark.parametrize("family", ["nemotron", "stablelm", "doge"])
def test_layers_that_make_a_mask_of_their_own_or_drop_the_rows_are_refused(family, tmp_path):
    AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(tmp_path)
    with mesh_of_one() as mesh, pytest.raises(UserError, match="Attention cannot attend row by row"):
        load_policy(cfg_of(tmp_path), mesh, device=CPU)(collate(random_rows()))
