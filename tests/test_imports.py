"""The import rule: who may import what, read off the source; and what `--help` must not pay for.

Scripts import the package, never each other; the package never imports a script or `extras`; no circles, not even
through imports inside functions; the ground (jail, errors, config, options) imports nothing above it; the pure core
imports only itself, the ground and pure libraries; only `engine/` imports vllm, inside functions; only `tools/http`,
the tools that fetch pages, and their users in `evals/` know aiohttp; nothing there imports an MCP client, and `extras`
only inside functions.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["train_sft", "train_rl", "evaluate"]
MODULES = sorted((ROOT / "arpo").rglob("*.py"))
PURE_CORE = [
    "trajectory", "protocol", "branching", "branching_signal", "growing", "retrospective", "selection",
    "advantages", "losses", "kl", "batch", "tree", "rewards", "metrics",
]  # fmt: skip
PURE_IMPORTS = {"numpy", "torch", "math_verify", "latex2sympy2_extended", "sympy"}
GROUND = ("arpo.jail", "arpo.errors", "arpo.config", "arpo.options")
"""Rooms that everybody may import, from the lowest to the highest."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path): path for path in MODULES}


@cache
def imports_of(path: Path) -> set[str]:
    """Full dotted names of all that a file imports, at the top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # level: the sandbox's host runs outside the package, and so imports its neighbours relatively
            is_package = path.name == "__init__.py"
            above = name_of(path).split(".")[: len(name_of(path).split(".")) - node.level + is_package]
            module = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names} | {module}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def packages_of(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(path)}


def ours_in(path: Path) -> set[str]:
    """The modules of the package that a file imports; a folder where it takes what the folder's `__init__` offers."""
    found = {name if name in NAMES else name.rpartition(".")[0] for name in imports_of(path)}
    return {name for name in found if name in NAMES and name not in ("arpo", name_of(path))}


def circle_in(arrows: dict[str, set[str]]) -> list[str]:
    """Some circle of arrows, or []."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(arrows.get(name, ())):
            if circle := search(other, [*way, name]):
                return circle
        done.add(name)
        return []

    return next(filter(None, (search(name, []) for name in sorted(arrows))), [])


def test_the_package_imports_no_script_and_scripts_do_not_import_each_other():
    for name, path in [*NAMES.items(), *((script, ROOT / f"{script}.py") for script in SCRIPTS)]:
        assert not packages_of(path) & set(SCRIPTS), name


def test_the_package_does_not_know_the_extras():
    """They know it, and come in as FILE.py:NAME."""
    for name, path in NAMES.items():
        assert "extras" not in packages_of(path), name
        assert "extras/" not in path.read_text(), name


def test_no_modules_import_each_other_in_a_circle():
    # a folder's __init__ repeats what its modules offer: it is their shop window, not a reason for a circle
    windows = {name for name, path in NAMES.items() if path.name == "__init__.py" and name != "arpo"}
    arrows = {name: ours_in(path) - {name.rpartition(".")[0]} for name, path in NAMES.items() if name not in windows}
    behind = {window: ours_in(NAMES[window]) for window in windows}
    arrows = {
        name: set().union(*(behind[o] if o in windows else {o} for o in others)) for name, others in arrows.items()
    }
    assert circle_in(arrows) == []


def room_of(name: str) -> str:
    """The folder of arpo/, or the file there, that a module is in: "arpo.tools.search.web" -> "arpo.tools"."""
    return ".".join(name.split(".")[:2])


def test_no_rooms_import_each_other_in_a_circle():
    arrows: dict[str, set[str]] = {}
    for name, path in NAMES.items():
        arrows.setdefault(room_of(name), set()).update({room_of(other) for other in ours_in(path)} - {room_of(name)})
    assert circle_in(arrows) == []


def test_the_ground_imports_nothing_above_it():
    for name, path in NAMES.items():
        if room_of(name) in GROUND:
            below = GROUND[: GROUND.index(room_of(name)) + 1]
            assert {room_of(other) for other in ours_in(path)} <= set(below), name


def test_only_checks_of_a_script_import_what_is_done_before_a_run():
    checks = {"arpo.evals.inputs", "arpo.sft.inputs", "arpo.sampling.environment"}
    users = {name for name, path in NAMES.items() if "arpo.start" in map(room_of, ours_in(path))}
    assert {name for name in users if room_of(name) != "arpo.start"} == checks


def test_a_circle_is_found():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_only_the_engine_imports_vllm_and_only_inside_functions():
    for name, path in NAMES.items():
        if "vllm" in packages_of(path):
            assert name.startswith("arpo.engine."), name
            top = {n for node in ast.parse(path.read_text()).body for n in _top_level_names(node)}
            assert "vllm" not in top, name


def _top_level_names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {node.module.partition(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


def test_only_tools_import_aiohttp():
    """The judge speaks HTTP too, but through the client of `tools/http`."""
    assert {name for name, path in NAMES.items() if "aiohttp" in packages_of(path)} == {
        "arpo.tools.http.client",
        "arpo.tools.search.browse",
        "arpo.tools.search.page_fetch",
    }


def test_the_mcp_client_is_imported_by_extras_only_and_only_inside_functions():
    """Who has no such server needs no such package, and does not wait for its import."""
    client = {"mcp", "mcp_types", "anyio", "httpx2"}
    assert not [name for name, path in NAMES.items() if packages_of(path) & client]
    for path in (ROOT / "extras" / "tools" / "mcp").glob("*.py"):
        top = {n for node in ast.parse(path.read_text()).body for n in _top_level_names(node)}
        assert not top & client, path


def test_the_pure_core_imports_only_itself_and_pure_libraries():
    core = [f"arpo.{name}" for name in PURE_CORE]
    for name, path in NAMES.items():
        if room_of(name) not in core:
            continue
        assert {room_of(other) for other in ours_in(path)} <= {*GROUND, *core}, name
        # math_worker is the program of a child process, which imports its neighbours by path; so does math_sets
        jail = {"arpo.rewards.math_worker": {"math_numbers", "math_sets", "math_text"}}.get(name, set())
        jail |= {"math_numbers"} if name == "arpo.rewards.math_sets" else set()
        assert packages_of(path) - {"arpo"} <= sys.stdlib_module_names | PURE_IMPORTS | jail, name


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_answers_without_importing_torch(script):
    command = [sys.executable, "-X", "importtime", f"{script}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--run.name" in done.stdout
    assert " torch\n" not in done.stderr and " transformers\n" not in done.stderr and " tyro\n" in done.stderr


def test_no_test_file_imports_anything_of_another():
    """What two test files need is in tests/helpers."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [f"{path.name}: {name}" for name in names if name.split(".")[-1].startswith(("test_", "conftest"))]
    assert found == []
