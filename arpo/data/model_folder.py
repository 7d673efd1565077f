"""Checks that a model folder is complete, without torch, and before any of it is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from arpo.config.bounded import parse_json, read_file
from arpo.data.hub import model_folder
from arpo.errors import UserError

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
"""How transformers names the weight files of a model with several."""


def check_model_folder(path: str, *, max_model_len: int = 0, option: str = "model.path") -> None:
    """Raise UserError if the folder lacks config.json, weights, tokenizer, chat template, or `max_model_len` positions.

    The message begins with `option`, which set the path. A path that is no folder, and does not look like one, is a
    name on the Hub, and is not checked.
    """
    folder = Path(path)
    if not folder.is_dir():
        looks_local = folder.is_absolute() or path.startswith((".", "runs/")) or path.count("/") != 1
        if looks_local or folder.parent.is_dir():
            raise UserError(f"{option}={path}: no such folder; train or download the model first")
        return
    config = read_json(option, folder, "config.json", "it must be a Hugging Face model folder")
    weight_files(path, option=option)
    tokenizer = read_json(option, folder, "tokenizer_config.json", "save the tokenizer into the folder")
    if "chat_template" not in tokenizer and not (folder / "chat_template.jinja").exists():
        raise UserError(f"{option}={path}: the tokenizer has no chat template; add chat_template.jinja")
    for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"):
        if (folder / name).exists():
            # transformers would fail with a traceback; for generation_config.json only after the run, at the export
            read_json(option, folder, name, "copy it again, or remove it")
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    if positions and max_model_len > positions:
        raise UserError(
            f"{option}={path}: max_prompt_tokens + rollout.max_response_tokens = {max_model_len} exceeds the "
            f"model's max_position_embeddings = {positions}; lower one of them"
        )


def weight_files(path: str, *, option: str = "model.path") -> list[Path]:
    """Return the safetensors files with the weights of a model folder, or of a model's name on the Hub.

    These are the files of the index, or model.safetensors, or else all safetensors files of the folder. Raises
    UserError if they are missing, or if the index does not list an existing model.safetensors: one of the two is then
    an older copy.
    """
    folder = model_folder(path, option=option)
    single_file = folder / "model.safetensors"
    index = folder / INDEX
    if index.exists():
        listed = read_json(option, folder, INDEX, "copy it again").get("weight_map")
        names = sorted(set(map(str, listed.values() if isinstance(listed, dict) else ["weight_map"])))
        if absent := [name for name in names if "/" in name or not (folder / name).is_file()]:
            raise UserError(f"{option}={path}: {absent[0]} is missing ({len(absent)} of its weight files are)")
        if single_file.exists() and single_file.name not in names:
            raise UserError(
                f"{option}={path}: has model.safetensors, and an index of other files ({names[0]}): which one is the "
                f"model? Move the older of {single_file.name} and {INDEX} out of the folder"
            )
        return [folder / name for name in names]
    if single_file.exists():
        # As in transformers. Other files beside it may be adapters, old copies, or Mistral's format.
        return [single_file]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        fix = "was the model saved completely? (pytorch_model*.bin: save_pretrained it again with transformers)"
        raise UserError(f"{option}={path}: no weights (*.safetensors); {fix}")
    return [file for file in files if SHARD.fullmatch(file.name)] or files


def read_json(option: str, folder: Path, name: str, fix: str) -> dict:
    """Return a JSON object of the model folder. Raises UserError if the file is missing or broken."""
    try:
        value = parse_json(read_file(folder / name))
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__} in place of an object")
        return value
    except FileNotFoundError:
        raise UserError(f"{option}={folder}: no {name}; {fix}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{option}={folder}: {name} is not valid JSON ({error}); {fix}") from None
