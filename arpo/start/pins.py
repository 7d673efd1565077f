"""Data sets and models of the Hub, fetched before a run and pinned to a commit, so that all of the run has the same."""

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
    """Return a script's config with all data sets of the Hub fetched, and their names pinned. Raises UserError.

    A run that was begun goes on with the commit that it was begun with, unless the name has a revision.
    """
    begun = begun_settings(Path(cfg.run.dir) / cfg.run.name)
    for name in ("train", "valid"):
        if file := getattr(getattr(cfg, "data", None), name, ""):
            pinned = pin(f"data.{name}", file, str(begun.get(f"data.{name}", "")))
            cfg = replace(cfg, data=replace(cfg.data, **{name: pinned}))
    if hasattr(cfg, "eval"):
        files = tuple(pin("eval.files", file) for file in cfg.eval.files)
        cfg = replace(cfg, eval=replace(cfg.eval, files=files))
    return cfg


def pin_models(cfg: C) -> C:
    """Return a script's config with the folder in the cache for each model of the Hub, so that trainer, engine and
    export have one commit. Raises UserError.

    A run that was begun goes on with its commit. Its name alone is kept where an earlier version recorded that.
    """
    evaluation, begun = getattr(cfg, "eval", None), begun_settings(Path(cfg.run.dir) / cfg.run.name)
    if evaluation and evaluation.regrade:
        return cfg
    for option in MODELS:
        section, field = option.split(".")
        name, before = getattr(getattr(cfg, section, None), field, ""), str(begun.get(option, ""))
        if not name or Path(name).is_dir():
            continue
        folder = model_folder(name, option=option, previous=before, weights=not (evaluation and evaluation.server))
        check_model_folder(str(folder), max_model_len=getattr(cfg, "max_model_len", 0), option=option)
        if os.environ.get("RANK", "0") == "0":
            print(f"{option}: {hub_name(str(folder))}, in {folder}", flush=True)
        if before != name:
            cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{field: str(folder)})})
    return cfg
