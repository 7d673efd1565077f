"""Which model families are exact, on packed rows and on trees, and that the others are refused in one line."""

import re
from pathlib import Path

import pytest
import torch
from helpers.family_configs import config_of, longrope, rope, some_rows
from helpers.models import cfg_of, random_rows, row_by_row, some_loss
from transformers import AutoModelForCausalLM

from arpo.batch import collate
from arpo.errors import UserError
from arpo.model import load_policy
from arpo.model.context_parallel import check_model
from arpo.model.loading import build_on_meta, logits_divisor
from arpo.tree import collate_tree

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GATED_DELTA = HYBRID | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8
}  # fmt: skip
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


LLAMA3 = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
EXACT = {
    "qwen2": {"rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    | rope("default", 1e6),  # Qwen2.5-7B-Instruct
    "qwen3": {"tie_word_embeddings": True, "max_position_embeddings": 40960} | rope("default", 1e6),  # Qwen3-0.6B
    "llama": {"tie_word_embeddings": True, "max_position_embeddings": 131072}
    | rope("llama3", 5e5, factor=32.0, **LLAMA3),  # Llama-3.2-1B
    "mistral": {"sliding_window": 4} | rope("default", 1e4),  # Mistral-7B-v0.1, whose window is 4096
    "ministral3": {"tie_word_embeddings": True, "max_position_embeddings": 262144}
    | rope("yarn", 1e6, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0,
           original_max_position_embeddings=16384, **YARN),  # Ministral-3-3B
    "smollm3": {"tie_word_embeddings": True, "no_rope_layers": [1, 0]} | rope("default", 5e6),
    "olmo2": {"attention_dropout": 0.0} | rope("default", 5e5),
    "olmo3": SLIDING | {"max_position_embeddings": 65536}
    | rope("yarn", 5e5, factor=8.0, attention_factor=1.2079441541679836, original_max_position_embeddings=8192, **YARN),
    "phi3": {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
             "tie_word_embeddings": True, "resid_pdrop": 0.0} | longrope(),  # Phi-4-mini
    "granite": {"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22,
                "logits_scaling": 8.0, "tie_word_embeddings": True, "attention_dropout": 0.1}
    | rope("default", 1e7),  # Granite-3.x; the dropout is 3.0's
    "hyperclovax": {"logits_scaling": 0.125, "attention_multiplier": 0.0078125, "embedding_multiplier": 10.0}
    | rope("default", 1e4),  # HyperCLOVA X multiplies its logits
    "glm": {"attention_bias": True} | rope("default", 1e4, partial_rotary_factor=0.5),
    "glm4": {"attention_bias": True} | rope("default", 1e4, partial_rotary_factor=0.5),
    "exaone4": SLIDING | {"max_position_embeddings": 131072} | rope("llama3", 1e6, factor=16.0, **LLAMA3),
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1, "attention_bias": True} | rope("default", 1e7),
    "arcee": {"max_position_embeddings": 65536}
    | rope("yarn", 1e4, factor=20.0, mscale=1.0, original_max_position_embeddings=4096, **YARN),  # AFM-4.5B
    "hunyuan_v1_dense": {"max_position_embeddings": 32768, "tie_word_embeddings": True}
    | rope("dynamic", 1e4, alpha=1000.0, factor=1.0, mscale=1.0, mscale_all_dim=1.0, **YARN),  # Hunyuan-0.5B
    "ernie4_5": {"tie_word_embeddings": True} | rope("default", 5e5),
    "lfm2": HYBRID | {"layer_types": ["conv", "full_attention", "conv"]} | rope("default", 1e6),
    "qwen3_5_text": GATED_DELTA,
}  # fmt: skip
"""What the published configs of these families set, but for sizes: RoPE, dropout, windows, a tied head, scales."""


@pytest.mark.parametrize("family", EXACT)
def test_rows_together_give_the_logprobs_and_gradients_of_each_row_alone(family, mesh, tmp_path):
    """By transformers' own forward pass and attention, in float32, at another temperature than 1."""
    config = config_of(family, **EXACT[family])
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    hf.save_pretrained(tmp_path)
    rows = some_rows()
    pairs = list(row_by_row(hf, rows, 0.7))
    alone = [torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in zip(*pairs, strict=True)]
    some_loss(*alone).backward()
    expected = {name: p.grad for name, p in hf.named_parameters()}
    # The chunks of gated delta: 5e-4 off a recurrence in float64 for rows alone too, most in A_log, at small weights.
    tolerance = 1e-4 if "linear_attention" in getattr(config, "layer_types", []) else 1e-5
    for collated, recompute in ((collate, 0), (collate_tree, 1)):
        micro = collated(rows, range(len(rows)))
        policy = load_policy(cfg_of(tmp_path, recompute_every_n_layers=recompute), mesh, device=CPU)
        outputs = policy(micro, 0.7)
        for ours, theirs in zip(outputs, alone, strict=True):
            torch.testing.assert_close(ours, theirs[list(micro.row_ids)], atol=3e-6, rtol=1e-6)
        some_loss(*outputs).backward()
        for name, parameter in policy.hf.named_parameters():
            gradient, scale = parameter.grad.full_tensor(), expected[name].abs().max().item()
            torch.testing.assert_close(
                gradient, expected[name], atol=tolerance * scale, rtol=0, msg=f"{name}: {{}}".format
            )


@pytest.mark.parametrize(
    "family, changes, divisor",
    [
        ("granite", {"logits_scaling": 8.0}, 8.0),
        ("hyperclovax", {"logits_scaling": 0.125}, 8.0),
        ("cohere", {"logit_scale": 0.0625}, 16.0),
        ("minicpm3", {"dim_model_base": 8}, 4.0),
        ("qwen3", {}, 1.0),
    ],
)
def test_the_logits_are_divided_as_in_the_models_own_forward_pass(family, changes, divisor):
    """vllm-project/vllm PR 52158: no config field has one meaning in all families. HyperCLOVAX multiplies."""
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config_of(family, **changes))
    assert logits_divisor(hf) == divisor


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


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("nemotron", "Attention cannot attend row by row"),
        ("stablelm", "Attention cannot attend row by row"),
        ("doge", "computes its logits from more than hidden states"),
    ],
)
def test_layers_that_make_a_mask_of_their_own_or_drop_the_rows_are_refused(family, words, mesh, tmp_path):
    AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=words):
        load_policy(cfg_of(tmp_path), mesh, device=CPU)(collate(random_rows()))
