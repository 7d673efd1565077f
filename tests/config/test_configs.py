"""The configs of the papers' models and algorithms: the settings of all combinations.

And whether the real architectures (on the meta device) fit them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.edits import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from arpo.branching import RULES, Evidence, initial_rollouts
from arpo.config.sections import OptimConfig
from arpo.model.loading import check_head
from arpo.options import BranchingConfig
from arpo.start.checks import warnings_of
from arpo.start.load import load_config
from evaluate import EvalConfig
from extras.ablation.frontier_settings import Setting
from train_rl import RLConfig
from train_sft import SFTConfig

CONFIGS = ROOT / "configs"
QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN2 = QWEN | {"model_type": "qwen2", "max_position_embeddings": 32768}
SMALL_QWEN2 = QWEN2 | {"vocab_size": 151936, "tie_word_embeddings": True}
QWEN3 = QWEN | {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
QWEN3_5 = QWEN3 | {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "max_position_embeddings": 262144,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
LLAMA_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }  # fmt: skip


MODELS = {  # config.json as published, and the number of parameters
    "qwen2.5_1.5b": (SMALL_QWEN2 | shape(1536, 8960, 28, 12, 2), 1_543_714_304),
    "qwen2.5_3b": (SMALL_QWEN2 | shape(2048, 11008, 36, 16, 2), 3_085_938_688),
    "qwen2.5_7b": (QWEN2 | shape(3584, 18944, 28, 28, 4) | {"vocab_size": 152064}, 7_615_616_512),
    "llama3.1_8b": (
        {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
         "rope_theta": 5e5, "rope_scaling": LLAMA_ROPE} | shape(4096, 14336, 32, 32, 8),
        8_030_261_248,
    ),
    "qwen3_8b": (QWEN3 | shape(4096, 12288, 36, 32, 8), 8_190_735_360),
    "qwen3_14b": (QWEN3 | shape(5120, 17408, 40, 40, 8), 14_768_307_200),
    "qwen3.5_4b": (QWEN3_5 | shape(2560, 9216, 32, 16, 4) | {"tie_word_embeddings": True}, 4_205_751_296),
}  # fmt: skip
LARGER = {  # take the config of a smaller model; without the vision tower
    "qwen3.5_9b": (QWEN3_5 | shape(4096, 12288, 32, 16, 4), 8_953_803_264),
}
CONFIG_OF = {"qwen3.5_9b": "qwen3.5_4b"}
REASONING = (128, 16, 16, 8, 1536, 4096, 2, "dongguanting/ARPO-RL-Reasoning-10K")
DEEP_SEARCH = (128, 16, 16, 8, 2000, 10000, 5, "dongguanting/ARPO-RL-DeepSearch-1K")
SETTINGS = {  # prompts per step and mini-batch, group, initial rollouts, prompt, response, epochs, file: ALGORITHMS 2
    "qwen2.5_1.5b": REASONING,
    "qwen2.5_3b": REASONING,
    "qwen2.5_7b": REASONING,
    "llama3.1_8b": REASONING,
    "qwen3_8b": DEEP_SEARCH,
    "qwen3.5_4b": DEEP_SEARCH,
    "qwen3_14b": (64, 8, 12, 6, 2000, 6192, 5, "dongguanting/ARPO-RL-DeepSearch-1K"),
}
NUM_GPUS, GPU_BYTES = 8, 80e9


@cache
def real(model: str) -> torch.nn.Module:
    values = dict((MODELS | LARGER)[model][0])
    config = AutoConfig.for_model(values.pop("model_type"), **{"tie_word_embeddings": False} | values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@cache  # reading a config takes a tenth of a second
def rl(algorithm: str, model: str) -> RLConfig:
    return load_config(RLConfig, [str(CONFIGS / f"{name}.yaml") for name in (CONFIG_OF.get(model, model), algorithm)])


@cache
def sft(model: str) -> SFTConfig:
    return load_config(SFTConfig, [str(CONFIGS / f"{name}.yaml") for name in (model, "sft")])


@pytest.mark.parametrize("model", MODELS | LARGER)
def test_the_architecture_is_the_published_one(model):
    hf = real(model)
    assert sum(p.numel() for p in hf.parameters()) == (MODELS | LARGER)[model][1]
    check_head(hf)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algorithm", ["grpo", "arpo", "aepo"])
def test_rl_settings_are_those_of_papers_and_scripts(algorithm, model):
    cfg = rl(algorithm, model)
    # only ARPO's group has a fixed number of roots
    num_initial_rollouts = rl("arpo", model).branching.num_initial_rollouts
    assert SETTINGS[model] == (
        cfg.data.num_prompts_per_step, cfg.update.num_prompts_per_minibatch, cfg.rollout.group_size,
        num_initial_rollouts, cfg.data.max_prompt_tokens, cfg.rollout.max_response_tokens,
        cfg.run.num_epochs, cfg.data.train,
    )  # fmt: skip
    papers = OptimConfig(lr=1e-6, schedule="constant", warmup_ratio=0.0, weight_decay=0.01)
    assert replace(cfg.optim, offload=False) == OptimConfig() == papers
    deep_search = model.startswith("qwen3")
    assert cfg.rollout.max_tool_calls == (6 if deep_search or algorithm == "aepo" else 3)
    assert cfg.model.enable_thinking == deep_search
    search = cfg.tools.search  # Bing through Bright Data, with a cache that fills: what is recorded is far too little
    assert (search.backend, search.location, search.mode) == ("brightdata", "cn", "record")
    assert search.cache == "data/search_cache.sqlite" and not search.read_pages
    needs_no_sft = cfg.protocol.format != "tags"
    assert cfg.model.path == (sft(model).model.path if needs_no_sft else f"runs/{sft(model).run.name}/hf")
    assert cfg.data.system_prompt == ("default" if needs_no_sft else "keep")
    assert cfg.loss.entropy_balanced_clipping == cfg.loss.entropy_balanced_advantage == (algorithm == "aepo")
    selector = {"grpo": "none"}.get(algorithm, algorithm)
    assert (cfg.branching.selector, cfg.branching.dynamic_budget) == (selector, algorithm == "aepo")
    if algorithm == "grpo":
        assert cfg.branching == BranchingConfig(selector="none")
    assert not [*warnings_of(cfg.rollout, cfg.branching, cfg.advantage, cfg.loss)]
    default = BranchingConfig()
    assert (cfg.branching.base, cfg.branching.weight) == (default.base, default.weight) == (0.5, 0.3352)


RUNS_THAT_BRANCH = [
    *([f"{model}.yaml", f"{algorithm}.yaml"] for model in MODELS for algorithm in ("arpo", "aepo")),
    ["smoke.yaml"],
    ["smoke.yaml", "aepo.yaml"],
    ["demo_arpo.yaml"],
    ["demo_arpo.yaml", "aepo.yaml"],
    ["llm_arpo.yaml"],
    ["llm_arpo.yaml", "aepo.yaml"],
    ["demo_arpo.yaml", "demo_hard.yaml"],
]


@pytest.mark.parametrize("files", RUNS_THAT_BRANCH, ids=" ".join)
def test_the_entropy_acts_under_every_shipped_config(files):
    """One nat more than in the first turn nearly decides; two nats either way move nearly the whole of AEPO's group."""
    branching = load_config(RLConfig, [str(CONFIGS / name) for name in files]).branching
    evidence = Evidence((), (), entropy=2.5, root_entropy=1.5)
    assert RULES[branching.selector](evidence, branching) >= 0.83
    beta = branching.budget_weight
    assert initial_rollouts(16, 0.0, 2.0, beta=beta) <= 3 and initial_rollouts(16, 2.0, 0.0, beta=beta) >= 14


def test_the_bundle_that_forks_afterwards_is_the_one_that_was_measured():
    """The file has every setting of docs/branching.md's runs, but for those of their tiny model and its optimizer.

    Shipped configs that were not those of the tables: autonomousvision/CaRL #24, samsledje/ConPLex #42."""
    bundle = rl("forks", "qwen2.5_7b")
    task = [str(CONFIGS / f"{name}.yaml") for name in ("demo_arpo", "demo_long")]
    measured = load_config(RLConfig, [*task, *Setting.named("at2po_anchored_g4_r1_x1").flags])
    assert (bundle.loss, bundle.advantage) == (measured.loss, measured.advantage)
    of_task = {"entropy_tokens": measured.branching.entropy_tokens}
    assert replace(bundle.branching, **of_task) == measured.branching
    assert bundle.rollout.group_size == measured.rollout.group_size
    of_model = {name: getattr(measured.optim, name) for name in ("lr", "betas", "weight_decay")}
    assert replace(bundle.optim, **of_model) == measured.optim


@pytest.mark.parametrize("model", MODELS)
def test_sft_settings_are_the_papers(model):
    cfg = sft(model)
    optim = cfg.optim
    assert (optim.lr, optim.schedule, optim.warmup_ratio, optim.weight_decay) == (7e-6, "cosine", 0.1, 0)
    assert (cfg.run.num_epochs, cfg.data.num_conversations_per_step, cfg.data.max_tokens) == (3, 16, 15000)
    assert cfg.model.compute_dtype == "bfloat16" and cfg.data.mask_results
    assert cfg.data.max_tokens <= real(model).config.max_position_embeddings
    assert cfg.model.enable_thinking == rl("arpo", model).model.enable_thinking  # else RL would see other prompts
    default = SFTConfig(data=cfg.data)
    assert optim == default.optim and cfg.run.num_epochs == default.run.num_epochs


@pytest.mark.parametrize("model", MODELS | LARGER)
@pytest.mark.parametrize("algorithm", ["grpo", "arpo", "aepo"])
def test_the_real_model_fits_the_rl_config_on_eight_gpus(algorithm, model):
    """Positions suffice; sampling weights, a KV cache worth the name, and the shards of a rank fit into 80 GB."""
    cfg, hf = rl(algorithm, model), real(model)
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    assert longest <= min(hf.config.max_position_embeddings, cfg.update.max_tokens_per_microbatch)
    num_parameters = (MODELS | LARGER)[model][1]
    engine = cfg.engine.gpu_memory_utilization * GPU_BYTES
    # float32 weights, and two moments unless they are in host memory; gradients exist while the engine sleeps
    shards = (4 if cfg.optim.offload else 12) * num_parameters / NUM_GPUS
    head_dim = getattr(hf.config, "head_dim", None) or hf.config.hidden_size // hf.config.num_attention_heads
    kv_bytes = 2 * 2 * hf.config.num_hidden_layers * hf.config.num_key_value_heads * head_dim  # per token, bfloat16
    assert engine + shards < GPU_BYTES
    assert engine - 2 * num_parameters > 8 * longest * kv_bytes  # eight full-length trajectories at the very least


SAMPLING = (0.6, 0.95, 15, ("python=5", "search=10"), 5)


@pytest.mark.parametrize("model", MODELS)
def test_an_evaluation_asks_as_training_did_and_searches_live_as_the_released_script_does(model):
    cfg = load_config(EvalConfig, [str(CONFIGS / f"{name}.yaml") for name in (model, "eval")])
    assert cfg.model.enable_thinking == rl("arpo", model).model.enable_thinking
    assert cfg.model.path == sft(model).model.path  # the model itself, where --model.path names no trained one
    assert cfg.run.name == f"{model}-eval"
    rollout, search = cfg.rollout, cfg.tools.search
    calls = (rollout.max_tool_calls, rollout.max_calls_per_tool)
    assert (rollout.temperature, rollout.top_p, *calls, cfg.eval.num_samples) == SAMPLING
    assert (search.backend, search.location, search.mode, search.read_pages) == ("brightdata", "cn", "record", 0)


@pytest.mark.parametrize("model", ["qwen3_8b", "qwen3_14b"])
def test_deep_search_is_evaluated_with_pages_and_a_summariser(model):
    cfg = load_config(EvalConfig, [str(CONFIGS / f"{name}.yaml") for name in (model, "eval_deepsearch")])
    rollout, search = cfg.rollout, cfg.tools.search
    calls = (rollout.max_tool_calls, rollout.max_calls_per_tool)
    assert (rollout.temperature, rollout.top_p, *calls, cfg.eval.num_samples) == SAMPLING
    assert (search.backend, search.location, search.read_pages, search.page_chars) == ("brightdata", "cn", 10, 6000)
    assert search.summarizer_url and search.summarizer_model and cfg.eval.benchmarks == ("deepsearch",)
    assert search.cache != rl("arpo", model).tools.search.cache
    assert cfg.max_model_len <= 32768 <= real(model).config.max_position_embeddings  # what Qwen3 was trained on
    assert rollout.max_result_tokens >= 10 * 200 * 1.3  # ten summaries of 200 words


@pytest.mark.parametrize("script", [RLConfig, EvalConfig])
@pytest.mark.parametrize(
    "flags",
    [
        {"backend": "http", "url": "http://host:8000/retrieve"},
        {"backend": "local", "corpus": "FILE.jsonl"},
        {"backend": "serper"},
        {"backend": "replay", "cache": "search_cache.json"},
    ],
)
def test_another_search_takes_its_own_flags_only(script, flags):
    """What the configs say of Bright Data goes with it."""
    for name in {RLConfig: ["arpo"], EvalConfig: ["eval", "eval_deepsearch"]}[script]:
        files = [str(CONFIGS / f"{file}.yaml") for file in ("qwen3_8b", name)]
        given = [token for key, value in flags.items() for token in (f"--tools.search.{key}", value)]
        search = load_config(script, [*files, *given]).tools.search
        assert vars(search).items() >= flags.items() and not search.zone


BASELINES = {
    "gspo": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean_token_mean"},
    "dapo": {"clip_high": 0.28, "dual_clip": 10.0},
    "reinforce_pp": {"kl_coefficient": 1e-5, "kl_estimator": "k2"},
}


@pytest.mark.parametrize("model", [*MODELS, "smoke"])
@pytest.mark.parametrize("algorithm", BASELINES)
def test_a_baseline_is_grpo_with_its_own_loss_and_advantage(algorithm, model):
    cfg, grpo = rl(algorithm, model), rl("grpo", model)
    assert cfg.loss == replace(grpo.loss, **BASELINES[algorithm])
    assert cfg.advantage.normalize == ("batch" if algorithm == "reinforce_pp" else "group")
    assert (cfg.branching, cfg.rollout, cfg.update, cfg.optim) == (
        grpo.branching, grpo.rollout, grpo.update, grpo.optim,
    )  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algorithm", ["arpo", "aepo", "grpo", "forks"])
def test_the_fast_variant_goes_after_any_model_and_algorithm_and_changes_nothing_else(algorithm, model):
    cfg = load_config(RLConfig, [str(CONFIGS / f"{name}.yaml") for name in (model, algorithm, "no_waits")])
    usual = rl(algorithm, model)
    assert cfg.rollout == replace(usual.rollout, dispatch="pull", carry_over=1)
    assert cfg.loss == replace(usual.loss, rollout_correction="tis")
    assert replace(cfg, rollout=usual.rollout, loss=usual.loss, run=usual.run) == usual


def test_the_smoke_run_is_small_enough_for_one_gpu():
    cfg = load_config(RLConfig, [str(CONFIGS / "smoke.yaml")])
    trajectories = cfg.run.num_steps * cfg.data.num_prompts_per_step * cfg.rollout.group_size
    assert trajectories * cfg.rollout.max_response_tokens < 600 * 2000  # ten minutes at 2,000 tokens per second


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algorithm", ["at2po", "tree_grpo", "dapo"])
def test_the_family_of_arpo_goes_after_every_models_file(algorithm, model):
    cfg = rl(algorithm, model)
    assert cfg.branching.selector == ("none" if algorithm == "dapo" else algorithm)
    assert cfg.advantage.dead_groups == ("resample" if algorithm == "dapo" else "keep")
    credit = {"at2po": ("node", "turn"), "tree_grpo": ("inter_intra", "sequence")}.get(algorithm, ("soft", "sequence"))
    assert (cfg.advantage.tree, cfg.loss.ratio_over) == credit
    if algorithm != "dapo":
        assert cfg.branching.num_initial_rollouts == rl("arpo", model).branching.num_initial_rollouts


@pytest.mark.parametrize("model", ["qwen3.5_4b", "qwen3.5_9b"])
def test_the_adapters_of_qwen3_5_go_on_layers_that_it_has(model):
    docs = (CONFIGS.parent / "docs" / "scale.md").read_text()
    targets = re.search(r"--model\.lora_targets ([\w ]+)", docs)[1].split()
    layers = {name.rpartition(".")[2] for name, m in real(model).named_modules() if isinstance(m, torch.nn.Linear)}
    assert layers - {*targets} == {"in_proj_a", "in_proj_b", "lm_head"} and {*targets} < layers


@pytest.mark.parametrize("algorithm", ["grpo", "arpo", "aepo"])
def test_search_r1s_task_goes_before_every_algorithm(algorithm):
    cfg = rl(algorithm, "search_r1")
    sizes = (cfg.data.num_prompts_per_step, cfg.update.num_prompts_per_minibatch, cfg.rollout.group_size)
    assert sizes == (512, 256, 5) and cfg.run.num_steps == 500  # appendix B.2 of the paper
    assert (cfg.loss.kl_coefficient, cfg.loss.clip_low, cfg.rollout.temperature) == (0.001, 0.2, 1.0)
    assert (cfg.rollout.max_tool_calls, cfg.rollout.max_result_tokens, cfg.tools.search.num_passages) == (
        6 if algorithm == "aepo" else 4, 500, 3,
    )  # fmt: skip
    assert cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens == 4096
    assert (cfg.reward.weights, cfg.tools.names) == ({"accuracy": 1.0}, ("search",))
    asked = load_config(EvalConfig, [str(CONFIGS / "search_r1.yaml"), "--eval.files", "x.parquet"])
    assert asked.tools == cfg.tools and asked.rollout.temperature == 0
