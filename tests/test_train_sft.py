"""train_sft.main on real ranks: the loss falls, results stay untrained, a resumed run is the undisturbed one."""

import re
import shutil
from pathlib import Path

import pytest
from helpers.ranks import run_script, try_script
from helpers.sft_world import build_sft_world
from transformers import AutoModelForCausalLM

from arpo.log import read_metrics
from extras.card import card_of


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return build_sft_world(tmp_path_factory.mktemp("sft"))


def train(world: Path, *flags: str, ranks: int = 2) -> str:
    """What the run prints."""
    return run_script("train_sft.py", str(world / "config.yaml"), *flags, ranks=ranks)


@pytest.fixture(scope="module")
def trained(world) -> Path:
    train(world)
    return world / "runs" / "sft"


def test_the_loss_falls_on_training_and_validation_conversations(trained):
    rows = read_metrics(trained)
    losses = [row["loss/nll"] for row in rows if row["step"] > 0]
    assert len(losses) == 12 and losses[-1] < 0.6 * losses[0]
    valid = [row["valid/nll"] for row in rows if "valid/nll" in row]
    assert len(valid) == 3 and valid[-1] < 0.7 * valid[0]


def test_the_run_leaves_a_model_that_loads(trained):
    model = AutoModelForCausalLM.from_pretrained(trained / "hf")
    assert "by supervised fine-tuning with tool calls, 12 steps" in card_of((trained / "hf").resolve().parent)
    assert model.config.num_hidden_layers == 2


def test_the_first_line_of_the_metrics_says_what_the_data_is(trained):
    start = read_metrics(trained)[0]
    assert start["step"] == 0 and start["data/conversations"] == 24 and start["data/tokens"] > 24 * 20
    assert start["data/dropped"] == 0


@pytest.mark.parametrize(
    "name, ranks, flags", [("alone", 1, ["--run.save_every", "0"]), ("spread", 2, ["--model.context_parallel", "2"])]
)
def test_one_rank_and_two_that_share_each_row_learn_what_two_ranks_learn(trained, world, name, ranks, flags):
    train(world, "--run.name", name, "--run.num_steps", "4", *flags, ranks=ranks)
    for a, b in zip(read_metrics(world / "runs" / name)[1:], read_metrics(trained)[1:5], strict=True):
        assert a["loss/nll"] == pytest.approx(b["loss/nll"], rel=1e-4)
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-3)


def test_adapters_learn_too(world):
    train(world, "--run.name", "lora", "--model.lora_rank", "8", "--run.save_every", "0")
    losses = [row["loss/nll"] for row in read_metrics(world / "runs" / "lora") if row["step"] > 0]
    assert losses[-1] < 0.8 * losses[0], losses


def test_an_interrupted_run_continues_bit_for_bit(trained, world):
    """Its newest checkpoint is half-written, as by a kill: it goes on from the one before and ends the same."""
    shutil.copytree(trained, world / "runs" / "again", symlinks=True)
    folder = world / "runs" / "again" / "checkpoints"
    newest = folder / "step_000012" / "manifest.json"
    newest.write_text(newest.read_text()[:50])  # as if killed while writing
    output = train(world, "--run.name", "again")
    assert "from step 8" in output and "tokenising" not in output, output
    first = output.splitlines()[0]
    assert re.fullmatch(r"2 ranks on the CPU \(1 thread each\), torch \d.*, attention: sdpa", first), output
    for a, b in zip(read_metrics(trained), read_metrics(world / "runs" / "again"), strict=True):
        assert {k: v for k, v in a.items() if k.startswith(("loss", "optim", "valid"))} == {
            k: v for k, v in b.items() if k.startswith(("loss", "optim", "valid"))
        }


def test_a_run_that_goes_on_with_larger_steps_leaves_no_conversation_out(world):
    """The place came from the steps done, times the new size: allenai/OLMo PR 182."""
    uneven = [line.replace(" + 1?", " + 1?" * n) for n, line in enumerate((world / "train.jsonl").open(), start=1)]
    (world / "uneven.jsonl").write_text("".join(uneven))
    flags = ["--run.name", "larger", "--run.validate_every", "0", "--data.train", str(world / "uneven.jsonl")]
    train(world, *flags, "--data.num_conversations_per_step", "4", "--run.num_steps", "3", ranks=1)
    train(world, *flags, "--run.num_steps", "5", "--run.resume_changed", "True", ranks=1)  # of 6 conversations each
    start, *rows = read_metrics(world / "runs" / "larger")
    assert sum(row["tokens/trained"] for row in rows) == start["data/tokens"]  # 3 * 4 + 2 * 6 = 24 conversations


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--data.train", "nowhere.jsonl"], r"nowhere\.jsonl"),
        (
            ["--data.num_conversations_per_step", "25"],
            r"24 usable rows .* data\.num_conversations_per_step=25",
        ),
        (["--data.max_tokens", "20"], r"train\.jsonl: no conversation has at most data\.max_tokens=20 "),
        (["--data.max_tokens", "300"], r"max_tokens_per_microbatch=256 cannot hold .*data\.max_tokens=300"),
        (["--model.path", "/nonexistent"], r"model\.path=/nonexistent: no such folder"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(world, flags, message):
    done = try_script("train_sft.py", str(world / "config.yaml"), "--run.name", "bad", *flags, ranks=1)
    errors = done.output[done.output.index("error: ") :]
    assert done.code == 2 and errors.count("\n") == 1 and re.match(f"error: .*{message}", errors), done.output
