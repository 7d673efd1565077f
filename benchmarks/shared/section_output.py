"""What the output of a section of benchmarks/gpu_report.py says: the result, or why the section failed."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

OURS = {"arpo", "benchmarks", "helpers", "tests"}
FATAL = "Fatal Python error: "
"""Python's faulthandler writes this line before the stacks of all threads."""


def absent_package(text: str) -> str:
    """Return the third-party package that a section could not import; "" if it failed for another reason."""
    missing = re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", last_error(text))
    return missing[1] if missing and missing[1].partition(".")[0] not in OURS else ""


def reason_of(text: str) -> str:
    """Return why the section failed, at most 300 characters."""
    if "OutOfMemoryError" in text or "out of memory" in text:
        return "out of memory"
    fatal = re.search(rf"^{FATAL}.*", text, re.MULTILINE)
    return (last_error(text) or (f"{fatal[0]}; " if fatal else "") + last_line(text))[:300]


def last_error(text: str) -> str:
    """Return the last line that names an exception, "" for none. pytest and torchrun put a mark before it."""
    errors = re.findall(r"^(?:E +|\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)$", text, re.MULTILINE)
    return errors[-1] if errors else ""


def last_line(text: str) -> str:
    """Return the last line before the stacks that is not a result."""
    lines = text.partition(FATAL)[0].splitlines()
    return next((line for line in reversed(lines) if line.strip() and not line.startswith("{")), "no output")[:300]


def last_json(text: str) -> dict | None:
    """Return the result of a benchmark: its last line that begins with {. None if there is none, or a broken one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                return None
    return None


def judge_tests(cases: list[ElementTree.Element], text: str) -> tuple[str, str]:
    """Return (status, reason) of a test with all its cases: failed before skipped before passed."""
    broken = [found for case in cases for kind in ("failure", "error") if (found := case.find(kind)) is not None]
    if broken:
        message = reason_of(text) if "out of memory" in text else broken[0].get("message", "")
        return "failed", " ".join(message.split())[:300]
    skipped = [case.find("skipped").get("message", "") for case in cases if case.find("skipped") is not None]
    if not cases or len(skipped) == len(cases):
        return "skipped", "; ".join(dict.fromkeys(skipped)) or "no such test"
    return "passed", ", ".join(f"not {case.get('name')}" for case in cases if case.find("skipped") is not None)
