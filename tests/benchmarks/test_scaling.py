"""The model of memory and time against what can be measured on a CPU, and against itself where it cannot."""

from dataclasses import replace

import pytest
import torch
from helpers.ranks import ROOT, run_ranks
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from arpo.config.sections import ModelConfig, OptimConfig
from arpo.errors import UserError
from arpo.model import load_policy
from arpo.model.optim import build_optimizer
from arpo.start.memory import Job, training_state
from benchmarks import scaling
from benchmarks.shared import cost_model
from benchmarks.shared.hardware import HARDWARE
from benchmarks.shared.shapes import MODELS, OTHER_MODELS, Shape, shape_from_json

NODE = HARDWARE["8xH100-80GB"]
ALL_MODELS = MODELS | OTHER_MODELS
PUBLISHED = {  # parameters, as their model cards count them
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
}


@pytest.mark.parametrize("name", ALL_MODELS)
def test_parameters_are_those_of_the_real_model(name):
    shape = ALL_MODELS[name]
    families = {"Qwen2.5": Qwen2Config, "Qwen3": Qwen3Config, "Llama": LlamaConfig, "SmolLM2": LlamaConfig}
    config = families[name.split("-")[0]](
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) == PUBLISHED.get(name, shape.parameters)
    assert shape_from_json(config.to_dict()) == shape


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_training_step_are_as_predicted(tied):
    shape = Shape(64, 160, 3, 4, 2, 32, 512, tied=tied, qk_norm=True)
    found = scaling.measure(shape, 100)
    assert all(len({*found[name]}) == 1 for name in ("parameters", "gradients", "optimizer")), found
    predicted, measured = found["activations"]
    assert predicted == pytest.approx(measured, rel=0.1)


def frozen_bytes(ranks, folder: str) -> int:
    """Of this rank's shards under LoRA: the weights without adapters."""
    policy = load_policy(ModelConfig(folder, lora_rank=4, lora_alpha=8), ranks.mesh, device=ranks.device)
    return sum(p.to_local().nbytes for p in policy.parameters() if not p.requires_grad)


def state_bytes(ranks, folder: str) -> tuple[int, int]:
    """Of this rank's shards: parameters, and the optimizer's moments after a step."""
    cfg = ModelConfig(folder, compute_dtype="float32", recompute_every_n_layers=0)
    policy = load_policy(cfg, ranks.mesh, device=ranks.device)
    optimizer = build_optimizer(policy, OptimConfig())
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moments = [t.to_local() for s in optimizer.state.values() for t in s.values() if t.dim()]
    return sum(p.to_local().nbytes for p in policy.parameters()), sum(t.nbytes for t in moments)


def test_shards_of_two_ranks_are_as_predicted(tiny_model_dir):
    """Frozen weights held, or counted, in float32: huggingface/accelerate #3844, deepspeedai/DeepSpeed #5304."""
    shape = shape_from_json(AutoConfig.from_pretrained(tiny_model_dir).to_dict())
    # parameters, gradients, and two moments
    quarter = training_state(Job(shape.sizes, ModelConfig(), num_shards=2)) / 4
    for measured in run_ranks(2, state_bytes, str(tiny_model_dir)):
        assert measured == pytest.approx((quarter, 2 * quarter), rel=0.01)
    frozen = training_state(Job(shape.sizes, ModelConfig(lora_rank=4), num_shards=2))
    assert run_ranks(2, frozen_bytes, str(tiny_model_dir)) == pytest.approx([frozen, frozen], rel=0.01)


def test_what_cannot_fit_is_said_with_the_knob_that_changes_it(tmp_path, capsys):
    shape = MODELS["Qwen3-14B"]
    assert not cost_model.misfits(shape, cost_model.Workload(), NODE, 8)
    assert "training" in cost_model.misfits(shape, cost_model.Workload(recompute_every_n_layers=0), NODE, 8)[0]
    assert "not a multiple of 24 ranks" in cost_model.misfits(shape, cost_model.Workload(), NODE, 24)[0]
    config = tmp_path / "big.yaml"
    config.write_text("engine:\n  gpu_memory_utilization: 0.95\n")
    model = str(ROOT / "configs" / "qwen2.5_7b.yaml")
    argv = ["--quick", "--nodes", "1", "--model", "Qwen2.5-7B", "--config", model]
    scaling.main(argv)
    with pytest.raises(SystemExit, match=r"warning: .* does not fit on 1 node"):
        scaling.main([*argv, str(config)])
    assert "does not fit: engine.gpu_memory_utilization=0.95 of 79.1 GiB leaves no room" in capsys.readouterr().out


def test_the_model_is_known_by_the_name_of_its_runs_folder_or_is_asked_for_in_a_line():
    assert scaling.shape_of("runs/qwen2.5_7b-sft/hf") == MODELS["Qwen2.5-7B"]
    assert scaling.shape_of("runs/llama3.1_8b-sft/hf") == MODELS["Llama-3.1-8B"]
    for name, shape in ALL_MODELS.items():
        assert scaling.shape_of(f"org/{name}-Instruct") == shape
    with pytest.raises(UserError, match=r"model\.path=Qwen/Qwen3\.5-4B: no folder .*say --model Qwen2\.5-3B\|"):
        scaling.shape_of("Qwen/Qwen3.5-4B")


GSM8K = """
model: {path: Qwen/Qwen3-0.6B}
data: {train: gsm8k.parquet, num_prompts_per_step: 32, max_prompt_tokens: 256}
rollout: {group_size: 4, max_response_tokens: 1024}
branching: {num_initial_rollouts: 4}
update: {num_prompts_per_minibatch: 4}
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        # (prompt, sampled, results, longest sampled, seconds of its tools)
        ("tools: {names: []}", (256, 900, 0, 1024, 0)),
        ("tools: {names: [python]}\nprotocol: {format: hermes}", (256, 614.4, 409.6, 1024, 20)),
        ("tools: {names: [python]}\nrollout: {max_tool_calls: 0, max_response_tokens: 512}", (256, 512, 0, 512, 0)),
        ("tools: {names: [python]}\nrollout: {max_tool_calls: 1, max_result_tokens: 100, group_size: 4}",
         (256, 900, 100, 3000, 20 / 3)),
    ],
)  # fmt: skip
def test_lengths_and_tools_are_those_of_the_config(tmp_path, more, expected):
    first, second = tmp_path / "gsm8k.yaml", tmp_path / "more.yaml"
    first.write_text(GSM8K if "group_size" not in more else GSM8K.replace(", max_response_tokens: 1024", ""))
    second.write_text(more)
    path, work = scaling.from_config([str(first), str(second)])
    found = (work.prompt_tokens, work.sampled_tokens, work.result_tokens)
    found += (work.longest_sampled_tokens, work.longest_tool_seconds)
    assert found == pytest.approx(expected)
    seconds = cost_model.seconds(scaling.shape_of(path), work, NODE, 8)
    assert seconds.rollout < 10 or work.longest_tool_seconds


@pytest.mark.parametrize(("offload", "on_gpu"), [("False", True), ("True", False)])
def test_a_reference_in_host_memory_is_not_counted(offload, on_gpu):
    flags = ["--data.train", "x", "--loss.kl_coefficient", "0.1", "--loss.offload_reference", offload]
    assert scaling.from_config(flags)[1].reference == on_gpu


SFT = [f"{ROOT}/configs/{name}.yaml" for name in ("qwen2.5_7b", "sft")]


def test_a_step_of_sft_takes_what_its_tokens_take():
    """7B on eight H100: 1.3 x 16 x 2,000 / 8 = 5,200 tokens on the slowest GPU. Four passes (one is the recomputation)
    of 2 x 7.07e9 FLOPs a token for matrices and 4 x 28 x 3,584 x 1,000 for attention."""
    path, work, num_steps = scaling.sft_from_config(SFT, 0)
    assert num_steps == 3 * 54_000 // 16
    shape = scaling.shape_of(path)
    step, exposed = cost_model.sft_seconds(shape, work, NODE, 8)
    flops = 4 * 5200 * (2 * (7_615_616_512 - 152_064 * 3584) + 4 * 28 * 3584 * 1000)
    optimizer = 7 * 4 * 7_615_616_512 / 8 / 3.35e12
    assert step - exposed == pytest.approx(flops / (NODE.train_share * 989e12) + optimizer, rel=1e-6)
    assert 0 < exposed < 0.1 * step
    longer = replace(work, conversation_tokens=4000)
    assert 1.9 < cost_model.sft_seconds(shape, longer, NODE, 8)[0] / step < 2.1
    assert cost_model.sft_seconds(shape, work, NODE, 16)[0] < step


def test_the_table_of_sft_has_hours_where_the_number_of_steps_is_known(capsys, tmp_path):
    """It was refused: "unknown key 'data.num_conversations_per_step'", as if it were a typo."""
    own = tmp_path / "my_sft.yaml"
    own.write_text(
        "data: {train: my.jsonl, num_conversations_per_step: 8}\nmodel: {lora_rank: 32}\nrun: {num_epochs: 2}"
    )
    argv = ["--model", "Qwen2.5-1.5B", "--hardware", "1xRTX4090-24GB", "--nodes", "1", "--config", str(own)]
    scaling.main(argv)
    assert "| ? | ? |" in (said := capsys.readouterr().out) and "pass --conversations N" in said
    scaling.main(["--conversations", "400", *argv])
    line = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert line[:3] == ["| Qwen2.5-1.5B", "1", "8"] and line[5] == "100"  # 2 epochs x 400 / 8
    step, hours = float(line[4].split()[0]), float(line[6].split()[0])
    assert hours == pytest.approx(100 * step / 3600, abs=0.06)
    with pytest.raises(SystemExit, match=r"warning: .*sft\.yaml does not fit on 1xRTX4090-24GB"):
        scaling.main(["--hardware", "1xRTX4090-24GB", "--nodes", "1", "--config", *SFT])


def test_a_key_of_sft_in_other_files_is_refused_as_train_rl_does(tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text("data: {train: my.jsonl, num_conversations_per_step: 8}\n")
    with pytest.raises(UserError, match=r"mine\.yaml: unknown key 'data\.num_conversations_per_step'.*for SFT name it"):
        scaling.from_config([str(own)])
