"""Qwen3.5 as the Hub has it: the text model inside a vision-language folder. Tiny, random, with the real names."""

import numpy as np
import pytest
import torch
from helpers.models import build_tiny_tokenizer, cfg_of, row_by_row
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from arpo.batch import Row
from arpo.checkpoint.export import full_weights, write_export
from arpo.engine.team import check_split
from arpo.engine.weight_sync import check_checkpoint, expected_parameters
from arpo.errors import UserError
from arpo.model import load_policy
from arpo.model.critic import load_critic
from arpo.start.memory import sizes_of
from arpo.tree import collate_tree
from extras.export import write_adapter

CPU = torch.device("cpu")
TEXT = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "initializer_range": 0.2,
    "tie_word_embeddings": True,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
          "num_position_embeddings": 16, "patch_size": 4}  # fmt: skip
SPECIAL = {name: 370 for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")}
ROWS = [
    Row(np.arange(3, 9), np.array(response), np.ones(len(response), np.int64)) for response in ([9, 10, 11], [9, 5])
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3.5")
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True, **SPECIAL)
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(path)
    build_tiny_tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"size": 4}')
    weights = load_file(path / "model.safetensors")
    assert "model.language_model.layers.0.linear_attn.A_log" in weights and "model.visual.pos_embed.weight" in weights
    save_file(weights | {"mtp.fc.weight": torch.ones(2)}, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def policy(folder, mesh):
    return load_policy(cfg_of(folder), mesh, device=CPU)


def test_the_text_model_is_loaded_without_the_vision_tower(folder, policy, mesh):
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    micro = collate_tree(ROWS, range(2))
    logprobs, _ = policy(micro)
    alone = list(row_by_row(hf, ROWS, 1.0))
    for ours, row in zip(logprobs, micro.row_ids, strict=True):
        torch.testing.assert_close(ours[: len(alone[row][0])], alone[row][0], atol=3e-6, rtol=1e-6)
    assert not [name for name, _ in policy.named_parameters() if "visual" in name]
    load_critic(cfg_of(folder), mesh, device=CPU)


def test_the_export_has_the_folders_names_its_vision_tower_and_the_trained_weights(folder, policy, tmp_path):
    with torch.no_grad():
        policy.hf.model.norm.weight.to_local().fill_(0.25)
    write_export(full_weights(policy, str(folder)), tmp_path / "hf", source=str(folder))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert after.keys() == before.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "model.language_model.norm.weight"
    }
    assert (tmp_path / "hf" / "preprocessor_config.json").exists()
    loaded, report = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and loaded.model.language_model.norm.weight.eq(0.25).all()


def test_vllm_gets_the_names_of_the_folder(folder):
    weights = load_file(folder / "model.safetensors")
    names = {name for name in weights if not name.startswith(("model.visual.", "mtp."))}
    assert expected_parameters(str(folder)).keys() == names
    check_checkpoint(str(folder), needs_weights=True)
    check_split(str(folder), 2)
    with pytest.raises(UserError, match="num_attention_heads=4"):
        check_split(str(folder), 3)


def test_exported_adapters_have_the_names_of_the_folder(folder, tmp_path):
    """Under other names vLLM and peft load an adapter that does nothing: vllm-project/vllm#34186, PR 48022."""
    adapters = {"model.layers.0.mlp.up_proj.lora_A": torch.ones(2, 32)}
    write_adapter(adapters, tmp_path / "a", base=str(folder), rank=2, alpha=4)
    [name] = load_file(tmp_path / "a" / "adapter_model.safetensors")
    prefix = "base_model.model."
    assert name.startswith(prefix) and name.endswith(".lora_A.weight")
    layer = name.removeprefix(prefix).removesuffix(".lora_A.weight")
    Qwen3_5ForConditionalGeneration.from_pretrained(folder).get_submodule(layer)


def test_adapters_go_on_gated_delta_too(folder, mesh):
    targets = ("q_proj", "in_proj_qkv", "in_proj_z", "out_proj")
    policy = load_policy(cfg_of(folder, lora_rank=2, lora_targets=targets), mesh, device=CPU)
    logprobs, entropies = policy(collate_tree(ROWS, range(2)))
    (logprobs.sum() + entropies.sum()).backward()
    trained = policy.trained_parameters()
    assert len(trained) == 2 * (1 + 3 * 3) and all(p.grad is not None for p in trained.values())


def test_memory_counts_the_layers_that_attend_and_the_states_of_the_others(tmp_path):
    """Qwen3.5-9B's config.json: 8 of its 32 layers attend, and a row's states take 49 MiB."""
    Qwen3_5Config().save_pretrained(tmp_path)
    sizes = sizes_of(str(tmp_path))
    assert AutoConfig.from_pretrained(tmp_path).model_type == "qwen3_5"
    assert sizes.kv_numbers_per_token == 2 * 8 * 4 * 256
    assert sizes.state_numbers_per_row == 24 * (32 * 128 * 128 + 3 * 8192)
    assert sizes.parameters == 8_953_803_264
