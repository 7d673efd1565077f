"""Real ranks that load a model shard by shard; the reference is from_pretrained, which loads it whole."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers.models import build, build_tiny_model, cfg_of
from helpers.ranks import mesh_of_one, run_ranks
from safetensors.torch import load_file, save_file

from arpo.config.model_folder import check_model_folder
from arpo.engine.weight_sync import full_tensors
from arpo.errors import UserError
from arpo.model import load_policy
from arpo.model.critic import load_critic

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128, "rope_theta": 5e5}  # fmt: skip


def from_pretrained(path: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


# ------------------------------------------------------------------------------------------------------------ equality


def differences(ranks, folders: list[str]) -> list[str]:
    """What is not, bit for bit, as from_pretrained loads it: parameters, buffers, the critic's backbone."""
    wrong = []
    for folder in folders:
        expected = from_pretrained(folder)
        policy = load_policy(cfg_of(folder), ranks.mesh, device=CPU)
        critic = load_critic(cfg_of(folder), ranks.mesh, device=CPU)
        values = dict(full_tensors(policy.hf_parameters(), dtype=torch.float32, device=CPU))
        wrong += [n for n, p in expected.named_parameters() if not torch.equal(p, values.pop(n))] + list(values)
        buffers = dict(policy.hf.named_buffers())
        wrong += [n for n, b in expected.named_buffers() if not torch.equal(b, buffers.pop(n))] + list(buffers)
        backbone = dict(full_tensors(critic.backbone.named_parameters(), dtype=torch.float32, device=CPU))
        wrong += [n for n, p in expected.base_model.named_parameters() if not torch.equal(p, backbone[n])]
    return wrong


def test_three_ranks_hold_what_from_pretrained_loads(tmp_path):
    """Of every family, tied and untied, with RoPE scaling, in one file and several; rows do not divide by three."""
    folders = {kind: build(kind, tmp_path / kind) for kind in ("qwen2", "qwen3", "qwen3-untied", "llama")}
    folders["llama-3.1"] = build("llama", tmp_path / "llama-3.1", rope_parameters=LLAMA3)
    from_pretrained(str(folders["qwen2"])).save_pretrained(tmp_path / "several", max_shard_size="100KB")
    (tmp_path / "several" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    folders["several"] = tmp_path / "several"
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 2
    assert run_ranks(3, differences, [str(f) for f in folders.values()]) == [[], [], []]


# -------------------------------------------------------------------------------------------------------------- memory


def peak_mib(body) -> float:
    """By how much this process's resident memory grows at most while `body` runs (what is mapped of files included)."""
    read = lambda name: int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024  # noqa: E731
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read("VmRSS")
    kept = body()
    peak = read("VmHWM") - before
    del kept
    return peak


def peaks(ranks, warm_up: str, folder: str) -> tuple[float, float]:
    load_policy(cfg_of(warm_up), ranks.mesh, device=CPU)
    from_pretrained(warm_up)
    ours = peak_mib(lambda: load_policy(cfg_of(folder), ranks.mesh, device=CPU))
    return ours, peak_mib(lambda: read_whole(folder))


def read_whole(folder: str):
    """from_pretrained only maps the file, and the kernel may take such pages back; copies stay."""
    return [p.detach().clone() for p in from_pretrained(folder).parameters()]


@pytest.mark.slow
def test_a_rank_never_holds_much_more_than_its_share(tiny_model_dir, tmp_path):
    """The peak of each of two ranks is half of the model and the one weight being read; a whole model is all of it."""
    sizes = {"vocab_size": 16_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    build("llama", tmp_path, **sizes)
    model_mib = (tmp_path / "model.safetensors").stat().st_size / 2**20
    assert model_mib > 150
    for ours, whole in run_ranks(2, peaks, str(tiny_model_dir), str(tmp_path)):
        assert whole > 0.9 * model_mib, "else the measure is wrong"
        assert ours < 0.7 * model_mib, (ours, model_mib)


# ------------------------------------------------------------------------------------------------------ what is refused


def edit_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda w: w.pop("model.norm.weight"), r"1 weights are missing, model\.norm\.weight first"),
        (lambda w: w.update(score=torch.ones(2)), r"1 weights are not in the model of its config\.json, score first"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(32)}),
            r"model\.norm\.weight has shape \(32,\), config\.json says \(64,\)",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_one_line(tmp_path, change, words):
    folder = build_tiny_model(tmp_path)
    edit_weights(folder, change)
    for load in (load_policy, load_critic):
        with mesh_of_one() as mesh, pytest.raises(UserError, match=words) as error:
            load(cfg_of(folder), mesh, device=CPU)
        assert "\n" not in str(error.value) and f"model.path={folder}" in str(error.value)


def test_a_tied_head_that_is_stored_again_and_old_rope_buffers_do_no_harm(tmp_path):
    folder = build_tiny_model(tmp_path)
    extra = {"lm_head.weight": torch.zeros(384, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    edit_weights(folder, lambda w: w.update(extra))
    with mesh_of_one() as mesh:
        policy = load_policy(cfg_of(folder), mesh, device=CPU)
    assert policy.hf.lm_head.weight is policy.hf.model.embed_tokens.weight
    assert policy.hf.lm_head.weight.full_tensor().abs().max() > 0


def test_a_second_copy_beside_the_files_that_the_index_lists_is_not_read(tmp_path):
    folder = build_tiny_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    weights = load_file(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for copy in ("consolidated", "older"):  # whatever order they come in
        save_file({name: torch.zeros_like(w) for name, w in weights.items()}, folder / f"{copy}.safetensors")
    with mesh_of_one() as mesh:
        policy = load_policy(cfg_of(folder), mesh, device=CPU)
        assert torch.equal(policy.hf.lm_head.weight.full_tensor(), weights["model.embed_tokens.weight"])


def test_a_quantized_model_and_an_unknown_type_are_refused_by_name(tmp_path):
    folder = build_tiny_model(tmp_path)
    config = (folder / "config.json").read_text()
    quantized = config.replace("{", '{"quantization_config": {"quant_method": "gptq", "bits": 4},', 1)
    for text, words in ((quantized, "gptq weights cannot be trained"), ('{"model_type": "abacus"}', "abacus")):
        (folder / "config.json").write_text(text)
        with mesh_of_one() as mesh, pytest.raises(UserError, match=words) as error:
            load_policy(cfg_of(folder), mesh, device=CPU)
        assert "\n" not in str(error.value)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    folder = build_tiny_model(tmp_path, weights=False)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="save_pretrained it again"):
        check_model_folder(str(folder))
    with mesh_of_one() as mesh, pytest.raises(UserError, match=r"no weights \(\*\.safetensors\)"):
        load_policy(cfg_of(folder), mesh, device=CPU)
