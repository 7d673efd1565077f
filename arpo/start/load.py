"""Reads YAML files and flags into a frozen config; bad input becomes one line and exit code 2.

Precedence: default < first YAML < later YAML < flag. YAMLs are turned into flags, which tyro parses and checks alike.
"""

from __future__ import annotations

import codecs
import json
import locale
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from arpo.config.bounded import Written, read_yaml
from arpo.config.exits import check_launch, exit_interrupted, exit_with
from arpo.config.facts import Ignored, ignored, out_of_range
from arpo.config.flags import parse
from arpo.config.foreign import OURS
from arpo.config.keys import Kind, check_known, field_names
from arpo.errors import PrintableRecord, UserError
from arpo.start.file_order import overridden_recipes, swap_hint
from arpo.start.pins import pin_config, pin_models

logger = logging.getLogger(__name__)
C, T = TypeVar("C"), TypeVar("T")
COMMAND_LINE = "command line"
ALSO = "\n  also: "
"""What stands between the mistakes of a message."""
SCRIPTS = ("train_sft", "train_rl", "evaluate")
"""A YAML's top-level mapping of such a name is read by that script only; a root config has its name as SCRIPT."""


@dataclass(frozen=True)
class Setting:
    """The value that one file, or the command line, gives to one key."""

    values: list[str]
    where: str
    """The file, or COMMAND_LINE."""
    level: int
    """0 for the first file; the higher one wins."""


def load_config(root: type[C], argv: list[str] | None = None) -> C:
    """Return a checked `root` of `[a.yaml b.yaml ...] [--section.field value ...]`. Raises UserError.

    Without run.name, the run is called after the files: configs/qwen3_8b.yaml configs/aepo.yaml -> qwen3_8b-aepo.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    paths: list[Path] = []
    while argv and not argv[0].startswith("-") and "=" not in argv[0]:
        paths.append(Path(argv.pop(0)))
    if any(token in ("-h", "--help") for token in argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback
        return parse(root, ["--help"])  # which prints the help and exits
    known = field_names(root)
    settings: dict[str, Setting] = {}
    if paths and "run.name" in known:
        settings["run.name"] = Setting(["-".join(path.stem for path in paths)], str(paths[0]), -1)
    files = [(str(path), yaml_settings(path, known, getattr(root, "SCRIPT", ""))) for path in paths]
    for level, (path, found) in enumerate(files):
        settings |= {key: Setting(values, path, level) for key, values in found.items()}
    if os.environ.get("RANK", "0") == "0":
        for warning in overridden_recipes(files):
            logger.warning(warning)
    settings |= {key: Setting(values, COMMAND_LINE, len(paths)) for key, values in flag_settings(argv, known).items()}
    where = " and ".join([*map(str, paths), *([COMMAND_LINE] if argv or not paths else [])])
    return resolve(root, settings, where)


def resolve(root: type[C], settings: dict[str, Setting], where: str) -> C:
    """Return the config of the settings, without those whose effect a later file or flag has switched off.

    selector=none in an algorithm's file after num_initial_rollouts=6 in a model's file drops the 6. Raises UserError
    where both stand at the same level, or in the other order.
    """
    check_entries(settings)
    settings, levels = dict(settings), {key: setting.level for key, setting in settings.items()}
    while True:
        try:
            cfg = parse(root, [token for key, s in settings.items() for token in _tokens(key, s.values)])
        except ValueError as error:  # of tyro or a __post_init__
            raise UserError(f"{where}: {error}") from None
        except ExceptionGroup as several:  # from raise_all()
            raise UserError(f"{where}: " + ALSO.join(map(str, several.exceptions))) from None
        if wrong := out_of_range(cfg):
            raise UserError(f"{where}: {wrong}")
        useless = ignored(cfg)
        if not useless:
            return cfg
        overruled = [one for one in useless if levels.get(one.owner, -1) > levels[one.knob]]
        if not overruled:
            raise UserError(ALSO.join(no_effect(one, settings) for one in useless))
        for one in overruled:
            settings.pop(one.knob, None)
            levels[one.knob] = levels[one.owner]


def no_effect(useless: Ignored, settings: dict[str, Setting]) -> str:
    """Return the message for a setting without effect; with a hint, if it is in a file behind the one that says so."""
    on, off = settings[useless.knob], settings.get(useless.owner)
    hint = swap_hint(off.where, on.where) if off and 0 <= off.level < on.level and on.where != COMMAND_LINE else ""
    return f"{on.where}: {useless.message}{hint}"


def _tokens(key: str, values: list[str]) -> list[str]:
    """Return a setting as tyro takes it. The form --key=value is for values that begin with a dash."""
    return [f"--{key}={values[0]}"] if len(values) == 1 else [f"--{key}", *values]


def check_entries(settings: dict[str, Setting]) -> None:
    """Raise UserError for a list of several entries with one that begins with a dash and is no number: tyro would read
    it as a flag, so that a file's list could set another key, or print the help."""
    for key, setting in settings.items():
        for entry in setting.values if len(setting.values) > 1 else []:
            if re.match(r"-(?![\d.])", entry):
                raise UserError(
                    f"{setting.where}: {key} has the entry {entry!r}, which begins with a dash: among other entries it "
                    f"would be read as a flag; write a file as ./{entry}"
                )


def load_or_exit(root: type[C], check: Callable[[C], None] = lambda cfg: None) -> C:
    """Return the command line's config after `check`, with data sets and models of the Hub fetched and pinned to a
    commit.

    One thread per rank: OpenMP's barriers collapse as soon as anything else runs on the machine.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a job in the background ignores it
        signal.signal(signal.SIGINT, exit_interrupted)
    logging.setLogRecordFactory(PrintableRecord)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_or_exit(check_launch, os.environ)
    run_or_exit(check_encoding, locale.getpreferredencoding(False))
    cfg = run_or_exit(pin_config, run_or_exit(load_config, root))
    run_or_exit(check, cfg)
    return run_or_exit(pin_models, cfg)


def check_encoding(name: str) -> None:
    """Raise UserError unless files are read as UTF-8. Else torch's compiler fails on a file of its own, and where it
    is tried again it says "duplicate template name" (seen in torch 2.13)."""
    if codecs.lookup(name).name != "utf-8":
        raise UserError(f"Python reads files as {name} here, and torch's are UTF-8; set PYTHONUTF8=1")


def run_or_exit(function: Callable[[T], C], argument: T) -> C:
    """Call a script's main, for one; bad input ends it with the one line and code 2."""
    try:
        return function(argument)
    except UserError as error:
        exit_with(error)
    except KeyboardInterrupt:  # of a checkpoint that another rank's Ctrl-C has broken off
        exit_interrupted(signal.SIGINT, None)


def flag_settings(argv: list[str], known: dict[str, Kind]) -> dict[str, list[str]]:
    """Parse flags. ["--run.seed", "3", "--tools.names", "a", "b"] -> {"run.seed": ["3"], "tools.names": ["a", "b"]}"""
    found: dict[str, list[str]] = {}
    key = None
    for token in argv:
        if match := re.fullmatch(r"--([^=]+)(?:=(.*))?", token, re.DOTALL):
            if key and not found[key] and re.search(r"\s", match[1]):
                raise UserError(f"{COMMAND_LINE}: a value that begins with -- is written --{key}='{token}'")
            key = match[1].replace("-", "_")
            check_known(key, known, where=COMMAND_LINE)
            if known[key] == "section":
                raise UserError(f"{COMMAND_LINE}: --{key} is a section; set one of its fields, see --help")
            found[key] = [] if match[2] is None else [_flag_of(match[2])]
        elif (dotted := re.fullmatch(r"\+*(\w+\.[\w.]+)=.*", token)) and (
            dotted[1] in known or dotted[1].rsplit(".", 1)[-1] in OURS
        ):  # as verl's flags are written
            check_known(dotted[1], known, where=COMMAND_LINE)
            raise UserError(f"{COMMAND_LINE}: {token!r} is not of the form --section.field value; put -- before it")
        elif key is None:
            raise UserError(f"{COMMAND_LINE}: {token!r} is not of the form --section.field value; see --help")
        else:
            found[key].append(_flag_of(token))
    return found


def yaml_settings(path: Path, known: dict[str, Kind], script: str) -> dict[str, list[str]]:
    """Read nested YAML as {"section.field": [value, ...]}, every key checked.

    Keys under the script's own name override the rest of the file; those under another script's are skipped.
    """
    try:
        tree = read_yaml(path, as_written=True) or {}
    except OSError as error:
        raise UserError(f"{path}: cannot read the config file ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: the config file is not UTF-8; save it as that") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must be a mapping of sections, not {_flag_of(tree)[:60]!r}")
    if (writer := tree.pop("script", script)) != script:
        raise UserError(f"{path}: the settings of a run of {writer}.py, and this is {script}.py")
    tree.pop("contents", None)  # digests of the files that the run was begun with
    own = {name: tree.pop(name) for name in SCRIPTS if name in tree}.get(script) or {}
    if not isinstance(own, dict):
        raise UserError(f"{path}: {script} must be a mapping of sections, not {_flag_of(own)[:60]!r}")
    found: dict[str, list[str]] = {}

    def walk(node: dict, prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            check_known(key, known, where=str(path))
            if (known[key] == "section") != isinstance(value, dict):
                need = "a mapping (it is a section)" if known[key] == "section" else "a value, not a mapping"
                raise UserError(f"{path}: {key} must be {need}")
            if isinstance(value, Written) and known[key] == "flag" and isinstance(value.value, bool):
                value = str(value.value)  # of a knob that is on or off: True for yes and on too
            if isinstance(value, list) and known[key] != "list":
                raise UserError(f"{path}: {key} must be one value, not the list {value}")
            if value is None and known[key] != "optional":
                raise UserError(f'{path}: {key} has no value; give it one ("" for an empty text), or drop the line')
            if isinstance(value, dict):
                walk(value, f"{key}.")
            else:
                found[key] = [_flag_of(entry) for entry in (value if isinstance(value, list) else [value])]

    walk(tree, "")
    walk(own, "")
    return found


def _flag_of(entry: Any) -> str:
    """Return a value, or a list's entry, as a flag has it: a mapping as JSON, ~ as the shell reads it."""
    if isinstance(entry, Written):
        is_special = isinstance(entry.value, float) and not isfinite(entry.value)  # YAML's .inf and .nan
        return str(entry.value) if is_special else entry.text
    text = json.dumps(_meant(entry)) if isinstance(entry, dict) else str(entry)
    return os.path.expanduser(text) if re.match("~(/|$)", text) else text


def _meant(tree: Any) -> Any:
    """Return a tree of YAML as that of JSON: only true, false and decimal numbers are more than texts."""
    if isinstance(tree, dict):
        return {_flag_of(name): _meant(one) for name, one in tree.items()}
    if isinstance(tree, list):
        return [_meant(one) for one in tree]
    if not isinstance(tree, Written):
        return tree
    if re.fullmatch("true|false", tree.text, re.IGNORECASE):
        return tree.value
    return tree.value if re.fullmatch(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?", tree.text) else tree.text
