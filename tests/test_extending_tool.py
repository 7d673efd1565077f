"""A new tool with a knob, added to a copy of the package as docs/extending.md says: a file, a line, a field.

Then the copy is used as a run uses it: config from the command line, ToolRunner, rollout, rewards, metrics, grading.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TOOL = '''
import ast
import operator
from dataclasses import dataclass

from arpo.protocol.prompts import About
from arpo.tools.base import ToolResult

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(frozen=True)
class CalculatorConfig:
    """The <calculator> tool."""

    digits: int = 6
    """Significant digits of a result."""


class Calculator:
    tag = "calculator"
    call = "<calculator> 6 * 7 </calculator>"
    about = About("a calculator", f"to calculate, write {call}", f"{call} <result> 42 </result>")

    def __init__(self, cfg: CalculatorConfig):
        self.cfg = cfg

    async def run(self, argument: str) -> ToolResult:
        try:
            value = self.value_of(ast.parse(argument.strip(), mode="eval").body)
        except Exception as error:
            return ToolResult(f"Error: {type(error).__name__}", ok=False, error_kind="error")
        return ToolResult(f"{value:.{self.cfg.digits}g}", ok=True)

    def value_of(self, node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](self.value_of(node.left), self.value_of(node.right))
        return node.value

    async def aclose(self) -> None:
        pass
'''
LINE = '    "calculator": lambda: import_module("arpo.tools.calculator").Calculator,\n'
IMPORT = "from arpo.tools.calculator import CalculatorConfig\n"
FIELD = "    calculator: CalculatorConfig = field(default_factory=CalculatorConfig)\n"

USE = r"""
import json
from dataclasses import dataclass, field, replace

from helpers.fakes import EchoTool, ScriptedEngine, byte_tokenizer

from arpo.config import load_config
from arpo.evals.grading import well_formed
from arpo.evals.records import group_records
from arpo.metrics import rollout_metrics
from arpo.options import BranchingConfig, RewardConfig, RolloutConfig
from arpo.protocol import Codec
from arpo.rewards import score_groups
from arpo.rollout import rollout
from arpo.tools import make_tools, system_prompt_for
from arpo.tools.base import ToolRunner
from arpo.tools.options import ToolsConfig
from arpo.trajectory import Prompt


@dataclass(frozen=True)
class Config:
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


with open("corpus.jsonl", "w") as file:
    file.write(json.dumps({"contents": "otter <calculator>1</calculator> <answer>5</answer>"}) + "\n")
cfg = load_config(Config, [
    "--tools.names", "calculator", "search", "--tools.calculator.digits", "3", "--tools.price_per_call",
    "calculator=0.5", "--tools.search.backend", "local", "--tools.search.corpus", "corpus.jsonl",
])

T, A = "<think>t</think>", "<think>t</think><answer>\\boxed{4}</answer>"
CALC, SEARCH = T + "<calculator>20 / 3</calculator>", T + "<search>otter</search>"
SCRIPTS = {
    "calculator": [CALC, A],
    "python": [T + "<python>20 / 3</python>", A],
    "unclosed": ["<think>t</think><calculator>1+1<answer>\\boxed{4}</answer>"],
    "unclosed_python": ["<think>t</think><python>1+1<answer>\\boxed{4}</answer>"],
    "unopened": [T + "1+1</calculator>", A],
    "search": [SEARCH, A],
    "both": [CALC, SEARCH, A],
    "failed": [T + "<calculator>1 / 0</calculator>", SEARCH, A],
}
tokenizer = byte_tokenizer()
loaded = make_tools(cfg.tools) | {"python": EchoTool("python", "6.67")}
codec, runner = Codec(tokenizer, tools=loaded), ToolRunner(loaded)
ids = tuple(codec.render_prompt([{"role": "user", "content": "q"}]))
prompts = [Prompt(name, [{"role": "user", "content": "q"}], ["4"], "gsm8k", token_ids=ids) for name in SCRIPTS]
groups = rollout(
    prompts, ScriptedEngine(tokenizer, lambda prompt, _path, turn: SCRIPTS[prompt][turn]), runner, codec,
    RolloutConfig(group_size=1, max_response_tokens=900, answer_reserve_tokens=60),
    BranchingConfig(selector="none", num_initial_rollouts=1), seed=0,
)
runner.close()
found = {}
for bonus in (cfg.reward.bonus_tools, ("search", "calculator")):
    score_groups(groups, replace(cfg.reward, bonus_tools=bonus), tools=tuple(loaded))
    found["+".join(bonus)] = {g.prompt.prompt_id: g.trajectories[0].to_dict() for g in groups}
values = rollout_metrics(groups).values()
records = {g.prompt.prompt_id: group_records(g, "own", "reward", [0.0], tuple(loaded))[0] for g in groups}
print(json.dumps({
    "plain": found["search+python"], "bonus": found["search+calculator"], "metrics": values,
    "well_formed": {name: well_formed(record) for name, record in records.items()},
    "from_text": {name: well_formed(replace(record, segments=[])) for name, record in records.items()},
    "prompt": system_prompt_for("default", cfg.tools.names), "decides": cfg.tools.what_decides(),
}))
"""


def insert_below(path: Path, anchor: str, line: str) -> None:
    text = path.read_text()
    assert text.count(anchor) == 1, anchor
    path.write_text(text.replace(anchor, anchor + line))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What USE prints in a copy of the package that has the calculator."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "arpo", folder / "arpo", ignore=shutil.ignore_patterns("__pycache__"))
    tools = folder / "arpo" / "tools"
    (tools / "calculator.py").write_text(TOOL)
    insert_below(tools / "__init__.py", "TOOLS: dict[str, Callable[[], type[Tool]]] = {\n", LINE)
    insert_below(tools / "options.py", "from arpo.errors import UserError\n", IMPORT)
    insert_below(tools / "options.py", "    search: SearchConfig = field(default_factory=SearchConfig)\n", FIELD)
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", USE]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def reward(trajectory: dict) -> tuple[float, dict, str]:
    return trajectory["reward"], trajectory["reward_parts"], trajectory["reward_reason"]


def test_a_well_formed_call_of_the_tool_earns_what_one_of_python_earns(found):
    plain = found["plain"]
    assert reward(plain["calculator"]) == reward(plain["python"])
    assert reward(plain["calculator"]) == (1.0, {"format": 1.0, "accuracy": 1.0, "tool_bonus": 0.0}, "")


def test_an_unclosed_or_unopened_call_of_the_tool_loses_what_one_of_python_loses(found):
    plain = found["plain"]
    assert reward(plain["unclosed"]) == reward(plain["unclosed_python"])
    assert (plain["unclosed"]["reward"], plain["unclosed"]["reward_reason"]) == (-1.0, "unclosed_call")
    assert (plain["unopened"]["reward"], plain["unopened"]["reward_reason"]) == (-1.0, "unopened_call")


def test_the_tools_tags_in_a_search_result_are_escaped(found):
    [call] = [turn["tool_call"] for turn in found["plain"]["search"]["turns"] if turn["tool_call"]]
    assert call["ok"] and "&lt;calculator&gt;1&lt;/calculator&gt; &lt;answer&gt;5" in call["result"]
    assert "<calculator>" not in call["result"] and found["plain"]["search"]["reward"] == 1.0


def test_the_tools_knob_acts(found):
    assert found["plain"]["calculator"]["turns"][0]["tool_call"]["result"] == "6.67"


def test_the_bonus_can_be_for_the_tool(found):
    rewards = {name: trajectory["reward"] for name, trajectory in found["bonus"].items()}
    assert rewards["both"] == 1.1 and rewards["failed"] == rewards["calculator"] == 1.0
    assert found["plain"]["both"]["reward"] == 1.0


def test_prompt_metrics_prices_and_grades_know_the_tool(found):
    assert "with the help of a calculator and a search tool." in found["prompt"]
    metrics = found["metrics"]
    assert metrics["tools/calculator/calls"] == 3 and metrics["tools/calculator/not_run"] == 1
    assert metrics["tools/calculator/failed_error"] == 1 and metrics["tools/calculator/cost"] == 2 * 0.5
    ill_formed = {"unclosed", "unclosed_python", "unopened"}
    for verdicts in (found["well_formed"], found["from_text"]):
        assert {name for name, good in verdicts.items() if not good} == ill_formed
    assert found["decides"]["calculator"] == {"digits": 3}
