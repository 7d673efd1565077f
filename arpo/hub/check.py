"""Reading a fetched file with the readers of training, to say what a run would find in it."""

from __future__ import annotations

import json
from pathlib import Path

from arpo.data import load_prompts, read_rows
from arpo.errors import UserError
from arpo.sft.conversations import read_conversations


def describe_data(path: Path) -> str:
    """Return what is in a file of questions or conversations. Raises UserError where training could not use it."""
    _, row = next(read_rows(path), (None, None))
    if row is None:
        raise UserError(f"{path}: the file has no rows; was the download interrupted?")
    if row.get("conversations") or row.get("messages"):
        num_turns = [len(messages) for _, messages in read_conversations(path)]
        return f"{len(num_turns):,} conversations of {sum(num_turns) / len(num_turns):.1f} messages, all usable"
    prompts, num_rows = load_prompts(path), sum(1 for _ in read_rows(path))
    return f"{len(prompts):,} usable questions of {num_rows:,} rows"


def describe_model(folder: Path) -> str:
    """Return what kind of model a folder has. Raises UserError where a file that it names is absent."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no readable config.json ({error}); is it a model?") from None
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    else:
        files = {*folder.glob("*.safetensors")}
    absent = sorted(file.name for file in files if not file.exists())
    if absent or not files:
        raise UserError(f"{folder}: {absent[0] if absent else '*.safetensors'} is missing; fetch it again")
    size = sum(file.stat().st_size for file in files)
    return f"{config.get('model_type', 'unknown')}, {len(files)} weight files, {size / 1e9:.1f} GB"
