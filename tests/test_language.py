"""scripts/language.py, which counts how plainly the code is said."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DENSE = '''
"""One which that has ten words of prose here in all."""
a, b = 1, 2
f(1, 2, 3, 4, 5)
f(*a, 2, 3, 4, 5)
c, d = f()
# a comment
'''
PLAIN = '''
"""`that` is

    that is an example
"""
a, b = b
x = "that which"
f(1, 2, 3, 4)
'''


def printed(*paths: Path) -> str:
    command = [sys.executable, str(ROOT / "scripts/language.py"), *map(str, paths)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_words_assignments_calls_and_comments_are_counted_but_not_those_of_examples(tmp_path):
    (tmp_path / "dense.py").write_text(DENSE)
    (tmp_path / "plain.py").write_text(PLAIN)
    assert "!" not in printed(tmp_path / "plain.py")
    line = printed(tmp_path / "dense.py")
    # 2 relative words and 1 vague one of 11; one tuple assignment and one positional call in 4 lines of code
    assert "18.2! relative words" in line and "9.1! vague" in line
    assert "250.0! tuple assignments" in line and "250.0! positional calls" in line and "25.0 comments" in line
