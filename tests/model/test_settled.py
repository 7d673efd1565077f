"""The same row gives the same logprobs beside any neighbours and in any pass; the oracle is vLLM, or transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.family_configs import config_of, longrope, rope, some_rows
from helpers.models import build_tiny_tokenizer, cfg_of, load_hf, row_by_row
from transformers import AutoModelForCausalLM

from arpo.batch import Row, collate
from arpo.config.sections import EngineConfig
from arpo.errors import UserError
from arpo.model import load_policy
from arpo.model.critic import load_critic
from arpo.model.settled import settled_config

CPU = torch.device("cpu")
SHORT = {"max_position_embeddings": 32}
ALPHA = rope("dynamic", 1e4, alpha=1000.0, factor=1.0)
PER_LAYER = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": longrope(32)["rope_parameters"],
    }
}
ROPE = {  # name: (family, what its config sets, max_model_len; 0: not said)
    "phi3 longrope, not said: short (lablup/mlxcel#1358)": ("phi3", longrope(32), 0),
    "phi3 longrope, long for all (vllm#27431, llama.cpp#24823)": ("phi3", longrope(32), 100),
    "phi3 longrope, the whole run within the original length": ("phi3", longrope(90), 90),
    "phi3 with the scales of both tables (mlxcel#1358)": ("phi3", longrope(32, short_mscale=1.2, long_mscale=1.3), 100),
    "llama longrope (MiniCPM4's config, trymirai/lalamo#325)": ("llama", longrope(32), 100),
    "llama dynamic, beyond its positions": ("llama", SHORT | rope("dynamic", 1e4, factor=4.0), 0),
    "hunyuan, beyond its positions": ("hunyuan_v1_dense", SHORT | ALPHA, 0),
}  # fmt: skip


def saved(folder: Path, family: str, changes: dict) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family, **changes), dtype=torch.float32).save_pretrained(folder)
    return folder


def row(length: int) -> Row:
    return Row(np.array([3, 4, 5]), np.arange(10, 10 + length), np.ones(length, np.int64))


@pytest.mark.parametrize("case", ROPE)
def test_a_row_is_the_same_alone_and_beside_a_long_one(case, mesh, tmp_path):
    family, changes, max_model_len = ROPE[case]
    saved(tmp_path, family, changes)
    policy = load_policy(cfg_of(tmp_path), mesh, device=CPU, max_model_len=max_model_len)
    with torch.no_grad():
        alone = policy(collate([row(8)], [0]))[0][0]
        together = policy(collate([row(8), row(80)], [0, 1]))[0][0, :8]
        again = policy(collate([row(8)], [0]))[0][0]
    torch.testing.assert_close(together, alone, atol=3e-6, rtol=0)
    assert torch.equal(again, alone)


@pytest.mark.parametrize(
    "original, max_model_len, used", [(4096, 5632, "long"), (4096, 4096, "short"), (4096, 0, "short")]
)
def test_longrope_takes_the_table_that_vllm_takes_for_all_tokens(original, max_model_len, used, tmp_path):
    config_of("phi3", max_position_embeddings=131072, **longrope(original)).save_pretrained(tmp_path)
    parameters = settled_config(str(tmp_path), max_model_len=max_model_len).rope_parameters
    assert parameters["short_factor"] == parameters["long_factor"] == longrope()["rope_parameters"][f"{used}_factor"]
    kept = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]  # for the export
    assert kept["short_factor"] != kept["long_factor"]


def test_a_kind_of_layer_may_have_a_rope_of_its_own(tmp_path):
    config_of("olmo3", layer_types=["sliding_attention", "full_attention"], **PER_LAYER).save_pretrained(tmp_path)
    full = settled_config(str(tmp_path), max_model_len=100).rope_parameters["full_attention"]
    assert full["short_factor"] == full["long_factor"] == longrope()["rope_parameters"]["long_factor"]


@pytest.mark.parametrize("changes, limit", [({}, 128), ({"max_trained_positions": 64}, 64)])
def test_rows_that_dynamic_rope_would_change_are_refused(changes, limit, tmp_path):
    config_of("llama", **rope("dynamic", 1e4, factor=4.0, **changes)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"dynamic RoPE changes with the length of a row beyond {limit} tokens"):
        settled_config(str(tmp_path), max_model_len=129)


PROMPT = [3, 4, 5]


def sampled_by(engine) -> tuple[np.ndarray, np.ndarray]:
    """Sample 40 tokens after PROMPT. Return their ids and logprobs, (40,) each."""
    from arpo.engine import SamplingSpec

    engine.submit("a", PROMPT, SamplingSpec(max_tokens=40, seed=1))
    chunks = []
    while engine.num_running:
        chunks += engine.step()
    return tuple(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("token_ids", "logprobs"))


@pytest.mark.slow
@pytest.mark.parametrize("family, changes, max_model_len", [
    ("phi3", longrope(64), 200), ("phi3", longrope(64), 60), ("llama", rope("dynamic", 1e4, factor=4.0), 120),
    ("granite", {"logits_scaling": 8.0, "attention_dropout": 0.1}, 120),
])  # fmt: skip
def test_trainer_and_engine_agree_on_each_token(family, changes, max_model_len, mesh, tmp_path):
    from arpo.engine import Engine

    changes = {"hidden_size": 128, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256} | changes
    if "long_factor" in changes.get("rope_parameters", {}):
        parameters = changes["rope_parameters"]
        changes["rope_parameters"] = parameters | {
            name: np.interp(np.linspace(0, 3, 16), range(4), parameters[name]).tolist()
            for name in ("short_factor", "long_factor")
        }
    changes |= {"eos_token_id": 298, "bos_token_id": 296, "pad_token_id": 296}
    saved(tmp_path, family, changes)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    cfg = EngineConfig(dtype="float32", kv_cache_gib=0.05, max_num_seqs=4, max_num_batched_tokens=256)
    engine = Engine(str(tmp_path), cfg, max_model_len=max_model_len, seed=0)
    try:
        ids, sampled = sampled_by(engine)
    finally:
        engine.close()
    policy = load_policy(cfg_of(tmp_path), mesh, device=CPU, max_model_len=max_model_len)
    with torch.no_grad():
        ours = policy(collate([Row(np.array(PROMPT), ids, np.ones(len(ids), np.int64))], [0]))[0][0]
    np.testing.assert_allclose(ours.numpy(), sampled, atol=2e-4)


def test_the_trainer_computes_beside_an_engine_of_the_same_class(mesh, tmp_path):
    """vLLM has no class for OLMo 2, so it changes that of transformers (found by trying vllm-project/vllm PR 52158)."""
    from arpo.engine import Engine

    changes = {"hidden_size": 128, "num_key_value_heads": 4, "head_dim": 32, "eos_token_id": 298, "pad_token_id": 296}
    saved(tmp_path, "olmo2", changes)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    policy = load_policy(cfg_of(tmp_path), mesh, device=CPU)
    kind = type(policy.hf.model)
    before = (kind.__bases__, kind.__init__, kind.__call__)
    cfg = EngineConfig(dtype="float32", kv_cache_gib=0.05, max_num_seqs=4, max_num_batched_tokens=256)
    engine = Engine(str(tmp_path), cfg, max_model_len=100, seed=0, load_weights=False)
    try:
        assert (kind.__bases__, kind.__init__, kind.__call__) == before
        engine.sync_weights(policy.hf_parameters())
        ids, sampled = sampled_by(engine)
    finally:
        engine.close()
    logprobs, _ = policy(collate([Row(np.array(PROMPT), ids, np.ones(len(ids), np.int64))], [0]))
    logprobs.sum().backward()
    np.testing.assert_allclose(logprobs[0].detach().numpy(), sampled, atol=2e-4)


DROPOUT = {  # name: (family, what its config sets)
    "seed_oss's own 0.1 and 0.1 (trl#3234)": ("seed_oss", {}),
    "granite 3.0's attention_dropout (Human-Agent-Society/reef#536)": ("granite", {"attention_dropout": 0.1}),
    "phi3's resid_pdrop, a module (trl#3500, LlamaFactory#10779)": ("phi3", {"resid_pdrop": 0.1}),
    "phi3's embd_pdrop and attention": ("phi3", {"embd_pdrop": 0.1, "attention_dropout": 0.2}),
    "qwen3 (trl#744)": ("qwen3", {"attention_dropout": 0.5}),
    "exaone4": ("exaone4", {"attention_dropout": 0.1, "sliding_window": 4, "sliding_window_pattern": 2}),
    "lfm2's convolutions beside attention": ("lfm2", {"attention_dropout": 0.3}),
}


@pytest.mark.parametrize("case", DROPOUT)
def test_no_dropout_of_a_config_acts_in_training(case, mesh, tmp_path):
    """Policy and reference are load_policy, the critic is load_critic; oracle: transformers in eval mode."""
    family, changes = DROPOUT[case]
    saved(tmp_path, family, changes)
    rows = some_rows()
    micro = collate(rows, range(len(rows)))
    policy = load_policy(cfg_of(tmp_path, recompute_every_n_layers=1), mesh, device=CPU)
    assert policy.training  # as recomputation needs it
    logprobs, _ = policy(micro, 1.0)
    alone = row_by_row(load_hf(tmp_path).eval(), rows, 1.0)
    for ours, (theirs, _) in zip(logprobs, (next(alone) for _ in rows), strict=True):
        torch.testing.assert_close(ours[: len(theirs)], theirs, atol=3e-6, rtol=1e-6)
    critic = load_critic(cfg_of(tmp_path), mesh, device=CPU)
    torch.nn.init.normal_(critic.value_head.weight.to_local())
    assert torch.equal(critic(micro), critic(micro)) and critic(micro).abs().max() > 0
