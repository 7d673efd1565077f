"""The policy's passes, its head, and which model folders it takes. What each family computes: test_families.py."""

import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.models import build, build_tiny_model, build_tiny_tokenizer, cfg_of, random_rows, some_loss

from arpo.batch import collate
from arpo.data.model_folder import check_model_folder
from arpo.errors import UserError
from arpo.model import head, load_policy, load_tokenizer
from arpo.model.chat_template import excess_of
from arpo.model.head import CACHED_LOGITS, sampled_and_entropy, sampled_and_entropy_on_cpu, token_logprobs
from arpo.start.memory import sizes_of
from arpo.tree import collate_tree
from benchmarks.head_memory import peak_mib

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama", "qwen3-untied"])
def folder(request, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def several_chunks_of_several_blocks(monkeypatch):
    monkeypatch.setattr("arpo.model.policy.HEAD_CHUNK_TOKENS", 5)
    monkeypatch.setattr(head, "CACHED_LOGITS", 800)  # two rows of 384 tokens, 16 of 50


def gradients(policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in policy.hf.named_parameters() if p.requires_grad}


# ------------------------------------------------------------------------------------------------- forward, backward


def test_activation_checkpointing_gives_the_same_gradients(folder, mesh):
    results = []
    for every in (0, 1):
        policy = load_policy(cfg_of(folder, recompute_every_n_layers=every), mesh, device=CPU)
        some_loss(*policy(collate(random_rows()))).backward()
        results.append(gradients(policy))
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name


def test_selective_checkpointing_computes_every_nth_layer_twice(tiny_model_dir, mesh):
    for n, expected in ((1, [2, 2]), (2, [2, 1])):
        cfg = cfg_of(tiny_model_dir, recompute_every_n_layers=n)
        policy = load_policy(cfg, mesh, device=CPU)
        counts = [0, 0]
        for index, layer in enumerate(policy.hf.model.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, i=index, c=counts: c.__setitem__(i, c[i] + 1))
        some_loss(*policy(collate(random_rows()))).backward()
        assert counts == expected


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_compiled_layers_give_the_same_and_are_not_compiled_for_each_batch(
    tiny_model_dir, mesh, monkeypatch, lora_rank
):
    """All but the last stage, code generation, which takes a minute here; benchmarks/update_mfu.py has that too."""
    from torch._dynamo.utils import counters

    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda m, **kw: compile_layer(m, **kw, backend="aot_eager"))
    cfg = cfg_of(tiny_model_dir, recompute_every_n_layers=1, lora_rank=lora_rank)
    policies = [load_policy(replace(cfg, compile=c), mesh, device=CPU) for c in ("none", "layers")]
    counters.clear()
    compiled = []
    for lengths in (((5, 9), (1, 4)), ((3, 30),), ((2, 7), (4, 4), (9, 12))):
        micro = collate_tree(random_rows(lengths), range(len(lengths)))
        for policy in policies:
            policy.zero_grad()
            some_loss(*policy(micro)).backward()
        expected, ours = (gradients(policy) for policy in policies)
        for name, gradient in expected.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] > 0 and compiled[1] == compiled[2], "sizes are dynamic"


def test_an_empty_microbatch_gives_every_parameter_a_gradient_of_zero(folder, mesh):
    policy = load_policy(cfg_of(folder, recompute_every_n_layers=1), mesh, device=CPU)
    logprobs, entropies = policy(collate([]))
    some_loss(logprobs, entropies).backward()
    assert not logprobs.any() and not entropies.any()
    assert all(not gradient.any() for gradient in gradients(policy).values())


def test_a_microbatch_without_gradient_leaves_sharded_parameters_behind(folder, mesh):
    """Else an optimizer or a weight sync after it would work on the wrong tensors (FSDP2's root stays whole)."""
    from torch.distributed.tensor import DTensor

    policy = load_policy(cfg_of(folder), mesh, device=CPU)
    with torch.no_grad():
        policy(collate(random_rows()))
    assert all(isinstance(p, DTensor) for p in policy.parameters())


def test_bfloat16_computes_in_bfloat16_but_keeps_weights_and_gradients_in_float32(folder, mesh):
    exact = load_policy(cfg_of(folder), mesh, device=CPU)
    rough = load_policy(cfg_of(folder, compute_dtype="bfloat16"), mesh, device=CPU)
    micro = collate(random_rows())
    with torch.no_grad():
        expected, _ = exact(micro)
    logprobs, entropies = rough(micro)
    some_loss(logprobs, entropies).backward()
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert 0 < (logprobs - expected).abs().max() < 0.3
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in rough.parameters())


def test_loading_writes_nothing_to_the_console(folder, mesh, capfd):
    load_policy(cfg_of(folder), mesh, device=CPU)
    assert capfd.readouterr() == ("", "")


# ----------------------------------------------------------------------------------------------------------- the head


def naive_head(hidden, weight, targets, temperature):
    """Full logits, in float64."""
    log_p = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_a_cpu_passes_over_as_many_rows_of_logits_as_its_caches_hold_and_at_least_one():
    assert head.blocks(torch.zeros(5, 384)) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert head.blocks(torch.zeros(2, 1000)) == [slice(0, 1), slice(1, 2)]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("uses", ["logprobs", "entropy", "both"])
def test_the_chunked_head_equals_full_logits_in_values_and_gradients(chunk_tokens, temperature, uses):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 16, generator=g, requires_grad=True)
    weight = torch.randn(50, 16, generator=g, requires_grad=True)
    targets = torch.randint(0, 50, (20,), generator=g)
    weights = torch.randn(2, 20, generator=g)
    heads = {
        "ours": lambda *args: token_logprobs(*args, temperature=temperature, chunk_tokens=chunk_tokens),
        "naive": lambda *args: naive_head(*args, temperature),
    }
    results = {}
    for name, run in heads.items():
        outputs = run(hidden, weight, targets)
        losses = [(w * output).sum() for w, output in zip(weights, outputs, strict=True)]
        loss = {"logprobs": losses[0], "entropy": losses[1], "both": sum(losses)}[uses]
        results[name] = [*outputs, *torch.autograd.grad(loss, (hidden, weight))]
    for ours, expected in zip(results["ours"], results["naive"], strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(ours, expected.float(), atol=1e-5 * scale, rtol=1e-5)


def test_the_logits_of_only_one_chunk_are_there_at_a_time():
    hidden, weight = torch.randn(24, 1, requires_grad=True), torch.randn(20_000, 1, requires_grad=True)
    with peak_mib("cpu") as peak:
        logprobs, entropy = token_logprobs(hidden, weight, torch.arange(24), chunk_tokens=8)
        (logprobs.sum() + entropy.sum()).backward()
    chunk = 8 * 20_000 * 4 / 2**20
    assert chunk < peak[0] < 1.8 * chunk  # the rest: rows of one block, and the weight's gradient


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("vocab_size", [50, CACHED_LOGITS // 3])
def test_a_cpus_sampler_finds_what_the_plain_one_finds_of_the_rows_that_are_measured(vocab_size, temperature):
    logits = torch.randn(7, vocab_size) * 5 + 30
    ids, measured = torch.randint(vocab_size, (7,)), torch.tensor([0, 3, 4, 6])
    expected = sampled_and_entropy(logits.log_softmax(-1), ids, 3, temperature)
    expected[[1, 2, 5], 1:] = torch.nan
    found = sampled_and_entropy_on_cpu(logits, ids, 3, temperature, measured)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, equal_nan=True)
    nothing = sampled_and_entropy_on_cpu(logits, ids, 3, temperature, measured[:0])
    torch.testing.assert_close(nothing[:, 0], expected[:, 0], atol=1e-4, rtol=0)
    assert nothing[:, 1:].isnan().all()


def test_extreme_logits_stay_finite():
    """A distribution with all its mass on one token has entropy 0, not NaN."""
    hidden, weight = torch.full((2, 4), 100.0, requires_grad=True), torch.zeros(9, 4)
    weight[3] = 100.0
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([3, 4]))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist() == [0.0, -40_000.0] and entropy.tolist() == [0.0, 0.0]
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_of_bfloat16_are_not_rounded_to_it(temperature, monkeypatch):
    """marin PR#8217, miles PR#1554. Peaked logits, in blocks: rounded, they were wrong by up to 0.29."""
    monkeypatch.setattr(head, "CACHED_LOGITS", 7 * 500)
    monkeypatch.setattr(head, "WIDENED", 17)
    g = torch.Generator().manual_seed(0)
    hidden = (torch.randn(30, 64, generator=g) * 4).bfloat16().requires_grad_()
    weight = (torch.randn(500, 64, generator=g) * 0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, 500, (30,), generator=g)
    found = token_logprobs(hidden, weight, targets, temperature=temperature, chunk_tokens=16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = naive_head(*exact, targets, temperature)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert all((ours - other).abs().max() < 1e-4 for ours, other in zip(found, expected, strict=True))
    (found[0].sum() + found[1].sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    for ours, other in zip((hidden, weight), exact, strict=True):
        assert ((ours.grad - other.grad).norm() / other.grad.norm()) < 5e-3


# ------------------------------------------------------------------------------------------------------ model folders


@pytest.fixture
def broken(tmp_path):
    """A complete model folder, to be broken by the test."""
    return build_tiny_model(tmp_path / "model")


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_index(folder, names):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (lambda f: write_index(f, {"a": "model-2-of-2"}), "model-2-of-2 is missing"),
        (lambda f: write_index(f, {"a": "../model/config.json"}), "config.json is missing"),
        *((lambda f, names=names: write_index(f, names), "is missing") for names in ([1], {"a": 5}, None)),
        *(
            (lambda f, name=name, text=text: (f / name).write_text(text), f"{name} is not valid JSON")
            for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json")
            for text in ("[" * 100_000, '{"a": ' + "1" * 5000 + "}", "[]")
        ),
        (lambda f: (f / "tokenizer_config.json").unlink(), "no tokenizer_config.json"),
        (lambda f: (f / "chat_template.jinja").unlink(), "no chat template"),
        (lambda f: edit_json(f / "config.json", max_position_embeddings=128), "max_position_embeddings = 128"),
    ],
)
def test_a_broken_model_folder_is_one_line_that_names_the_fault(broken, damage, words):
    check_model_folder(str(broken), max_model_len=300)
    damage(broken)
    with pytest.raises(UserError, match=words) as caught:
        check_model_folder(str(broken), max_model_len=300)
    assert f"model.path={broken}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "runs/sft/hf", "nowhere"])
def test_a_local_path_that_does_not_exist_is_not_taken_for_a_hub_name(path):
    with pytest.raises(UserError, match="no such folder"):
        check_model_folder(path)


def test_a_hub_name_is_left_to_the_hub():
    check_model_folder("Qwen/Qwen2.5-7B-Instruct")


def test_truncated_weights_are_one_line(broken, mesh):
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"cannot load the weights \(model\.safetensors: ") as caught:
        load_policy(cfg_of(broken), mesh, device=CPU)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_without_the_padding_token_is_one_line(broken, mesh):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"vocab_size": 5, "pad_token_id": 5}))
    assert sizes_of(str(broken)) is None
    with pytest.raises(UserError, match=r"cannot build the model \(Padding_idx must be within num_embeddings\)"):
        load_policy(cfg_of(broken), mesh, device=CPU)


def test_a_head_with_soft_capping_is_refused(tmp_path, mesh):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    Gemma2ForCausalLM(Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(tmp_path)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="Gemma2ForCausalLM does more with its logits than to divide them"):
        load_policy(cfg_of(tmp_path), mesh, device=CPU)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template, more",
    [
        pytest.param(ENDLESS, "5 s of CPU time", marks=pytest.mark.slow),
        ("{% if tools %}{{ 'a' * 10 ** 10 }}{% endif %}", "1 GiB"),
    ],
)
def test_a_chat_template_without_end_is_refused_before_the_run(tiny_model_dir, tmp_path, template, more):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    words = rf"^critic\.path=.*model: its chat template \(chat_template\.jinja, .* more than {more}.* for a "
    with pytest.raises(UserError, match=words):
        load_tokenizer(str(folder), option="critic.path")


@pytest.mark.parametrize("file", sorted(Path(__file__).parents[1].glob("protocol/chat_templates/*.jinja")), ids=str)
def test_published_chat_templates_are_rendered_in_a_second(file):
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert excess_of(file.read_text()) == ""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime - started.ru_utime - started.ru_stime < 1


def test_a_folder_without_tokenizer_files_is_one_line(tmp_path):
    for option in ("model.path", "loss.reference"):
        with pytest.raises(UserError, match=rf"^{option}=.*: cannot load the tokenizer") as caught:
            load_tokenizer(str(tmp_path), option=option)
        assert "\n" not in str(caught.value)
