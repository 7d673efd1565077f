"""The edits of docs/extending.md, made in a copy of the project as they stand there; then the copy is used.

Nothing else in the copy may need to know the new name.
"""

import json

import pytest
from helpers.edits import edited_copy, edits_of, run_in

USE_RLOO = """
from arpo.advantages import TREE_CREDITS, assign_advantages
from arpo.config.load import load_config
from arpo.errors import UserError
from arpo.trajectory import Group, Prompt, Trajectory
from train_rl import RLConfig

RL = ["--data.train", "x"]
cfg = load_config(RLConfig, [*RL, "--advantage.kind", "rloo", "--advantage.rloo_scale", "2.0",
                             "--advantage.dead_groups", "drop", "--advantage.tree", "hard"]).advantage
assert not cfg.needs_critic
rewards = [3.0, 0.0, 0.0]
trajectories = [Trajectory("p", str(i), [5], [1], [0.0], reward=reward) for i, reward in enumerate(rewards)]
group = Group(Prompt("p", [], []), trajectories)
assign_advantages([group], cfg)
assert [t.advantage for t in group.trajectories] == [6.0, -3.0, -3.0], group
assert TREE_CREDITS[cfg.tree](group, cfg)["1"].tolist() == [-3.0]
for flags in (["--advantage.kind", "rlo"], ["--advantage.kind", "rloo", "--critic.lr", "1e-4"]):
    try:
        load_config(RLConfig, [*RL, *flags])
    except UserError as error:
        print(error)
"""


def test_an_advantage_estimator_is_one_function_one_line_and_one_field(tmp_path):
    edits = edits_of("An advantage estimator")
    assert [code.count("def ") for _, code in edits] == [1, 0, 0]
    printed = run_in(edited_copy(tmp_path, edits), USE_RLOO).splitlines()
    assert "did you mean 'rloo'" in printed[0] and "critic.lr" in printed[1] and "advantage.kind" in printed[1]


USE_SAPO = """
import math
import torch
from arpo.config.load import load_config
from arpo.errors import UserError
from arpo.losses import LossInputs, policy_loss
from train_rl import RLConfig

RL = ["--data.train", "x"]
flags = ["--loss.kind", "sapo", "--loss.sapo_temperature", "2.0", "--loss.kl_coefficient", "0.1"]
cfg = load_config(RLConfig, [*RL, *flags])
logprobs = torch.tensor([[1.0, 3.0]]).log().requires_grad_()
mask = torch.tensor([[1, 0]])
ones, zeros = torch.ones(1, 2), torch.zeros(1, 2)
loss, metrics = policy_loss(LossInputs(logprobs, zeros, ones, mask, ref_logprobs=zeros), cfg.loss)
loss.backward()
assert loss.item() == -1.0 and logprobs.grad.tolist() == [[-1.0, 0.0]], (loss, logprobs.grad)  # on-policy: -A
assert metrics["gate"] == 0.5 and metrics["ratio_max"] == 1.0 and metrics["clip_fraction"] == 0.0
try:
    load_config(RLConfig, [*RL, "--loss.kind", "sap0"])
except UserError as error:
    print(error)
"""


def test_a_loss_with_a_knob_is_one_function_one_line_and_one_field(tmp_path):
    edits = edits_of("A loss with a knob")
    assert [code.count("def ") for _, code in edits] == [1, 0, 0]
    assert "did you mean 'sapo'? use one of sapo, ppo" in run_in(edited_copy(tmp_path, edits), USE_SAPO)


def test_an_edit_in_a_place_that_is_not_there_is_noticed(tmp_path):
    with pytest.raises(AssertionError, match="there is no LOSSES"):
        edited_copy(tmp_path, [("One line in `LOSSES` of `arpo/losses.py`:", "    1: 1,\n")])


# ---- a tool with state

USE_LEDGER = """
from helpers.fakes import ScriptedEngine, byte_tokenizer

from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import Codec
from arpo.rollout import rollout
from arpo.tools import make_tools, system_prompt_for
from arpo.tools.base import ToolRunner
from arpo.config.tools import ToolsConfig
from arpo.trajectory import Prompt

tokenizer, tools = byte_tokenizer(), make_tools(ToolsConfig(names=("ledger",)))
codec, runner = Codec(tokenizer, tools=tools), ToolRunner(tools)
ids = tuple(codec.render_prompt([{"role": "user", "content": "q"}]))
script = lambda _prompt, path, turn: f"<ledger>{turn - len(path)}</ledger>" if turn < 3 else "done"
[group] = rollout(
    [Prompt("p", [], [], meta={"balance": 7}, token_ids=ids)], ScriptedEngine(tokenizer, script), runner, codec,
    RolloutConfig(group_size=6, max_response_tokens=900, answer_reserve_tokens=60),
    BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2), seed=0,
)
runner.close()
for t in group.trajectories:
    balance = 7
    for call in t.tool_calls:
        balance += int(call.argument)
        assert (call.result, call.info, call.replayed) == (str(balance), {"balance": balance}, 0), call
print(sum(t.parent_id is not None for t in group.trajectories))
print("an account" in system_prompt_for("default", ["ledger"]))
"""


def test_a_tool_with_state_is_one_file_and_one_line(tmp_path):
    edits = edits_of("A tool with state")
    assert len(edits) == 2 and edits[1][1].count("\n") == 1
    assert run_in(edited_copy(tmp_path, edits), USE_LEDGER).split() == ["4", "True"]


# ---- a branching rule on token entropies

USE_SPIKES = '''
import json
from helpers.fakes import EchoTool, ScriptedEngine, byte_tokenizer
import arpo.rollout
from arpo.config.load import load_config
from arpo.protocol import Codec
from arpo.tools.base import ToolRunner
from arpo.trajectory import Prompt
from train_rl import RLConfig

COMMON = [
    "--data.train", "x", "--rollout.group_size", "6", "--branching.num_initial_rollouts", "2",
    "--branching.entropy_tokens", "8", "--branching.rule", "threshold", "--branching.threshold", "0.45",
]

def script(prompt_id, path, turn):
    """Two searches, then the answer. After the first result half of the tokens stand out against root 0, none against
    root 1; after the second all do, but only against root 0. In the mean the entropy falls, but for root 0's last."""
    text = "<think>t</think><search>q</search>" if turn < 2 else "<think>t</think><answer>1</answer>"
    if turn == 0:
        return text, [1.0] * 8 if path == "0" else [3.0] * 8
    return text, [1.5] * 4 + [0.1] * 4 if turn == 1 else [1.2] * 8

tokenizer = byte_tokenizer()
codec = Codec(tokenizer)
messages = [{"role": "user", "content": "question"}]
prompt = Prompt("p", messages, ["1"], token_ids=tuple(codec.render_prompt(messages)))

def decisions(flags):
    cfg = load_config(RLConfig, COMMON + flags)
    tools = ToolRunner({"search": EchoTool("search", "found")})
    engine = ScriptedEngine(tokenizer, script)
    [group] = arpo.rollout.rollout([prompt], engine, tools, codec, cfg.rollout, cfg.branching, seed=0)
    tools.close()
    return {
        t.trajectory_id: {i: [turn.decision.probability, turn.decision.num_children]
                          for i, turn in enumerate(t.turns) if turn.decision}
        for t in group.trajectories
    }

print(json.dumps({name: decisions(flags) for name, flags in RUNS.items()}))
'''
RUNS = {
    "plain": ["--branching.selector", "spikes"],
    "weighted": ["--branching.selector", "spikes", "--branching.spike_weight", "0.8"],
    "means": ["--branching.selector", "arpo", "--branching.threshold", "0.5"],
}
Decisions = dict[str, dict[str, list]]
"""Trajectory -> turn -> [P, number of children]."""


@pytest.fixture(scope="module")
def decisions(tmp_path_factory) -> dict[str, Decisions]:
    """What rollouts on the scripted engine decide with each of RUNS, in a copy with the rule in it."""
    folder = edited_copy(tmp_path_factory.mktemp("rule"), edits_of("A branching rule on token entropies"))
    return json.loads(run_in(folder, f"RUNS = {RUNS!r}\n{USE_SPIKES}"))


def test_decisions_follow_a_rule_on_the_token_entropies_of_turn_and_root(decisions):
    # Root 0 branches after both results. Its child has the parent's first turn, so all tokens of its own last turn
    # stand out too, and it branches as well; against root 1's first turn nothing stands out.
    assert decisions["plain"] == {
        "0": {"1": [0.5, 1], "2": [1.0, 1]},
        "0.0": {"2": [1.0, 1]},
        "0.0.0": {},
        "0.1": {},
        "1": {"1": [0.0, 0], "2": [0.0, 0]},
        "2": {},
    }


def test_the_rules_knob_comes_from_the_command_line(decisions):
    assert decisions["weighted"]["0"] == {"1": [0.4, 0], "2": [0.8, 1]}


def test_a_rule_on_the_means_decides_otherwise(decisions):
    assert [children for _, children in decisions["means"]["0"].values()] == [0, 1]


# ---- a retrospective selector

USE_MIDDLE = """
from helpers.scripted_rollout import ANSWER, CALL, play
from arpo.config.load import load_config
from arpo.errors import UserError
from train_rl import RLConfig

RL = ["--data.train", "x", "--rollout.group_size", "4", "--branching.num_initial_rollouts", "2"]
cfg = load_config(RLConfig, [*RL, "--branching.selector", "middle", "--branching.expansion_rounds", "1"])
[group] = play(lambda p, path, turn: CALL if turn < 3 - 2 * int(path[0]) else ANSWER, cfg=cfg.rollout,
               branching=cfg.branching)
print([t.trajectory_id for t in group.trajectories])
for flags in (["--branching.selector", "midle"], ["--branching.selector", "middle", "--branching.base", "0.4"]):
    try:
        load_config(RLConfig, [*RL, *flags])
    except UserError as error:
        print(error)
"""


def test_a_retrospective_selector_is_one_function_and_one_line(tmp_path):
    edits = edits_of("A retrospective selector")
    assert [code.count("def ") for _, code in edits] == [1, 0]
    forked, misspelt, useless = run_in(edited_copy(tmp_path, edits), USE_MIDDLE).splitlines()
    assert forked == "['0', '0.0', '1', '1.0']"
    assert "did you mean 'middle'" in misspelt and "base=0.4 is ignored unless branching.selector=arpo" in useless


# ---- a tool from a function

USE_AGE = """
import asyncio
from dataclasses import dataclass, field

from arpo.config.load import load_config
from arpo.tools import make_tools, system_prompt_for, tool_schemas
from arpo.config.tools import ToolsConfig


@dataclass(frozen=True)
class Config:
    tools: ToolsConfig = field(default_factory=ToolsConfig)


cfg = load_config(Config, ["--tools.names", "age", "--tools.price_per_call", "age=0.5"]).tools
tool = make_tools(cfg)["age"]
for argument in ('{"born": 1912, "year": 1950}', '{"born": "1912"}', "1912"):
    result = asyncio.run(tool.run(argument))
    print(result.ok, result.cost, result.text)
print(list(tool_schemas(cfg)))
print(system_prompt_for("default", cfg.names))
"""


def test_a_tool_from_a_function_is_the_function_and_one_line(tmp_path):
    edits = edits_of("A tool from a function")
    assert edits[0][1].count("def ") == 1 and [code.count("\n") for _, code in edits[1:]] == [1]
    right, mistyped, bare, names, *prompt = run_in(edited_copy(tmp_path, edits), USE_AGE).splitlines()
    assert right == "True 0.5 38" and names == "['age']"
    assert mistyped == 'False 0.0 Error: the argument "born" of age must be an integer, not "1912".'
    assert bare.startswith("False 0.0 Error: the arguments of age must be a JSON object")
    assert '<age> {"born": 1} </age>' in prompt and "Tell how old somebody is at the end of a year." in prompt
    assert '"description": "the year of birth"' in prompt[-1]


# ---- a tool with a knob

USE_CALCULATOR = r"""
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from helpers.fakes import EchoTool, ScriptedEngine, byte_tokenizer

from arpo.config.load import load_config
from arpo.evals.grading import well_formed
from arpo.evals.records import SetDump, read_records
from arpo.metrics import rollout_metrics
from arpo.options import BranchingConfig, RewardConfig, RolloutConfig
from arpo.protocol import Codec
from arpo.rewards import score_groups
from arpo.rollout import rollout
from arpo.tools import make_tools, system_prompt_for
from arpo.tools.base import ToolRunner
from arpo.config.tools import ToolsConfig
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
dump = SetDump(Path("run"), "own", metric="reward", tools=tuple(loaded), protocol="tags")
for g in groups:
    dump.add(g, [0.0])
records = {record.question_id: record for record in read_records(Path("run"))}
print(json.dumps({
    "plain": found["search+python"], "bonus": found["search+calculator"], "metrics": values,
    "well_formed": {name: well_formed(record) for name, record in records.items()},
    "prompt": system_prompt_for("default", cfg.tools.names), "decides": cfg.tools.what_decides(),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What USE_CALCULATOR prints in a copy that has the calculator."""
    edits = edits_of("A tool with a knob")
    assert [code.count("\n") for _, code in edits[1:]] == [1, 1, 1]
    return json.loads(run_in(edited_copy(tmp_path_factory.mktemp("tool"), edits), USE_CALCULATOR))


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
    [call] = [call for turn in found["plain"]["search"]["turns"] for call in turn["tool_calls"]]
    assert call["ok"] and "&lt;calculator&gt;1&lt;/calculator&gt; &lt;answer&gt;5" in call["result"]
    assert "<calculator>" not in call["result"] and found["plain"]["search"]["reward"] == 1.0


def test_the_tools_knob_acts(found):
    assert found["plain"]["calculator"]["turns"][0]["tool_calls"][0]["result"] == "6.67"


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
    assert {name for name, good in found["well_formed"].items() if not good} == ill_formed
    assert found["decides"]["calculator"] == {"digits": 3}


# ---- a benchmark

USE_FRAMES = """
import json
from pathlib import Path
from arpo.evals.benchmarks import questions, select

Path("sets/frames").mkdir(parents=True)
row = {"Prompt": "Who wrote it?", "Answer": "Jane Austen", "reasoning_types": "multi hop"}
Path("sets/frames/test.jsonl").write_text(json.dumps(row))
chosen, absent = select(("frames",), "sets")
assert set(chosen) == {"frames"} and not absent
assert "frames" in select(("qa",), "sets")[0]
[prompt] = questions("frames", chosen["frames"], "sets")
assert prompt.answers == ["Jane Austen"] and prompt.meta == {"split": "multi hop"}
assert prompt.messages[-1]["content"] == "Who wrote it?" and prompt.messages[0]["role"] == "system"
print(chosen["frames"].grader)
"""


def test_a_benchmark_is_one_line(tmp_path):
    edits = edits_of("A benchmark")
    assert [code.count("\n") for _, code in edits] == [1]
    assert run_in(edited_copy(tmp_path, edits), USE_FRAMES) == "qa\n"
