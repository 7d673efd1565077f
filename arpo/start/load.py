"""Reads YAML files and flags into a frozen config. Bad input becomes one line and exit code 2.

Precedence: default < first YAML < later YAML < flag. YAML settings become flags, so tyro parses and checks both alike.
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
C = TypeVar("C")
T = TypeVar("T")
COMMAND_LINE = "command line"
ALSO = "\n  also: "
"""Separates the errors of one message."""
SCRIPTS = ("train_sft", "train_rl", "evaluate")
"""Names of the scripts. A top-level mapping in a YAML with a script's name is read only by this script. A root config
has SCRIPT."""


@dataclass(frozen=True)
class Setting:
    """The value of one key in one file, or on the command line."""

    values: list[str]
    where: str
    """The file, or COMMAND_LINE."""
    level: int
    """0 for the first file. The higher level wins."""


def load_config(root: type[C], argv: list[str] | None = None) -> C:
    """Return the checked config of `[a.yaml b.yaml ...] [--section.field value ...]`. Raises UserError.

    Without run.name, the files name the run: configs/qwen3_8b.yaml configs/aepo.yaml -> qwen3_8b-aepo.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    paths: list[Path] = []
    while argv and not re.match(r"-|\+*[\w.]+=", argv[0]):  # "a.b=1" is a flag as verl writes them
        paths.append(Path(argv.pop(0)))
    if any(token in ("-h", "--help") for token in argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback
        return parse(root, ["--help"])  # which prints the help and exits
    kinds = field_names(root)
    settings: dict[str, Setting] = {}
    if paths and "run.name" in kinds:
        settings["run.name"] = Setting(["-".join(path.stem for path in paths)], str(paths[0]), -1)
    files = [(str(path), yaml_settings(path, kinds, getattr(root, "SCRIPT", ""))) for path in paths]
    for level, (path, values_by_key) in enumerate(files):
        settings |= {key: Setting(values, path, level) for key, values in values_by_key.items()}
    if os.environ.get("RANK", "0") == "0":
        for warning in overridden_recipes(files):
            logger.warning(warning)
    flags = flag_settings(argv, kinds)
    settings |= {key: Setting(values, COMMAND_LINE, len(paths)) for key, values in flags.items()}
    sources = [str(path) for path in paths]
    if argv or not paths:
        sources.append(COMMAND_LINE)
    where = " and ".join(sources)
    return resolve(root, settings, where)


def resolve(root: type[C], settings: dict[str, Setting], where: str) -> C:
    """Return the config of the settings. If a later file or flag makes a setting ineffective, the setting is dropped.

    Example: num_initial_rollouts=6 in a model's file, then selector=none in an algorithm's file: the 6 is dropped.
    Raises UserError if both settings are in one file, or in the other order.
    """
    check_entries(settings)
    settings = dict(settings)
    levels = {key: setting.level for key, setting in settings.items()}
    while True:
        try:
            flags = [flag for key, setting in settings.items() for flag in _as_flags(key, setting.values)]
            cfg = parse(root, flags)
        except ValueError as error:  # of tyro or a __post_init__
            raise UserError(f"{where}: {error}") from None
        except ExceptionGroup as several:  # from raise_all()
            raise UserError(f"{where}: " + ALSO.join(map(str, several.exceptions))) from None
        wrong = out_of_range(cfg)
        if wrong:
            raise UserError(f"{where}: {wrong}")
        useless = ignored(cfg)
        if not useless:
            return cfg
        overruled = [knob for knob in useless if levels.get(knob.owner, -1) > levels[knob.knob]]
        if not overruled:
            raise UserError(ALSO.join(no_effect(knob, settings) for knob in useless))
        for knob in overruled:
            settings.pop(knob.knob, None)
            # other knobs may need the one that was dropped: it counts as set by the file that switched it off
            levels[knob.knob] = levels[knob.owner]


def no_effect(useless: Ignored, settings: dict[str, Setting]) -> str:
    """Return the message for a setting without effect, with a hint if the two files stand in the wrong order."""
    on = settings[useless.knob]
    off = settings.get(useless.owner)
    hint = swap_hint(off.where, on.where) if off and 0 <= off.level < on.level and on.where != COMMAND_LINE else ""
    return f"{on.where}: {useless.message}{hint}"


def _as_flags(key: str, values: list[str]) -> list[str]:
    """Return a setting as flags. A single value is written --key=value, since the value may begin with a dash."""
    return [f"--{key}={values[0]}"] if len(values) == 1 else [f"--{key}", *values]


def check_entries(settings: dict[str, Setting]) -> None:
    """Raise UserError if an entry of a list of several entries begins with a dash and is no number.

    tyro would read the entry as a flag. A list in a file could then set another key, or print the help.
    """
    for key, setting in settings.items():
        for entry in setting.values if len(setting.values) > 1 else []:
            if re.match(r"-(?![\d.])", entry):
                raise UserError(
                    f"{setting.where}: {key} has the entry {entry!r}, which begins with a dash: among other entries it "
                    f"would be read as a flag; write a file as ./{entry}"
                )


def load_or_exit(root: type[C], check: Callable[[C], None] = lambda cfg: None) -> C:
    """Return the command line's config, checked by `check`. A mistake of the user ends the process with one line.

    Data sets and models of the Hub are fetched and pinned to a commit.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a job in the background ignores it
        signal.signal(signal.SIGINT, exit_interrupted)
    logging.setLogRecordFactory(PrintableRecord)
    # one thread per rank: OpenMP's barriers collapse as soon as anything else runs on the machine
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_or_exit(check_launch, os.environ)
    run_or_exit(check_encoding, locale.getpreferredencoding(False))
    cfg = run_or_exit(pin_config, run_or_exit(load_config, root))
    run_or_exit(check, cfg)
    return run_or_exit(pin_models, cfg)


def check_encoding(name: str) -> None:
    """Raise UserError unless Python reads files as UTF-8.

    Without UTF-8, torch's compiler cannot read one of torch's files. A second try then fails with "duplicate template
    name" (seen in torch 2.13).
    """
    if codecs.lookup(name).name != "utf-8":
        raise UserError(f"Python reads files as {name} here, and torch's are UTF-8; set PYTHONUTF8=1")


def run_or_exit(function: Callable[[T], C], argument: T) -> C:
    """Return the result of a function (a script's main, say). A UserError ends the process with one line."""
    try:
        return function(argument)
    except UserError as error:
        exit_with(error)
    except KeyboardInterrupt:  # raised in a checkpoint that another rank's Ctrl-C has broken off
        exit_interrupted(signal.SIGINT, None)


def flag_settings(argv: list[str], kinds: dict[str, Kind]) -> dict[str, list[str]]:
    """Parse flags. ["--run.seed", "3", "--tools.names", "a", "b"] -> {"run.seed": ["3"], "tools.names": ["a", "b"]}"""
    values: dict[str, list[str]] = {}
    key = None
    for token in argv:
        if match := re.fullmatch(r"--([^=]+)(?:=(.*))?", token, re.DOTALL):
            if key and not values[key] and re.search(r"\s", match[1]):
                raise UserError(f"{COMMAND_LINE}: a value that begins with -- is written --{key}='{token}'")
            key = match[1].replace("-", "_")
            check_known(key, kinds, where=COMMAND_LINE)
            if kinds[key] == "section":
                raise UserError(f"{COMMAND_LINE}: --{key} is a section; set one of its fields, see --help")
            if kinds[key] == "list" and key in values:
                raise UserError(f"{COMMAND_LINE}: --{key} stands there twice; give all entries after one of them")
            values[key] = [] if match[2] is None else [_flag_of(match[2])]
        elif (dotted := re.fullmatch(r"\+*(\w+\.[\w.]+)=.*", token)) and (
            dotted[1] in kinds or dotted[1].rsplit(".", 1)[-1] in OURS
        ):  # as verl's flags are written
            check_known(dotted[1], kinds, where=COMMAND_LINE)
            raise UserError(f"{COMMAND_LINE}: {token!r} is not of the form --section.field value; put -- before it")
        elif key is None:
            raise UserError(f"{COMMAND_LINE}: {token!r} is not of the form --section.field value; see --help")
        else:
            values[key].append(_flag_of(token))
    return values


def yaml_settings(path: Path, kinds: dict[str, Kind], script: str) -> dict[str, list[str]]:
    """Read nested YAML as {"section.field": [value, ...]}, and check every key. Raises UserError.

    Keys under the name of this script override the rest of the file. Keys under another script's name are skipped.
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
    of_scripts = {name: tree.pop(name) for name in SCRIPTS if name in tree}
    of_this_script = of_scripts.get(script) or {}
    if not isinstance(of_this_script, dict):
        raise UserError(f"{path}: {script} must be a mapping of sections, not {_flag_of(of_this_script)[:60]!r}")
    values: dict[str, list[str]] = {}

    def walk(node: dict, prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            check_known(key, kinds, where=str(path))
            if (kinds[key] == "section") != isinstance(value, dict):
                need = "a mapping (it is a section)" if kinds[key] == "section" else "a value, not a mapping"
                raise UserError(f"{path}: {key} must be {need}")
            if isinstance(value, Written) and kinds[key] == "flag" and isinstance(value.value, bool):
                value = str(value.value)  # YAML's yes and on are True, too
            if isinstance(value, list) and kinds[key] != "list":
                raise UserError(f"{path}: {key} must be one value, not the list {value}")
            if value is None and kinds[key] != "optional":
                raise UserError(f'{path}: {key} has no value; give it one ("" for an empty text), or drop the line')
            if isinstance(value, dict):
                walk(value, f"{key}.")
            else:
                entries = value if isinstance(value, list) else [value]
                values[key] = [_flag_of(entry) for entry in entries]

    walk(tree, "")
    walk(of_this_script, "")
    return values


def _flag_of(entry: Any) -> str:
    """Return a value, or an entry of a list, as the text of a flag. A mapping becomes JSON, and ~ the home folder."""
    if isinstance(entry, Written):
        is_special = isinstance(entry.value, float) and not isfinite(entry.value)  # YAML's .inf and .nan
        return str(entry.value) if is_special else entry.text
    text = json.dumps(_as_json(entry)) if isinstance(entry, dict) else str(entry)
    return os.path.expanduser(text) if re.match("~(/|$)", text) else text


def _as_json(tree: Any) -> Any:
    """Return a tree of YAML in the types of JSON: true, false and decimal numbers, and texts for all other values."""
    if isinstance(tree, dict):
        return {_flag_of(name): _as_json(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_as_json(entry) for entry in tree]
    if not isinstance(tree, Written):
        return tree
    if re.fullmatch("true|false", tree.text, re.IGNORECASE):
        return tree.value
    is_number = re.fullmatch(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?", tree.text)
    return tree.value if is_number else tree.text
