"""What docs/extending.md shows, as it stands there: files of a researcher's own, which options name; nothing else knows
them. And edits of the package, made in a copy."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from helpers.edits import ROOT, edited_copy, edits_of, make_diffs, run_in, write_own_file
from helpers.fakes import EchoTool, ScriptedEngine, byte_tokenizer
from helpers.scripted_rollout import ANSWER, CALL, play
from helpers.toy_run import build_toy_world, train
from safetensors.torch import load_file

from arpo.advantages import assign_advantages, token_advantages
from arpo.config.rewards import RewardConfig
from arpo.config.tools import ToolsConfig
from arpo.data.order import make_order
from arpo.errors import UserError
from arpo.evals.grading import well_formed
from arpo.evals.records import SetDump, read_records
from arpo.log import read_metrics
from arpo.log.charts import RL_CHARTS
from arpo.log.trackers import TrackedRun, Trackers
from arpo.losses import LossInputs, policy_loss
from arpo.metrics import rollout_metrics
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import TagsCodec
from arpo.rewards import load_custom, score_groups
from arpo.rewards.terms import load_terms
from arpo.sampling.sampler import rollout
from arpo.start.load import load_config
from arpo.tools import make_tools, own_options, prices_of, system_prompt_for, take_counts, tool_schemas
from arpo.tools.base import ToolRunner
from arpo.tools.interface import answer
from arpo.trajectory import Group, Prompt, ToolCall, Trajectory, Turn
from train_rl import RLConfig

RL = ["--data.train", "x"]


# ---- a loss


def test_a_loss_is_one_file_and_one_flag(tmp_path):
    flag = f"{write_own_file('A loss', tmp_path)}:sapo"
    cfg = load_config(RLConfig, [*RL, "--loss.kind", flag, "--loss.kl_coefficient", "0.1"])
    logprobs = torch.tensor([[1.0, 3.0]]).log().requires_grad_()
    ones, zeros = torch.ones(1, 2), torch.zeros(1, 2)
    inputs = LossInputs(logprobs, zeros, ones, torch.tensor([[1, 0]]), ref_logprobs=zeros)
    loss, metrics = policy_loss(inputs, cfg.loss)
    loss.backward()
    assert loss.item() == -2.0 and logprobs.grad.tolist() == [[-1.0, 0.0]]  # on-policy, gate 1/2: the gradient is -A
    assert metrics["gate"] == 0.5 and metrics["ratio_max"] == 1.0 and metrics["clip_fraction"] == 0.0
    with pytest.raises(UserError, match="does not define 'sap0'; did you mean 'sapo'"):
        load_config(RLConfig, [*RL, "--loss.kind", flag.replace("sapo", "sap0")])


USE_SAPO = """
import torch
from arpo.start.load import load_config
from arpo.errors import UserError
from arpo.losses import LossInputs, policy_loss
from train_rl import RLConfig

RL = ["--data.train", "x"]
cfg = load_config(RLConfig, [*RL, "--loss.kind", "sapo", "--loss.sapo_temperature", "2.0"])
logprobs, zeros = torch.zeros(1, 1), torch.zeros(1, 1)
loss, metrics = policy_loss(LossInputs(logprobs, zeros, zeros + 1, zeros + 1), cfg.loss)
assert loss.item() == -1.0 and metrics["gate"] == 0.5
try:
    load_config(RLConfig, [*RL, "--loss.kind", "sap0"])
except UserError as error:
    print(error)
"""


def test_a_loss_of_the_package_with_a_knob_is_one_function_one_line_and_one_field_and_the_tests_know_it(tmp_path):
    [(_, file)], edits = edits_of("A loss"), edits_of("Into the package")
    function = file[file.index("def sapo") :].replace("TEMPERATURE", "cfg.sapo_temperature")
    edits = [("In `arpo/losses.py`, above `TOKEN_LOSSES`:", function), *edits]
    assert [code.count("def ") for _, code in edits] == [1, 0, 0]
    assert "did you mean 'sapo'? use one of sapo, ppo" in run_in(edited_copy(tmp_path, edits), USE_SAPO)
    checks = shutil.copy(ROOT / "tests" / "start" / "test_checks.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", "sapo_temperature", checks]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}:{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "[RLConfig-loss.sapo_temperature-loss.kind] PASSED" in done.stdout


# ---- an advantage


def test_an_advantage_is_one_file_and_one_flag(tmp_path):
    flags = ["--advantage.kind", f"{write_own_file('An advantage', tmp_path)}:rloo", "--advantage.tree", "hard"]
    cfg = load_config(RLConfig, [*RL, *flags, "--advantage.dead_groups", "drop"]).advantage
    rewards = [3.0, 0.0, 0.0]
    trajectories = [Trajectory("p", str(i), [5], [1], [0.0], reward=reward) for i, reward in enumerate(rewards)]
    group = Group(Prompt("p", [], []), trajectories)
    assign_advantages([group], cfg)
    assert [t.advantage for t in group.trajectories] == [3.0, -1.5, -1.5]
    assert token_advantages(group, cfg.tree, cfg)["1"].tolist() == [-1.5]
    maxrl = load_config(RLConfig, [*RL, flags[0], flags[1].replace("rloo", "maxrl")]).advantage
    assign_advantages([group], maxrl)  # the mean is 1
    assert [t.advantage for t in group.trajectories] == [2.0, -1.0, -1.0]
    for t in group.trajectories:
        t.reward = -1.0
    assign_advantages([group], maxrl)
    assert [t.advantage for t in group.trajectories] == [0.0, 0.0, 0.0]


def test_parts_of_a_reward_are_normalised_each_by_itself(tmp_path):
    flags = ["--advantage.kind", f"{write_own_file('An advantage', tmp_path)}:gdpo"]
    cfg = load_config(RLConfig, [*RL, *flags]).advantage
    parts = [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    trajectories = [
        Trajectory("p", str(i), [5], [1], [0.0], reward=0.5, reward_parts={"accuracy": accuracy, "format": well_formed})
        for i, (accuracy, well_formed) in enumerate(parts)
    ]
    assign_advantages([Group(Prompt("p", [], []), trajectories)], cfg)
    third = 3**-0.5  # of three rewards with two alike, the z of these two; the z of the other is twice as large
    assert [t.advantage for t in trajectories] == pytest.approx([3 * third, 0, -3 * third], abs=1e-5)


def test_a_turn_gets_the_rewards_of_its_calls_and_of_all_later_ones_with_plain_grpo(tmp_path):
    flag = f"{write_own_file('An advantage', tmp_path)}:turn_rewards"
    cfg = load_config(RLConfig, [*RL, "--advantage.tree", flag, "--branching.selector", "none"]).advantage
    script = lambda _p, path, turn: CALL if turn < 2 - int(path) else ANSWER  # noqa: E731
    [group] = play(script, cfg=RolloutConfig(group_size=2))
    for t, reward in zip(group.trajectories, (1.0, 0.0), strict=True):
        t.reward = reward
        for turn in t.turns:
            turn.tool_calls = [replace(call, info={"reward": 0.5}) for call in turn.tool_calls]
    assign_advantages([group], cfg)
    first, second = group.trajectories  # totals 2 and 0.5: the mean is 1.25
    for t, expected in ((first, [0.75, 0.25, -0.25]), (second, [-0.75, -1.25])):
        credits = token_advantages(group, cfg.tree, cfg)[t.trajectory_id]
        assert [set(credits[turn.start : turn.end]) for turn in t.turns] == [{value} for value in expected]


def test_a_malformed_call_gets_an_advantage_of_its_own(tmp_path):
    flag = f"{write_own_file('An advantage', tmp_path)}:bad_calls"
    cfg = load_config(RLConfig, [*RL, "--advantage.tree", flag]).advantage
    script = lambda _p, path, turn: [f"oops{path}</search>", CALL, ANSWER][turn]  # noqa: E731
    [group] = play(script, cfg=RolloutConfig(group_size=2))
    for t, reward in zip(group.trajectories, (1.0, 0.0), strict=True):
        t.reward = reward
    assign_advantages([group], cfg)
    for t in group.trajectories:
        credits = token_advantages(group, cfg.tree, cfg)[t.trajectory_id]
        bad, good, answer = t.turns
        assert set(credits[bad.start : bad.end]) == {-1.0}
        assert set(credits[good.start : good.end]) == set(credits[answer.start :]) == {t.advantage}


# ---- branching


def script(prompt_id, path, turn):
    """Two searches, then the answer. After the first result half of the tokens stand out against root 0, none against
    root 1; after the second all do, but only against root 0. In the mean the entropy falls, but for root 0's last."""
    text = CALL if turn < 2 else "<think>t</think><answer>1</answer>"
    if turn == 0:
        return text, [1.0] * 8 if path == "0" else [3.0] * 8
    return text, [1.5] * 4 + [0.1] * 4 if turn == 1 else [1.2] * 8


def decisions(selector: str, *flags: str) -> dict[str, dict[int, list]]:
    """Trajectory -> turn -> [P, number of children]."""
    sizes = ["--rollout.group_size", "6", "--branching.num_initial_rollouts", "2", "--branching.entropy_tokens", "8"]
    rule = ["--branching.selector", selector, "--branching.threshold", "0.45"]
    cfg = load_config(RLConfig, [*RL, *sizes, *rule, *flags])
    [group] = play(script, cfg=cfg.rollout, branching=cfg.branching)
    return {
        t.trajectory_id: {
            i: [turn.decision.probability, turn.decision.num_children]
            for i, turn in enumerate(t.turns)
            if turn.decision
        }
        for t in group.trajectories
    }


def test_decisions_follow_a_rule_on_the_token_entropies_of_turn_and_root(tmp_path):
    # Root 0 branches after both results. Its child has the parent's first turn, so all tokens of its own last turn
    # stand out too, and it branches as well; against root 1's first turn nothing stands out.
    rule = f"{write_own_file('A branching rule', tmp_path)}:spikes"
    assert decisions(rule) == {
        "0": {1: [0.5, 1], 2: [1.0, 1]},
        "0.0": {2: [1.0, 1]},
        "0.0.0": {},
        "0.1": {},
        "1": {1: [0.0, 0], 2: [0.0, 0]},
        "2": {},
    }
    assert decisions(rule, "--branching.base", "0.4")["0"] == {1: [0.4, 0], 2: [0.8, 1]}  # a knob of its section
    means = decisions("arpo", "--branching.threshold", "0.5")["0"]
    assert [children for _, children in means.values()] == [0, 1]


def test_a_retrospective_selector_is_one_file_and_one_flag(tmp_path):
    flags = ["--branching.num_initial_rollouts", "2", "--branching.expansion_rounds", "1", "--rollout.group_size", "4"]
    selector = f"{write_own_file('A branching rule', tmp_path)}:middle"
    cfg = load_config(RLConfig, [*RL, *flags, "--branching.selector", selector])
    [group] = play(
        lambda p, path, turn: CALL if turn < 3 - 2 * int(path[0]) else ANSWER,
        cfg=replace(cfg.rollout, max_response_tokens=600, answer_reserve_tokens=60),
        branching=cfg.branching,
    )
    assert [t.trajectory_id for t in group.trajectories] == ["0", "0.0", "1", "1.0"]
    with pytest.raises(UserError, match=r"base=0\.4 is ignored unless branching\.selector=arpo"):
        load_config(RLConfig, [*RL, "--branching.selector", selector, "--branching.base", "0.4"])


# ---- tools


@dataclass(frozen=True)
class Config:
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


def test_a_tool_from_a_function_is_the_function_and_one_flag(tmp_path):
    name = f"{write_own_file('A tool from a function', tmp_path)}:age"
    cfg = load_config(Config, ["--tools.names", name, "--tools.price_per_call", "age=0.5"]).tools
    tool = make_tools(cfg)["age"]
    arguments = ('{"born": 1912, "year": 1950}', '{"born": "1912"}', "1912")
    price = prices_of(cfg)["age"]
    right, mistyped, bare = (asyncio.run(answer(tool, argument, None, price=price)) for argument in arguments)
    assert (right.ok, right.cost, right.text) == (True, 0.5, "38") and list(tool_schemas(cfg)) == ["age"]
    assert (mistyped.ok, mistyped.cost) == (False, 0.0)
    assert mistyped.text == 'Error: the argument "born" of age must be an integer, not "1912".'
    assert bare.text.startswith("Error: the arguments of age must be a JSON object")
    for tools in (cfg.names, tool_schemas(cfg)):
        prompt = system_prompt_for("default", tools)
        assert '<age> {"born": 1} </age>' in prompt and "Tell how old somebody is at the end of a year." in prompt
        assert '"description": "the year of birth"' in prompt


def test_a_tool_with_state_is_one_file_and_one_flag(tmp_path):
    name = f"{write_own_file('A tool with state', tmp_path)}:Ledger"
    tokenizer, tools = byte_tokenizer(), make_tools(ToolsConfig(names=(name,)))
    codec = TagsCodec(tokenizer, tools=tools)
    ids = tuple(codec.render_prompt([{"role": "user", "content": "q"}]))
    [group] = play(
        lambda _prompt, path, turn: f"<ledger>{turn - len(path)}</ledger>" if turn < 3 else "done",
        cfg=RolloutConfig(group_size=6, max_response_tokens=900, answer_reserve_tokens=60),
        branching=BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2),
        tools=[*tools.values()], prompts=[Prompt("p", [], [], meta={"balance": 7}, token_ids=ids)], codec=codec,
    )  # fmt: skip
    for t in group.trajectories:
        balance = 7
        for call in t.tool_calls:
            balance += int(call.argument)
            assert (call.result, call.info, call.replayed) == (str(balance), {"balance": balance}, 0), call
    assert sum(t.parent_id is not None for t in group.trajectories) == 4
    assert "an account" in system_prompt_for("default", [name])


def calculator(folder: Path, **options: object) -> list[str]:
    """The flags that load the calculator with these options."""
    name = f"{write_own_file('A tool with options', folder)}:Calculator"
    return ["--tools.names", name, "search", "--tools.options", json.dumps({name: options})]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"digit": 3}, "unknown key 'digit'; did you mean 'digits'"),
        ({"size": 3}, "unknown key 'size'; there are digits$"),
        ({"digits": "many"}, "digits.*many"),
        ({"digits": 3.5}, "digits.*3.5"),
    ],
)
def test_an_option_of_a_tool_is_checked_like_any_knob(tmp_path, options, words):
    cfg = load_config(Config, calculator(tmp_path, **options)).tools
    with pytest.raises(UserError, match=rf"^tools\.options: .*:Calculator: .*{words}") as error:
        tool_schemas(cfg)
    assert "\n" not in str(error.value)


def test_options_stand_in_yaml_as_mappings_and_those_of_no_loaded_tool_or_of_one_without_any_are_refused(tmp_path):
    name = f"{write_own_file('A tool with options', tmp_path)}:Calculator"
    (tmp_path / "c.yaml").write_text(f"tools:\n  names: [{name}]\n  options:\n    - {{{name}: {{digits: 3}}}}\n")
    assert make_tools(load_config(Config, [str(tmp_path / "c.yaml")]).tools)["calculator"].cfg.digits == 3
    code = "class Dash:\n    tag = 'dash'\n    def __init__(self, cfg: Options): ...\n    async def run(self, _): ...\n"
    head = "import dataclasses\n@dataclasses.dataclass\nclass Options:\n    text: str\n    texts: tuple[str, ...]\n"
    (tmp_path / "dash.py").write_text(head + code)
    dash = {f"{tmp_path}/dash.py:Dash": {"text": "-x", "texts": ["--text"]}}
    made = own_options(*dash, ToolsConfig(names=tuple(dash), options=(json.dumps(dash),)))
    assert (made.text, made.texts) == ("-x", ("--text",))
    age = f"{write_own_file('A tool from a function', tmp_path)}:age"
    with pytest.raises(UserError, match=r"takes no options \(its constructor"):
        tool_schemas(load_config(Config, ["--tools.names", age, "--tools.options", json.dumps({age: {"a": 1}})]).tools)
    for entry, words in (
        ('{"python": {"wall_s": 3}}', r"'python' must be, once, a FILE.py:NAME of tools.names \(none\)"),
        ("[3]", r"an entry must be a mapping like .*, not '\[3\]'"),
        ('{"x.py:X": 3}', "an entry must be a mapping like "),
    ):
        with pytest.raises(UserError, match=rf"tools\.options: {words}"):
            load_config(Config, ["--tools.options", entry])


PLAIN = """
from arpo.protocol.schema import text_schema
from arpo.tools.base import ToolResult

class Plain:
    tag = "plain"
    async def run(self, argument, context):
        return ToolResult(f"plain {context}", ok=True)

class Renamed(Plain):
    schema = text_schema("other", "Say it again.", "text", "Any text.")

class SeveralRenamed:
    def schemas(self):
        return {"plain": Renamed.schema}
    def tools(self):
        return {"plain": Plain()}

class Several:
    def schemas(self):
        return {"plain": text_schema("plain", "Say it again.", "text", "Any text.")}
    def tools(self):
        return {"plain": Plain()}
"""


@pytest.mark.parametrize("name", ["Plain", "Several"])
def test_a_tool_need_not_derive_from_the_base_class(tmp_path, name):
    (tmp_path / "mine.py").write_text(PLAIN)
    tools = make_tools(ToolsConfig(names=(f"{tmp_path}/mine.py:{name}",)))
    runner = ToolRunner(tools)
    runner.start("call", "plain", "x", "the context")
    [(_, result)] = runner.collect(block=True)
    runner.close()
    assert (result.text, result.ok) == ("plain the context", True) and not take_counts(tools)
    with pytest.raises(UserError, match="has the tag 'plain', which is taken"):
        tool_schemas(ToolsConfig(names=(f"{tmp_path}/mine.py:{name}",) * 2))
    other = {"Plain": "Renamed", "Several": "SeveralRenamed"}[name]
    with pytest.raises(UserError, match=f"{other} has the tag 'plain', but its schema is named 'other'; make them"):
        tool_schemas(ToolsConfig(names=(f"{tmp_path}/mine.py:{other}",)))


FAULTY = """
from arpo.tools.base import ToolResult

class Tool:
    tag = "tool"
    async def run(self, argument):
        return ToolResult(argument, ok=True)

class NeedsMore(Tool):
    def __init__(self, cfg): ...

class Fails(Tool):
    def __init__(self):
        raise OSError("no licence")

class Mistyped(Tool):
    def __init__(self, cfg: "Absent"): ...

class PropertyTag(Tool):
    tag = property(lambda self: "tool")

class DictSchema(Tool):
    schema = {"name": "tool"}

class TextAbout(Tool):
    about = "a tool"
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NeedsMore", "failed (TypeError: NeedsMore.__init__() missing 1 required positional argument: 'cfg')"),
        ("Fails", "failed (OSError: no licence, in line 14 of faulty.py)"),
        ("Mistyped", "reading its types failed (NameError: name 'Absent' is not defined"),
        ("PropertyTag", "its tag is <property object"),
        ("DictSchema", "its schema is {'name': 'tool'} (dict); it must be a ToolSchema"),
        ("TextAbout", "its about is 'a tool'; it must be a About"),
    ],
)
def test_a_class_that_cannot_be_a_tool_is_one_line_with_its_name(tmp_path, name, words):
    (tmp_path / "faulty.py").write_text(FAULTY)
    with pytest.raises(UserError) as error:
        make_tools(ToolsConfig(names=(f"{tmp_path}/faulty.py:{name}",)))
    assert f"faulty.py:{name}" in str(error.value) and words in str(error.value) and "\n" not in str(error.value)


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


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What a rollout of SCRIPTS with the calculator of the docs says to reward, metrics, grades and prompt."""
    folder = tmp_path_factory.mktemp("tool")
    (folder / "corpus.jsonl").write_text(
        json.dumps({"contents": "otter <calculator>1</calculator> <answer>5</answer>"}) + "\n"
    )
    local = ["--tools.search.backend", "local", "--tools.search.corpus", f"{folder}/corpus.jsonl"]
    cfg = load_config(Config, [*calculator(folder, digits=3), "--tools.price_per_call", "calculator=0.5", *local])
    tokenizer = byte_tokenizer()
    loaded = make_tools(cfg.tools) | {"python": EchoTool("python", "6.67")}
    codec, runner = TagsCodec(tokenizer, tools=loaded), ToolRunner(loaded, prices_of(cfg.tools))
    ids = tuple(codec.render_prompt([{"role": "user", "content": "q"}]))
    prompts = [Prompt(name, [{"role": "user", "content": "q"}], ["4"], "gsm8k", token_ids=ids) for name in SCRIPTS]
    groups = rollout(
        prompts,
        ScriptedEngine(tokenizer, lambda prompt, _path, turn: SCRIPTS[prompt][turn]),
        runner,
        codec,
        RolloutConfig(group_size=1, max_response_tokens=900, answer_reserve_tokens=60),
        BranchingConfig(selector="none", num_initial_rollouts=1),
        seed=0,
    )
    runner.close()
    by_bonus = {}
    for bonus in (cfg.reward.bonus_tools, ("search", "calculator")):
        score_groups(groups, replace(cfg.reward, bonus_tools=bonus), tools=tuple(loaded))
        by_bonus["+".join(bonus)] = {g.prompt.prompt_id: g.trajectories[0].to_dict() for g in groups}
    values = rollout_metrics(groups).values()
    dump = SetDump(folder, "own", metric="reward", tools=tuple(loaded), protocol="tags")
    for g in groups:
        dump.add(g, [0.0])
    records = {record.question_id: record for record in read_records(folder)}
    return {
        "plain": by_bonus["search+python"],
        "bonus": by_bonus["search+calculator"],
        "metrics": values,
        "well_formed": {name: well_formed(record) for name, record in records.items()},
        "prompt": system_prompt_for("default", cfg.tools.names),
    }


def test_calls_of_the_tool_earn_and_lose_what_those_of_python_do_and_the_bonus_can_be_for_it(found):
    plain = found["plain"]

    def reward(name: str) -> tuple[float, dict, str]:
        return plain[name]["reward"], plain[name]["reward_parts"], plain[name]["reward_reason"]

    right = (1.0, {"format": 1.0, "accuracy": 1.0, "tool_bonus": 0.0}, "")
    assert reward("calculator") == reward("python") == right
    assert reward("unclosed") == reward("unclosed_python")
    assert (reward("unclosed")[0], reward("unclosed")[2]) == (-1.0, "unclosed_call")
    assert (reward("unopened")[0], reward("unopened")[2]) == (-1.0, "unopened_call")
    with_bonus = {name: trajectory["reward"] for name, trajectory in found["bonus"].items()}
    assert with_bonus["both"] == 1.1 and plain["both"]["reward"] == 1.0
    assert with_bonus["failed"] == with_bonus["calculator"] == 1.0


def test_the_tools_knob_acts_and_its_tags_in_a_search_result_are_escaped(found):
    [[calculated], [searched]] = [
        [call for turn in found["plain"][name]["turns"] for call in turn["tool_calls"]]
        for name in ("calculator", "search")
    ]
    assert calculated["result"] == "6.67" and searched["ok"]
    assert "&lt;calculator&gt;1&lt;/calculator&gt; &lt;answer&gt;5" in searched["result"]
    assert "<calculator>" not in searched["result"] and found["plain"]["search"]["reward"] == 1.0


def test_prompt_metrics_prices_and_grades_know_the_tool(found):
    assert "with the help of a search tool and a calculator." in found["prompt"]
    metrics = found["metrics"]
    assert metrics["tools/calculator/calls"] == 3 and metrics["tools/calculator/not_run"] == 1
    assert metrics["tools/calculator/failed_error"] == 1 and metrics["tools/calculator/cost"] == 2 * 0.5
    ill_formed = {"unclosed", "unclosed_python", "unopened"}
    assert {name for name, good in found["well_formed"].items() if not good} == ill_formed


# ---- a reward, a tracker


def test_a_reward_and_a_term_are_one_file_and_one_flag(tmp_path):
    file = write_own_file("A reward", tmp_path)
    right = ToolCall("search", "q", result="it is 4", ok=True, executed=True)
    t = Trajectory("p", "0", [5], [1], [0.0], turns=[Turn(0, 1, 1, tool_calls=[right])], text="4")
    group = Group(Prompt("p", [], ["4"], "gsm8k"), [t])
    score_groups([group], RewardConfig(), load_custom("reward.file", f"{file}:compute_score"), tools=("search",))
    assert t.reward == 1.0
    cfg = load_config(RLConfig, [*RL, "--reward.terms", f"{file}:useful_searches=0.2"]).reward
    score_groups([group], cfg, tools=("search",), terms=load_terms(cfg, 100))
    assert t.reward == 0.2 and t.reward_parts == {"useful_searches": 1.0}


def test_an_order_is_one_file_and_one_flag(tmp_path):
    prompts = [Prompt(str(i), [], [], meta={"pass_rate": i / 10}) for i in range(11)]
    order = make_order(f"{write_own_file('An order of prompts', tmp_path)}:Order", prompts, 2, 0)
    drawn = [index for step in range(order.steps_per_epoch) for index, _ in order.queue(2 * step, 2)]
    assert sorted(drawn) == list(range(10)) and order.steps_per_epoch == 5


def test_a_tracker_is_one_file_and_one_flag(tmp_path):
    name = f"{write_own_file('A tracker', tmp_path)}:Lines"
    cfg = load_config(RLConfig, [*RL, "--run.trackers", name])
    said = []
    trackers = Trackers(cfg.run.trackers, TrackedRun(tmp_path, cfg, RL_CHARTS, 0), say=said.append)
    trackers.scalars(3, {"loss/policy": 0.5}, {})
    trackers.close()
    assert json.loads((tmp_path / "lines.jsonl").read_text()) == {"step": 3, "loss": 0.5} and not said


# ---- a whole run

TIMED = re.compile(r"^(time|memory)/|per_s|seconds|cached|mfu|utilization")
OURS_IN_A_FILE = """
from arpo.advantages import grpo, hard
from arpo.branching import arpo as entropy_rise
from arpo.log.trackers import TensorBoard
from arpo.losses import AGGREGATIONS, ppo
from arpo.rollout_correction import ROLLOUT_CORRECTIONS
from arpo.tools.python import PythonTool

mean, masked = AGGREGATIONS["sequence_mean_token_mean"], ROLLOUT_CORRECTIONS["mis"]


def rule(evidence, cfg):
    return entropy_rise(evidence, cfg)
"""


@pytest.mark.slow
def test_a_run_on_functions_of_a_file_is_to_the_bit_the_run_on_ours(tmp_path):
    world, file = build_toy_world(tmp_path), tmp_path / "mine.py"
    file.write_text(OURS_IN_A_FILE)
    sizes = ("--run.num_steps", "2", "--run.validate_every", "0", "--data.valid", "", "--rollout.group_size", "4",
             "--branching.num_initial_rollouts", "2")  # fmt: skip
    options = ("loss.kind", "loss.aggregation", "loss.rollout_correction", "advantage.kind", "advantage.tree",
               "branching.selector", "run.trackers")  # fmt: skip
    ours = ("ppo", "sequence_mean_token_mean", "mis", "grpo", "hard", "arpo", "tensorboard")
    mine = [f"{file}:{name}" for name in ("ppo", "mean", "masked", "grpo", "hard", "rule", "TensorBoard")]
    tool = f"{file}:PythonTool"
    tools = ["--tools.names", tool, "search", "--tools.options", json.dumps({tool: {"wall_s": 20}})]
    runs = {}
    for name, chosen, more in (("ours", ours, ["--tools.names", "python", "search"]), ("mine", mine, tools)):
        flags = [word for option, value in zip(options, chosen, strict=True) for word in (f"--{option}", value)]
        rows = train(world, name, *sizes, *flags, *more, ranks=2)
        runs[name] = [{k: v for k, v in row.items() if not TIMED.search(k)} for row in rows]
    # how far the entropies moved P is known for our rule alone
    signals = [row.pop("branching/signal", 0.0) for row in runs["ours"]]
    assert any(signals)
    assert runs["ours"] == runs["mine"] and len(runs["ours"][0]) > 40
    assert list((world / "runs" / "mine" / "tb").iterdir())  # a tracker's own


USE_EDITS = """
from dataclasses import replace
from helpers.scripted_rollout import ANSWER, CALL, LONG, NO_BRANCHES, play, prompt
from arpo.selection import trained_on

once = replace(prompt("once"), meta={"max_tool_calls": 1})
calls = [CALL, CALL.replace("q", "r"), CALL.replace("q", "r"), ANSWER]
cfg = replace(LONG, group_size=1)
for asked in (once, prompt("free")):
    [group] = play(lambda _prompt, _path, turn: calls[turn], cfg=cfg, branching=NO_BRANCHES, prompts=[asked])
    [t] = group.trajectories
    print(asked.prompt_id, t.stop_reason, [call.error_kind for call in t.tool_calls])
t.stop_reason = "length"
assert not trained_on(group)
"""


def test_the_edits_of_the_rollout_do_what_they_say(tmp_path):
    """verl #7697 and webarena #237: repeated calls. trl #3248, NeMo-RL #724: cut responses. Search-R1 #100: limits."""
    copy = edited_copy(tmp_path, [])
    make_diffs(copy, "An edit")
    assert run_in(copy, USE_EDITS) == "once tool_limit [None, 'limit']\nfree tool_limit [None, None]\n"


SEEN_STEP = """
def seen(trajectory, prompt):
    length = len(trajectory.text)
    return {"score": length % 3, "accuracy": length % 2, "step": getattr(seen, "step", 0)}
"""


@pytest.mark.slow
def test_a_run_with_all_edits_of_the_docs_does_what_they_say(tmp_path):
    world = build_toy_world(tmp_path / "world")
    (world / "reward.py").write_text(SEEN_STEP)
    copy = edited_copy(tmp_path, [])
    make_diffs(copy, "An edit")
    shutil.copy(ROOT / "arpo/selection.py", copy / "arpo")  # this model's responses are nearly all cut
    sizes = ["--run.num_steps", "2", "--run.validate_every", "2", "--run.save_every", "1"]
    once = ["--update.num_prompts_per_minibatch", "4", "--reward.file", f"{world}/reward.py:seen"]
    anchored = ["--loss.kl_coefficient", "0.1", "--optim.schedule", "constant", "--optim.warmup_ratio", "0"]
    command = [sys.executable, "train_rl.py", str(world / "config.yaml"), *sizes, *once, *anchored]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]

    before, first, second = read_metrics(world / "runs" / "rl")
    assert before["valid/samples"] == second["valid/samples"] == 4
    assert (first["reward/step"], second["reward/step"]) == (1, 2)
    assert first["loss/kl"] == second["loss/kl"] == 0  # the reference was the policy, just before the only update
    assert 1 <= first["mine/turns"] <= 3
    begun, ended = (load_file(path / "model.safetensors") for path in (world / "model", world / "runs" / "rl" / "hf"))
    assert [name for name, weight in begun.items() if torch.equal(weight, ended[name])] == ["model.embed_tokens.weight"]


# ---- a benchmark

USE_FRAMES = """
import json
from pathlib import Path
from arpo.evals.benchmarks import read_benchmark, select

Path("sets/frames").mkdir(parents=True)
row = {"Prompt": "Who wrote it?", "Answer": "Jane Austen", "reasoning_types": "multi hop"}
Path("sets/frames/test.jsonl").write_text(json.dumps(row))
chosen, absent = select(("frames",), "sets")
assert set(chosen) == {"frames"} and not absent
assert "frames" in select(("qa",), "sets")[0]
[prompt] = read_benchmark("frames", chosen["frames"], "sets")
assert prompt.answers == ["Jane Austen"] and prompt.meta == {"split": "multi hop"}
assert prompt.messages[-1]["content"] == "Who wrote it?" and prompt.messages[0]["role"] == "system"
print(chosen["frames"].grader)
"""


def test_a_benchmark_is_one_line(tmp_path):
    edits = edits_of("A benchmark")
    assert [code.count("\n") for _, code in edits] == [1]
    assert run_in(edited_copy(tmp_path, edits), USE_FRAMES) == "qa\n"
