"""The tests' own house rule: what two test files need is a helper's."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_test_file_imports_anything_of_another():
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [f"{path.name}: {name}" for name in names if name.split(".")[-1].startswith(("test_", "conftest"))]
    assert found == []
