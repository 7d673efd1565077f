"""`NAME or FILE.py:NAME`: an option names a function or a class, either ours or in a user's file.

Our names are the keys of dicts of functions (losses, branching rules, ...). `names_of` reads these keys from the
source: an import of the modules would import torch, and a misspelt name should be reported before those seconds. So the
dict is the only list of names. A user's file is parsed for the same reason. Later `find` imports the file, once in a
process, and returns the function. A relative path is relative to the current directory.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from arpo.config.bounded import read_file
from arpo.errors import UserError, innermost

MAX_SOURCE_BYTES = 16 << 20
PACKAGE = Path(__file__).parent.parent
OWN = "own_"
"""Prefix of the module name of a user's file."""
T = TypeVar("T")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def names_of(module: str, name: str) -> tuple[str, ...]:
    """Return the keys of a dict literal, or the entries of a set literal, in order.

    The literal is at the top level of a module of this package. Raises LookupError if there is none.
    names_of("losses", "TOKEN_LOSSES") -> ("ppo", "gspo", "cispo", "reinforce")
    """
    source = PACKAGE.joinpath(f"{module}.py").read_text()
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets) and isinstance(
            node.value, ast.Dict | ast.Set
        ):
            entries = node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts
            return tuple(ast.literal_eval(entry) for entry in entries)
    raise LookupError(f"arpo/{module}.py assigns no dict or set literal to {name}")


def check_name(option: str, value: str, module: str, dict_name: str, *also: str) -> None:
    """Raise ValueError unless `value` is a key of that dict, an entry of `also`, or FILE.py:NAME. Suggest the closest
    name.

    Raises UserError if the file does not exist or does not define the name. Nothing is imported.
    """
    if is_own(value):
        definition_of(option, value)
        return
    names = (*names_of(module, dict_name), *also)
    if value not in names:
        close = difflib.get_close_matches(value, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"{option}={value!r} is unknown; {hint}use one of {', '.join(names)}, or FILE.py:NAME")


def is_own(value: str) -> bool:
    """Return True if the value names something in a user's file (FILE.py:NAME)."""
    return ".py:" in value


def parameters_of(option: str, value: str) -> tuple[str, ...]:
    """Return the parameter names of a user's function; () if the file has no `def` of that name."""
    node = definition_of(option, value)
    return tuple(arg.arg for arg in (*node.args.posonlyargs, *node.args.args)) if isinstance(node, Function) else ()


def takes(option: str, value: str, form: tuple[str, ...]) -> bool:
    """Return True if a user's function has these parameters first, and defaults for all further parameters."""
    node = definition_of(option, value)
    if parameters_of(option, value)[: len(form)] != form:
        return False
    num_required = len(parameters_of(option, value)) - len(node.args.defaults)
    return num_required <= len(form) and None not in node.args.kw_defaults


def definition_of(option: str, value: str) -> ast.AST | None:
    """Return the node of FILE.py that defines NAME; None if only an `import *` can define it.

    Raises UserError if the file does not exist or does not define the name.
    """
    file, _, name = value.rpartition(":")
    try:
        defined = _defined_in(_path_of(option, value))
    except OSError:
        raise UserError(f"{option}={value}: there is no such file; check the path") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deep
        raise UserError(f"{option}={value}: {file} is not valid Python ({brief(error)})") from None
    if name not in defined and "*" not in defined:
        close = difflib.get_close_matches(name, defined, n=1)
        fix = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(defined) or 'nothing'}"
        raise UserError(f"{option}={value}: {file} does not define {name!r}; {fix}")
    return defined.get(name)


def _path_of(option: str, value: str) -> Path:
    try:
        return Path(value.rpartition(":")[0]).resolve()
    except RuntimeError:  # links in a circle
        raise UserError(f"{option}={value}: there is no such file; its links lead in a circle") from None


@cache
def _defined_in(path: Path) -> dict[str, ast.AST]:
    """Return the nodes that define a module's names, also within `try` and `if`. The last definition counts."""
    defined: dict[str, ast.AST] = {}
    nodes: list[ast.AST] = [ast.parse(read_file(path, MAX_SOURCE_BYTES).decode())]
    while nodes:  # in the order of the file; a recursion could be too deep
        node = nodes.pop()
        if isinstance(node, Function | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined[node.id] = node
        else:
            nodes += reversed([*ast.iter_child_nodes(node)])
    return defined


def find(option: str, value: str, ours: Mapping[str, T]) -> T:
    """Return the object that an option names: an entry of `ours`, or NAME of a user's FILE.py. Raises UserError."""
    if not is_own(value):
        return ours[value]
    file, _, name = value.rpartition(":")
    path = _path_of(option, value)
    if not path.is_file():
        raise UserError(f"{option}={value}: there is no such file; check the path")
    try:
        module = _imported(path)
    except (Exception, SystemExit) as error:
        neighbour = str(getattr(error, "name", None)).partition(".")[0]  # of an ImportError
        has_neighbour = any(path.parent.joinpath(name).exists() for name in (neighbour, f"{neighbour}.py"))
        fix = f"; to import files beside it, set PYTHONPATH={path.parent}" if has_neighbour else ""
        raise UserError(f"{option}={value}: cannot be imported ({brief(error)}){fix}") from error
    if not hasattr(module, name):
        raise UserError(f"{option}={value}: {file} does not define {name!r}")
    return getattr(module, name)


@cache
def _imported(path: Path) -> ModuleType:
    name = f"{OWN}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module


def brief(error: BaseException) -> str:
    """Return class and text of an error in one line, and the line of the user's file that raised it."""
    error = innermost(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    origin = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith(OWN):
            origin = f", in line {line} of {Path(frame.f_code.co_filename).name}"
    return text + origin
