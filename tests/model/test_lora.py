"""Adapters on real FSDP2 ranks; the reference for merged weights is the Hugging Face model's own forward pass."""

import json
from dataclasses import make_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.models import cfg_of, load_hf, random_rows, row_by_row, some_loss
from helpers.ranks import ranks_of, run_ranks
from safetensors.torch import load_file
from torch.nn import functional as F

from arpo.batch import collate
from arpo.checkpoint import Checkpoints
from arpo.checkpoint.export import full_weights, write_export
from arpo.checkpoint.snapshot import snapshot
from arpo.config.sections import ModelConfig, OptimConfig
from arpo.engine.weight_sync import full_tensors
from arpo.errors import UserError
from arpo.log.settings import save_config
from arpo.model import load_policy
from arpo.model.lora import MergedProduct, adapted
from arpo.model.optim import build_optimizer, clip_grad_norm
from extras.export import export_checkpoint, model_of_run

CPU = torch.device("cpu")


def lora_cfg(folder, **changes) -> ModelConfig:
    return replace(cfg_of(folder), lora_rank=4, lora_alpha=8.0, **changes)


def load(mesh, cfg: ModelConfig, *, trained: bool = True):
    """trained: with B moved away from zero, each element elsewhere, the same on any number of ranks."""
    policy = load_policy(cfg, mesh, device=CPU, seed=3)
    for _, module in adapted(policy.hf) if trained else ():
        rows = torch.arange(module.lora_B.shape[0])[:, None] * 7 + torch.arange(module.lora_B.shape[1])
        start = module.lora_B.device_mesh.get_rank() * -(-len(rows) // module.lora_B.device_mesh.size())
        local = module.lora_B.to_local()
        local.data.copy_((rows[start : start + len(local)] % 5 - 2) * 0.05)
    return policy


def step(policy, optimizer) -> None:
    some_loss(*policy(collate(random_rows()))).backward()
    clip_grad_norm(policy, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def whole(policy) -> dict[str, np.ndarray]:
    """Every parameter, merged nothing."""
    return {name: p.detach().full_tensor().numpy() for name, p in policy.hf.named_parameters()}


# ----------------------------------------------------------------------------------------------------- what is trained


def test_only_adapters_get_gradients_and_a_place_in_the_optimizer(tiny_model_dir, mesh):
    policy = load(mesh, lora_cfg(tiny_model_dir))
    some_loss(*policy(collate(random_rows()))).backward()
    gradients = {name: p.grad for name, p in policy.hf.named_parameters()}
    assert all((gradient is not None) == ("lora_" in name) for name, gradient in gradients.items())
    assert all(g.full_tensor().abs().max() > 0 for g in gradients.values() if g is not None)
    assert len([n for n in gradients if "lora_" in n]) == 2 * 2 * 7  # A and B, layers, targets
    held = [p for group in build_optimizer(policy, OptimConfig()).param_groups for p in group["params"]]
    assert len(held) == 28


def test_an_untrained_adapter_changes_nothing(tiny_model_dir, mesh):
    micro = collate(random_rows())
    with torch.no_grad():
        plain = load_policy(cfg_of(tiny_model_dir), mesh, device=CPU)(micro)
        adapted_ = load(mesh, lora_cfg(tiny_model_dir), trained=False)(micro)
    assert all(torch.equal(a, b) for a, b in zip(plain, adapted_, strict=True))


def two_ranks(ranks, folder: str, dtype: str):
    """(merged weights, logprobs of the unmerged policy, adapters before and after a step)"""
    policy = load(ranks.mesh, lora_cfg(folder, compute_dtype=dtype))
    merged = {n: t.clone() for n, t in full_tensors(policy.hf_parameters(), dtype=torch.float32, device=CPU)}
    with torch.no_grad():
        logprobs, _ = policy(collate(random_rows()))
    before = {n: p.detach().full_tensor() for n, p in policy.trained_parameters().items()}
    step(policy, build_optimizer(policy, OptimConfig(lr=1e-2)))
    after = {n: p.detach().full_tensor() for n, p in policy.trained_parameters().items()}
    return merged, logprobs, before, after


@pytest.fixture(scope="module")
def float32_ranks(tiny_model_dir):
    return run_ranks(2, two_ranks, str(tiny_model_dir), "float32")


def test_merged_weights_give_the_logprobs_of_the_unmerged_policy(tiny_model_dir, float32_ranks):
    merged, logprobs, _, _ = float32_ranks[0]
    hf = load_hf(tiny_model_dir)
    assert merged.keys() == dict(hf.named_parameters()).keys()
    hf.load_state_dict(merged, strict=False)
    for row, (expected, _) in zip(logprobs, row_by_row(hf, random_rows(), 1.0), strict=True):
        torch.testing.assert_close(row[: len(expected)], expected, atol=2e-5, rtol=2e-5)


def test_any_number_of_ranks_starts_and_steps_alike(tiny_model_dir, float32_ranks, mesh):
    policy = load(mesh, lora_cfg(tiny_model_dir))
    before = {n: p.detach().full_tensor().clone() for n, p in policy.trained_parameters().items()}
    step(policy, build_optimizer(policy, OptimConfig(lr=1e-2)))
    after = {n: p.detach().full_tensor() for n, p in policy.trained_parameters().items()}
    assert all(torch.equal(before[n], float32_ranks[1][2][n]) for n in before)
    assert all((after[n] - float32_ranks[1][3][n]).abs().max() < 1e-3 for n in after)


@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_are_those_of_two_products(has_bias):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 5, 6), (7, 6), (7,), (3, 6), (7, 3)  # x, weight, bias, lora_A, lora_B
    x, weight, bias, a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    bias = bias if has_bias else None
    trained = [t.requires_grad_() for t in (x, a, b)]
    ours = MergedProduct.apply(x, weight, bias, a, b, 0.5)
    expected = F.linear(x, weight, bias) + F.linear(F.linear(x, a), b) * 0.5
    torch.testing.assert_close(ours, expected)
    outside = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for gradient, wanted in zip(
        torch.autograd.grad(ours, trained, outside), torch.autograd.grad(expected, trained, outside), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)


def merged_in_bfloat16(ranks, folder: str) -> list[float]:
    """Per layer with adapters: the largest difference of its output from x times the weight sent to the engine."""
    policy = load(ranks.mesh, lora_cfg(folder, compute_dtype="bfloat16"))
    dtypes = {("lora_" in name, p.dtype) for name, p in policy.hf.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    for _, module in adapted(policy.hf):  # updates of half a step of bfloat16, which rounding hides in large weights
        module.lora_B.to_local().data.mul_(1e-3)
    sent = {n: t.clone() for n, t in full_tensors(policy.hf_parameters(), dtype=torch.bfloat16, device=CPU)}
    differences = []

    def compare(name: str):
        def hook(module, args, output) -> None:
            expected = F.linear(args[0], sent[f"{name}.weight"], module.bias)
            differences.append(float((output - expected).abs().max()))

        return hook

    for name, module in adapted(policy.hf):
        module.register_forward_hook(compare(name))
    with torch.no_grad():
        policy(collate(random_rows()))
    return differences


@pytest.mark.parametrize("world_size", [1, 2])
def test_in_bfloat16_the_trainer_multiplies_with_the_weights_sent_to_the_engine(tiny_model_dir, world_size):
    """Reports of others, who add two products: SkyRL 1776, NeMo-RL 3696, TRL 6688, unsloth 3091, torchtune 1101."""
    for differences in run_ranks(world_size, merged_in_bfloat16, str(tiny_model_dir)):
        assert differences == [0.0] * 14  # layers times targets


def test_an_unknown_target_is_named_with_those_there_are(tiny_model_dir, mesh):
    with pytest.raises(UserError, match=r"targets: qkv .* down_proj, gate_proj, k_.* q_proj"):
        load(mesh, lora_cfg(tiny_model_dir, lora_targets=("q_proj", "qkv")))


# ------------------------------------------------------------------------------------------------- checkpoints, export


def train(ranks, folder: str, run: str, last_step: int, save_at: int) -> dict[str, np.ndarray]:
    cfg = lora_cfg(folder)
    policy = load(ranks.mesh, cfg)
    optimizer = build_optimizer(policy, OptimConfig(lr=1e-2))
    checkpoints = Checkpoints(Path(run) / "checkpoints", ranks)
    for number in range(checkpoints.resume(policy, optimizer) + 1, last_step + 1):
        step(policy, optimizer)
        if number == save_at:
            folder = checkpoints.write(number, snapshot(policy, optimizer))
            write_export(full_weights(policy, cfg.path), folder / "hf", source=cfg.path)
    return whole(policy)


@pytest.fixture(scope="module")
def run(tiny_model_dir, tmp_path_factory):
    """A run's folder with a checkpoint of step 2, and its parameters after step 3."""
    folder = tmp_path_factory.mktemp("run")
    ranks = run_ranks(2, train, str(tiny_model_dir), str(folder), 3, 2)
    save_config(make_dataclass("Config", ["model"])(lora_cfg(tiny_model_dir)), folder / "config.yaml")
    return folder, ranks[0]


@pytest.mark.slow
def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(tiny_model_dir, run):
    folder, undisturbed = run
    resumed = run_ranks(2, train, str(tiny_model_dir), str(folder), 3, 0)[1]
    assert all(np.array_equal(undisturbed[name], resumed[name]) for name in undisturbed)


def test_a_checkpoint_holds_adapters_only(run):
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(run[0] / "checkpoints" / "step_000002").read_metadata().state_dict_metadata
    weights = [key for key in stored if key.startswith("model.")]
    assert len(weights) == 28 and all("lora_" in key for key in weights)
    assert all("lora_" in key for key in stored if key.startswith("optimizer."))


def test_a_checkpoint_of_adapters_is_not_resumed_without_them(tiny_model_dir, run, mesh):
    with pytest.raises(UserError, match=r"model\.lora_rank") as error:
        policy = load_policy(cfg_of(tiny_model_dir), mesh, device=CPU)
        Checkpoints(run[0] / "checkpoints", ranks_of(mesh)).resume(policy, build_optimizer(policy, OptimConfig()))
    assert "\n" not in str(error.value)


def test_the_export_of_a_checkpoint_is_merged_and_equals_the_export_of_the_live_policy(run, tmp_path):
    checkpoint = run[0] / "checkpoints" / "step_000002"
    export_checkpoint(checkpoint, tmp_path / "hf")
    ours, live = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", checkpoint / "hf"))
    assert ours.keys() == live.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], live[name], atol=1e-6, rtol=1e-6)


def test_a_checkpoint_is_exported_with_the_lora_alpha_of_its_step(tiny_model_dir, tmp_path):
    """A merge with another alpha than the training's: verl-project/verl PR 5337."""
    save_config(make_dataclass("Config", ["model"])(lora_cfg(tiny_model_dir)), tmp_path / "config.yaml")
    later = [(1, 8.0, 16.0), (2, 16.0, 64.0)]  # continued after step 1, and again after step 2
    lines = [json.dumps({"step": step, "changes": {"model.lora_alpha": [old, new]}}) for step, old, new in later]
    (tmp_path / "changes.jsonl").write_text("\n".join(lines) + "\n")
    checkpoints = [tmp_path / "checkpoints" / f"step_{step:06d}" for step in (1, 2, 3)]
    assert [model_of_run(folder, "").lora_alpha for folder in checkpoints] == [8.0, 16.0, 64.0]


def test_the_adapter_export_is_what_peft_reads(tiny_model_dir, run, tmp_path):
    """Names, shapes and settings of peft's documented layout; and peft itself, where it is installed."""
    export_checkpoint(run[0] / "checkpoints" / "step_000002", tmp_path / "adapter", adapter=True)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], len(config["target_modules"])) == ("LORA", 4, 8, 7)
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.k_proj"
    assert len(state) == 28
    assert state[f"{prefix}.lora_A.weight"].shape == (4, 64) and state[f"{prefix}.lora_B.weight"].shape == (64, 4)
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.PeftModel.from_pretrained(load_hf(tiny_model_dir), tmp_path / "adapter").merge_and_unload()
    expected = load_file(run[0] / "checkpoints" / "step_000002" / "hf" / "model.safetensors")
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.detach(), expected[name], atol=1e-6, rtol=1e-6)
