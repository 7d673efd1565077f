"""What training does not change is exported byte by byte, so whoever can load the source can load the export."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.families import TEMPLATES
from helpers.models import build_tiny_model, build_tiny_tokenizer
from safetensors.torch import load_file

from arpo.checkpoint.export import why_no_end, write_hf
from arpo.model import load_tokenizer

GENERATION = {  # report: a generation_config.json that transformers 5 reads and refuses to write, but for the last two
    "vicuna-7b-v1.5 (LLaVA#1144)": {"temperature": 0.9, "top_p": 0.6},
    "Llama-2-chat (transformers#29988)": {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "max_length": 4096},
    "Qwen3-ASR#210": {"do_sample": False, "temperature": 1e-06},
    "top_k without sampling (ms-swift#1943)": {"do_sample": False, "top_k": 1, "temperature": 0.0},
    "beams (LlamaFactory#2479's kind)": {"early_stopping": True, "num_beams": 1, "length_penalty": 0.5},
    "old conversions of LLaMA (G.O.D#1271)": {"pad_token_id": -1},
    "keys of no version": {"my_own": {"a": [1, None]}},
    "one that is right (Qwen2.5)": {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05},
}
OLD = """
import sys, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
assert transformers.__version__.startswith("4.57"), transformers.__version__
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1? <think>"}], return_tensors="pt")
    print(ids[0].tolist(), model(ids).logits.double().sum().item())
"""


def export(model: Path, out: Path) -> Path:
    write_hf(iter(load_file(model / "model.safetensors").items()), out, str(model))
    return out


@pytest.mark.parametrize("report", GENERATION)
def test_a_generation_config_is_exported_as_it_is(report, tmp_path):
    model = build_tiny_model(tmp_path / "model")
    text = json.dumps({"eos_token_id": 298} | GENERATION[report], indent=3)
    (model / "generation_config.json").write_text(text)
    assert (export(model, tmp_path / "hf") / "generation_config.json").read_text() == text


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(("ends", "is_named"), [(0, True), ([0], True), ([0, 298], False), (298, False), (None, False)])
def test_an_export_that_would_not_stop_at_its_end_token_is_named_before_the_run(file, ends, is_named, tmp_path):
    """A base model with a chat template and <|im_end|> as eos_token keeps <|endoftext|> as the end in its
    generation_config.json: LLaMA-Factory 7454 and 10834, open-r1 663, ms-swift 3113."""
    model = build_tiny_model(tmp_path / "model", weights=False)
    if file == "config.json":
        (model / "generation_config.json").unlink()
    (model / file).write_text(json.dumps({"eos_token_id": ends}))
    warning = why_no_end(str(model), build_tiny_tokenizer())
    named = f"warning: {model / file}: eos_token_id is {ends}, but an answer ends with <|im_end|>, which is 298: "
    assert warning.startswith(named) if is_named else warning == ""


def test_an_export_has_all_that_is_no_weight_unchanged_and_nothing_else(tmp_path):
    model = build_tiny_model(tmp_path / "model")
    kept = {
        "merges.txt": "#version: 0.2\n", "vocab.json": "{}", "tokenizer.model": "\0sp", "special_tokens_map.json": "{}",
        "added_tokens.json": "{}", "chat_template.jinja": "{# of mine #}", "LICENSE": "mine",
        "qwen.tiktoken": "YQ== 0\n",
        "additional_chat_templates/tool_use.jinja": "{# two #}", "preprocessor_config.json": "{}",
    }  # fmt: skip
    dropped = ["README.md", "training_args.bin", "trainer_state.json", "own.py", "adapter_config.json", "optimizer.pt"]
    (model / "additional_chat_templates").mkdir()
    for name, text in kept.items() | {(name, "x") for name in dropped}:
        (model / name).write_text(text)
    os.mkfifo(model / "tokenizer.fifo.json")  # a stranger's: never opened
    hf = export(model, tmp_path / "hf")
    found = {str(file.relative_to(hf)): file.read_bytes() for file in hf.rglob("*") if file.is_file()}
    weights = {"model.safetensors": found.pop("model.safetensors")}
    names = {*kept, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert found == {name: (model / name).read_bytes() for name in names} and weights["model.safetensors"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformers_4_loads_an_export_whose_source_it_loads(tmp_path):
    """LlamaFactory#10310, ms-swift#8352, mlx-lm#661, marin-dna#558: what transformers 5 saves, 4 cannot read."""
    model = build_tiny_model(tmp_path / "model")
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_tokens(["<my_tag>"])
    tokenizer.save_pretrained(model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<|im_start|>"]}
    config.pop("extra_special_tokens", None)
    config.pop("backend", None)
    config["chat_template"] = (TEMPLATES / "qwen2_5.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    hf = export(model, tmp_path / "hf")
    old = tmp_path / "transformers4"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(old), "transformers==4.57.6"]
    installed = subprocess.run(pip, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"no package index here: {installed.stderr.splitlines()[-1]}")
    command = [sys.executable, "-c", OLD, str(model), str(hf)]
    environment = os.environ | {"PYTHONPATH": str(old), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    source, exported = done.stdout.splitlines()
    assert source == exported
