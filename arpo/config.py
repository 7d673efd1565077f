"""From YAML file and flags to a frozen config; bad input becomes one line and exit code 2.

Precedence: default < YAML < flag. The YAML is turned into flags, and tyro parses those; so the two are checked alike.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TypeVar, get_type_hints

from arpo.errors import UserError, exit_with

C = TypeVar("C")


def load_config(root: type[C], argv: list[str] | None = None) -> C:
    """`[config.yaml] [--section.field value ...]` -> a checked `root` instance. Raises UserError."""
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)
    yaml_path = argv.pop(0) if argv and not argv[0].startswith("-") else None
    where = " and ".join(filter(None, (yaml_path, "command line" if argv or not yaml_path else "")))
    known = field_names(root)
    flags = yaml_flags(Path(yaml_path), known) if yaml_path else []
    for token in argv:
        if match := re.match(r"--([^=]+)", token):
            check_known(match[1].replace("-", "_"), known, where="command line")
    captured = io.StringIO()
    wants_help = any(token in ("-h", "--help") for token in argv)
    try:
        with contextlib.nullcontext() if wants_help else contextlib.redirect_stderr(captured):
            return tyro.cli(root, args=flags + argv, config=(tyro.conf.FlagConversionOff,), prog=Path(sys.argv[0]).name)
    except SystemExit as stop:
        if wants_help or not stop.code:
            raise
        raise UserError(f"{where}: {one_line(captured.getvalue())}") from None
    except ValueError as error:  # raised by a config's own __post_init__: a combination that cannot work
        raise UserError(f"{where}: {error}") from None


def load_or_exit(root: type[C]) -> C:
    """`load_config` of the command line; scripts call it before they import torch, so that mistakes show at once."""
    try:
        return load_config(root)
    except UserError as error:
        exit_with(error)


def run_or_exit(main: Callable[[C], None], config: C) -> None:
    """Run a script's main; bad input found on the way ends it with the one line and code 2."""
    try:
        main(config)
    except UserError as error:
        exit_with(error)


def one_line(tyro_box: str) -> str:
    """tyro explains itself in a drawn box of several lines; keep the words of it."""
    text = re.sub(r"\s+", " ", re.sub(r"[^\x20-\x7e]|-{9,}", " ", tyro_box))
    text = re.sub(r"^ ?(Parsing|Value) error |^ ?(Invalid choice|Missing argument) |Error parsing \w+: ", "", text)
    return re.sub(r" (Argument helptext: .*)?For full helptext, .*", "; see --help", text).strip()


def field_names(root: type, prefix: str = "") -> dict[str, bool]:
    """All keys as dotted paths -> is it a section. {"branching": True, "branching.base": False, ...}"""
    names: dict[str, bool] = {}
    hints = get_type_hints(root)
    for f in fields(root):
        section = is_dataclass(hints[f.name])
        names[prefix + f.name] = section
        if section:
            names |= field_names(hints[f.name], f"{prefix}{f.name}.")
    return names


def check_known(key: str, known: dict[str, bool], where: str) -> None:
    if key in known or key in ("help", "h"):
        return
    leaf = key.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6) or [
        k for k in known if k.rsplit(".", 1)[-1] == leaf and not known[k]
    ]
    hint = f"did you mean {close[0]!r}?" if close else "see --help for all keys"
    raise UserError(f"{where}: unknown key {key!r}; {hint}")


def yaml_flags(path: Path, known: dict[str, bool]) -> list[str]:
    """Nested YAML -> ["--section.field", "value", ...]; checks every key.

    A top-level `base: other.yaml` (relative to the file) is read first, and what this file says overrides it.
    """
    import yaml

    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise UserError(f"{path}: cannot read the config file ({error.strerror}); check the path") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must be a mapping of sections, not a {type(tree).__name__}")
    base = tree.pop("base", None)
    flags = yaml_flags(path.parent / base, known) if base else []

    def walk(node: dict, prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            check_known(key, known, where=str(path))
            if known[key] != isinstance(value, dict):
                need = "a mapping (it is a section)" if known[key] else "a value, not a mapping"
                raise UserError(f"{path}: {key} must be {need}")
            if isinstance(value, dict):
                walk(value, f"{key}.")
            elif isinstance(value, list):
                flags.extend([f"--{key}", *map(str, value)])
            else:
                flags.extend([f"--{key}", str(value)])

    walk(tree, "")
    return flags


def save_config(config: object, path: Path) -> None:
    """Write the resolved config as YAML that `load_config` reads back."""
    import yaml

    def plain(node: object) -> object:
        if isinstance(node, dict):
            return {k: plain(v) for k, v in node.items()}
        return [plain(v) for v in node] if isinstance(node, list | tuple) else node

    path.write_text(yaml.safe_dump(plain(asdict(config)), sort_keys=False))
