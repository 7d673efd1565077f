"""Real ranks that load a model shard by shard; the reference is from_pretrained, which loads it whole."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers.models import build, build_tiny_model, cfg_of, load_hf
from helpers.ranks import run_ranks
from safetensors.torch import load_file, save_file

from arpo.data.model_folder import check_model_folder
from arpo.engine.weight_sync import check_checkpoint, full_tensors
from arpo.errors import UserError
from arpo.model import load_policy, load_tokenizer
from arpo.model.critic import load_critic
from arpo.model.policy import check_companion

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128, "rope_theta": 5e5}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ equality


def differences(ranks, folders: list[str]) -> list[str]:
    """What is not, bit for bit, as from_pretrained loads it: parameters, buffers, the critic's backbone."""
    wrong = []
    for folder in folders:
        expected = load_hf(folder)
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
    load_hf(folders["qwen2"]).save_pretrained(tmp_path / "several", max_shard_size="100KB")
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
    load_hf(warm_up)
    ours = peak_mib(lambda: load_policy(cfg_of(folder), ranks.mesh, device=CPU))
    return ours, peak_mib(lambda: read_whole(folder))


def read_whole(folder: str):
    """from_pretrained only maps the file, and the kernel may take such pages back; copies stay."""
    return [p.detach().clone() for p in load_hf(folder).parameters()]


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
def test_weights_that_do_not_fit_the_config_are_one_line_of_the_trainer_and_of_the_engine(
    tmp_path, change, words, capfd, mesh
):
    folder = build_tiny_model(tmp_path)
    edit_weights(folder, change)
    capfd.readouterr()
    loaders = [lambda load=load: load(cfg_of(folder), mesh, device=CPU) for load in (load_policy, load_critic)]
    if "are not in the model" not in words:  # which vLLM leaves out
        loaders.append(lambda: check_checkpoint(str(folder), needs_weights=True))
    for load in loaders:
        with pytest.raises(UserError, match=words) as error:
            load()
        assert "\n" not in str(error.value) and f"model.path={folder}" in str(error.value)
    assert capfd.readouterr() == ("", "")


def beside(name: str, change=lambda w: w + 1, *, keep: bool = True):
    """Write the folder's weights again, changed, under another name."""

    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        save_file({n: change(w) for n, w in weights.items()}, folder / name, metadata={"format": "pt"})
        if not keep:
            (folder / "model.safetensors").unlink()

    return edit


def halves(folder: Path, *, names=("a.safetensors", "b.safetensors"), shared: str = "") -> None:
    weights = load_file(folder / "model.safetensors")
    first = sorted(weights)[::2]
    save_file({n: weights[n] for n in first}, folder / names[0])
    save_file({n: w for n, w in weights.items() if n not in first or n == shared}, folder / names[1])
    (folder / "model.safetensors").unlink()


def index_of(folder: Path, file: str) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))


def stale_index(folder: Path) -> None:
    beside("model-00001-of-00001.safetensors")(folder)
    index_of(folder, "model-00001-of-00001.safetensors")


def indexed_beside_copies(folder: Path) -> None:
    index_of(folder, "model-00001-of-00001.safetensors")
    beside("consolidated.safetensors")(folder)  # around the model's name in the alphabet
    beside("older.safetensors")(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")


def head(change):
    return lambda folder: edit_weights(
        folder, lambda w: w.update({"lm_head.weight": change(w["model.embed_tokens.weight"])})
    )


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FOLDERS = {  # report: (what is done to the folder, the one line; "" = loads what transformers loads)
    "an old copy (unsloth#2978)": (beside("model_old.safetensors"), ""),
    "a later name in the alphabet (llama.cpp#17286)": (beside("pytorch_model.safetensors"), ""),
    "Mistral's format (InfiniLM#467)": (beside("consolidated.safetensors"), ""),
    "a variant (transformers' variant=fp16)": (beside("model.fp16.safetensors"), ""),
    "an adapter beside it (unsloth#1061)": (
        lambda f: save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 2)}, f / "adapter_model.safetensors"), ""
    ),
    "an optimizer beside it": (lambda f: save_file({"step": torch.ones(1)}, f / "optimizer.safetensors"), ""),
    "an index of itself and auxiliary files (mlx-swift-lm#408)": (
        lambda f: (beside("projector.safetensors")(f), index_of(f, "model.safetensors")), ""
    ),
    "copies beside the files that an index lists": (indexed_beside_copies, ""),
    "shards without an index, beside Mistral's": (
        lambda f: (beside("consolidated.safetensors")(f), halves(f, names=SHARDS)), ""
    ),
    "older shards with an index (mlx-vlm#1827, peft#2405)": (
        stale_index, r"has model.safetensors, and an index of other files \(model-00001-of-00001.safetensors\)"
    ),
    "an index whose files are not there (mlx-swift-lm#562, CoSER#3)": (
        lambda f: index_of(f, SHARDS[0]), r"model-00001-of-00002.safetensors is missing"
    ),
    "one weight in two files (vllm#54230)": (
        lambda f: halves(f, shared="model.embed_tokens.weight"), "embed_tokens.weight is in a.safetensors and in b"
    ),
    "two whole models, neither called model (unsloth#2978)": (
        lambda f: (beside("a.safetensors")(f), beside("b.safetensors", keep=False)(f)),
        r"is in a.safetensors and in b.safetensors; which of them",
    ),
    "a head of its own where the config ties (LlamaFactory#10560, transformers#42612)": (
        head(lambda e: e * 2), r"lm_head.weight is not the embeddings, to which config.json ties it; set tie_word"
    ),
    "one row of the head is another (Automodel#2511)": (
        head(lambda e: torch.cat([e[:-1], e[-1:] + 1])), "lm_head.weight is not the embeddings"
    ),
    "a head that is resized alone": (head(lambda e: torch.cat([e, e[:1]])), "lm_head.weight is not the embeddings"),
    "the tied head is stored again (transformers 4)": (head(lambda e: e.clone()), ""),
    "old RoPE buffers": (
        lambda f: edit_weights(f, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})),
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("report", FOLDERS)
def test_a_folder_of_several_files_is_the_model_that_transformers_loads_or_one_line(report, tmp_path, mesh):
    edit, words = FOLDERS[report]
    folder = build_tiny_model(tmp_path)
    expected = load_file(folder / "model.safetensors")
    edit(folder)
    if words:
        with pytest.raises(UserError, match=f"^model.path={re.escape(str(folder))}: .*{words}") as error:
            load_policy(cfg_of(folder), mesh, device=CPU)
        assert "\n" not in str(error.value)
        return
    policy = load_policy(cfg_of(folder), mesh, device=CPU)
    found = dict(policy.hf.named_parameters())
    assert all(torch.equal(found[name].full_tensor(), weight) for name, weight in expected.items())
    assert policy.hf.lm_head.weight is policy.hf.model.embed_tokens.weight


@pytest.mark.parametrize("report", [name for name in FOLDERS if "copy" in name or "head" in name])
def test_what_vllm_would_load_otherwise_is_one_line_before_an_evaluation(report, tmp_path):
    """vLLM loads all files where there is no index, and drops a tied head."""
    folder = build_tiny_model(tmp_path)
    check_checkpoint(str(folder), needs_weights=True)
    FOLDERS[report][0](folder)
    if "stored again" in report:
        return check_checkpoint(str(folder), needs_weights=True)
    with pytest.raises(
        UserError, match=r"vLLM would load model_old.safetensors over model.safetensors|to which config"
    ):
        check_checkpoint(str(folder), needs_weights=True)


ADDED = {  # report: (tokens, special)
    "a special token for a tag (self-rag#91)": (["<my_search>"], True),
    "plain tokens (transformers#11008, #24698, #11102)": ([f"<extra_{i}>" for i in range(60)], False),
    "a pad token (lo-fit#1, trlx#498)": (["[PAD]"], True),
    "as many as there are rows: fits (axolotl#2257 is the other way round)": ([], False),
}


@pytest.mark.parametrize("report", ADDED)
def test_a_tokenizer_with_more_ids_than_embeddings_is_one_line(report, tmp_path):
    tokens, special = ADDED[report]
    folder = build_tiny_model(tmp_path)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens([f"<fill_{i}>" for i in range(384 - len(tokenizer))])
    tokenizer.add_tokens(tokens, special_tokens=special)
    tokenizer.save_pretrained(folder)
    if not tokens:
        assert len(load_tokenizer(str(folder))) == 384
        return
    words = f"{len(tokens)} tokens without a row of the model's 384 embeddings, {re.escape(repr(tokens[0]))} first"
    with pytest.raises(UserError, match=rf"^critic\.path=.*: the tokenizer has {words}") as error:
        check_companion(str(folder), tokenizer, max_model_len=64, option="critic.path")
    assert "resize_token_embeddings" in str(error.value) and "\n" not in str(error.value)


def test_a_quantized_model_and_an_unknown_type_are_refused_by_name(tmp_path, mesh):
    folder = build_tiny_model(tmp_path)
    config = (folder / "config.json").read_text()
    quantized = config.replace("{", '{"quantization_config": {"quant_method": "gptq", "bits": 4},', 1)
    for text, words in ((quantized, "gptq weights cannot be trained"), ('{"model_type": "abacus"}', "abacus")):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match=words) as error:
            load_policy(cfg_of(folder), mesh, device=CPU)
        assert "\n" not in str(error.value)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path, mesh):
    folder = build_tiny_model(tmp_path, weights=False)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="save_pretrained it again"):
        check_model_folder(str(folder))
    with pytest.raises(UserError, match=r"no weights \(\*\.safetensors\)"):
        load_policy(cfg_of(folder), mesh, device=CPU)
