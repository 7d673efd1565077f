"""Fetches data sets and models of the Hub before a run, and pins each to a commit. So the whole run uses the same
files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from arpo.data.hub import hub_name, model_folder, pin
from arpo.data.model_folder import check_model_folder
from arpo.log.settings import begun_settings

C = TypeVar("C")
MODELS = ("model.path", "critic.path", "loss.reference")
"""Options that name a model."""


def pin_config(cfg: C) -> C:
    """Fetch all data sets of the Hub, and return the config with their names pinned to a commit. Raises UserError.

    A resumed run keeps the commit of its first start, unless the name has a revision.
    """
    begun = begun_settings(Path(cfg.run.dir) / cfg.run.name)
    for name in ("train", "valid"):
        file = getattr(getattr(cfg, "data", None), name, "")
        if file:
            pinned = pin(f"data.{name}", file, [str(begun.get(f"data.{name}", ""))])
            cfg = replace(cfg, data=replace(cfg.data, **{name: pinned}))
    if hasattr(cfg, "eval"):
        # Files may have been added or moved, so each one is looked up among all.
        before = [str(file) for file in begun.get("eval.files") or ()]
        files = tuple(pin("eval.files", file, before) for file in cfg.eval.files)
        cfg = replace(cfg, eval=replace(cfg.eval, files=files))
    return cfg


def pin_models(cfg: C) -> C:
    """Fetch all models of the Hub, and return the config with their folders in the cache. Raises UserError.

    So trainer, engine and export use the same commit. A resumed run keeps the commit of its first start. If an earlier
    version of the code recorded a model's name, the run keeps the name.
    """
    evaluation = getattr(cfg, "eval", None)
    begun = begun_settings(Path(cfg.run.dir) / cfg.run.name)
    if evaluation and evaluation.regrade:
        return cfg
    for option in MODELS:
        section, field = option.split(".")
        name = getattr(getattr(cfg, section, None), field, "")
        before = str(begun.get(option, ""))
        if not name or Path(name).is_dir():
            continue
        folder = model_folder(name, option=option, previous=before, weights=not (evaluation and evaluation.server))
        check_model_folder(str(folder), max_model_len=getattr(cfg, "max_model_len", 0), option=option)
        if os.environ.get("RANK", "0") == "0":
            print(f"{option}: {hub_name(str(folder))}, in {folder}", flush=True)
        if before != name:
            cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{field: str(folder)})})
    return cfg
