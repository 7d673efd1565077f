"""The import rule: who may import what, read off the source; and what `--help` must not pay for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["train_sft", "train_rl", "evaluate", "ablate"]
MODULES = sorted((ROOT / "arpo").rglob("*.py"))
PURE_CORE = ["trajectory", "protocol", "branching", "advantages", "losses", "kl", "rollout_correction", "rewards"]
PURE_IMPORTS = {"numpy", "torch", "math_verify", "latex2sympy2_extended", "sympy"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Full dotted names of all that a file imports, at the top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # level: the sandbox's host runs outside the package, and so imports its neighbours relatively
            above = name_of(path).split(".")[: -node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return names


def packages_of(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(path)}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_package_never_imports_a_script(path):
    assert not packages_of(path) & set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_never_import_each_other(script):
    assert not packages_of(ROOT / f"{script}.py") & set(SCRIPTS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_engine_imports_vllm_and_only_inside_functions(path):
    if "vllm" in packages_of(path):
        assert name_of(path) in ("arpo.engine", "arpo.weight_sync", "arpo.process_state")
        top = {n for node in ast.parse(path.read_text()).body for n in _top_level_names(node)}
        assert "vllm" not in top


def _top_level_names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {node.module.partition(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_tools_import_aiohttp(path):
    assert "aiohttp" not in packages_of(path) or name_of(path).startswith("arpo.tools")


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if name_of(p).split(".")[1:2] and name_of(p).split(".")[1] in PURE_CORE and p.stem != "judge"],
    ids=name_of,
)
def test_the_pure_core_imports_only_itself_and_pure_libraries(path):
    core = {"arpo.config", "arpo.options"} | {f"arpo.{name}" for name in PURE_CORE}
    for name in imports_of(path):
        package = name.partition(".")[0]
        if package == "arpo":
            assert name == "arpo" or any(name == c or name.startswith(f"{c}.") for c in core), name
        else:
            assert package in sys.stdlib_module_names | PURE_IMPORTS, name


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_answers_without_importing_torch(script):
    command = [sys.executable, "-X", "importtime", f"{script}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--run.name" in done.stdout
    assert " torch\n" not in done.stderr and " transformers\n" not in done.stderr and " tyro\n" in done.stderr
