"""What the README shows works as it stands there."""

import re
import sys
import types
from pathlib import Path

from helpers.sample_groups import group
from helpers.scripted_rollout import ANSWER, play, prompt, tool_text

import arpo.tools
from arpo.options import RolloutConfig
from arpo.tools import TOOLS, make_tools
from arpo.tools.ledger import ledger
from arpo.tools.options import ToolsConfig

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_calculator_plugs_in_as_the_readme_says(monkeypatch):
    file, line = re.findall(r"```python\n(.*?)```", section("Plugging in a tool"), re.DOTALL)
    assert len([text for text in file.splitlines() if text.strip()]) <= 22
    module = types.ModuleType("arpo.tools.calculator")
    exec(file, module.__dict__)
    monkeypatch.setitem(sys.modules, "arpo.tools.calculator", module)
    for name, make in eval("{" + line + "}", vars(arpo.tools)).items():
        monkeypatch.setitem(TOOLS, name, make)

    calls = ["2 * (3 + 4) - -1", "1 / 0", "__import__('os')", "2 +"]
    script = lambda _p, _t, turn: [*(f"<calculator> {c} </calculator>" for c in calls), ANSWER][turn]  # noqa: E731
    [group] = play(
        script,
        tools=make_tools(ToolsConfig(names=("calculator",))).values(),
        prompts=[prompt(tools=("calculator",))],
        cfg=RolloutConfig(group_size=1, max_tool_calls=len(calls), answer_reserve_tokens=60),
    )
    [trajectory] = group.trajectories
    assert [call.result for call in trajectory.tool_calls] == [
        "15",
        "Error: ZeroDivisionError",
        "Error: AttributeError",
        "Error: SyntaxError",
    ]
    assert "15" in tool_text(trajectory)


def test_every_phase_of_a_step_is_in_the_table():
    table = section("Metrics")
    script = (Path(__file__).resolve().parent.parent / "train_rl.py").read_text()
    phases = [*re.findall(r'timers\("(\w+)"\)', script), "step", "idle", "rank_wait"]
    assert len(phases) > 10
    for phase in phases:
        assert f"`time/{phase}`" in table, phase


def test_every_ledger_metric_is_in_the_table():
    table, shortened = section("Metrics"), {"seconds_p95": "_p95", "seconds_max": "_max"}
    for name in ledger([group()]).values():
        last = name.rsplit("/", 1)[1]
        assert shortened.get(last, last) in table, name
