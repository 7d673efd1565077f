"""A branching rule that looks at token entropies, added to a copy of the project as a researcher would add it.

One function and one line in arpo/branching.py, one field in BranchingConfig for its knob; nothing in the rollout.
"""

import json

import pytest
from helpers.edits import edited_copy, run_in

SPIKES = '''

def spikes(evidence: Evidence, cfg: BranchingConfig) -> float:
    """P = the share of the turn's first tokens that are less certain than the first turn ever was, times a weight."""
    bound = max(evidence.root_entropies)
    share = sum(entropy > bound for entropy in evidence.entropies) / len(evidence.entropies)
    return min(1.0, cfg.spike_weight * share)
'''
EDITS = {
    "arpo/branching.py": [
        ("    return cfg.base\n", SPIKES),
        ('    "random": at_random,\n', '    "spikes": spikes,\n'),
    ],
    "arpo/options.py": [("    threshold: float = 0.5\n", '    """ """\n    spike_weight: float = 1.0\n')],
}

USE_SPIKES = '''
import json

from helpers.fakes import EchoTool, ScriptedEngine, byte_tokenizer

from arpo.config import load_config
from arpo.protocol import Codec
from arpo.rollout import rollout
from arpo.tools.base import ToolRunner
from arpo.trajectory import Prompt
from train_rl import RLConfig

COMMON = [
    "--data.train", "x", "--rollout.group_size", "6", "--branching.num_initial_rollouts", "2",
    "--branching.entropy_tokens", "8", "--branching.rule", "threshold",
]
RUNS = {
    "plain": ["--branching.selector", "spikes", "--branching.threshold", "0.45"],
    "weighted": ["--branching.selector", "spikes", "--branching.threshold", "0.45", "--branching.spike_weight", "0.8"],
    "means": ["--branching.selector", "arpo"],
}

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
    [group] = rollout([prompt], engine, tools, codec, cfg.rollout, cfg.branching, seed=0)
    tools.close()
    return {
        t.trajectory_id: {i: [turn.decision.probability, turn.decision.num_children]
                          for i, turn in enumerate(t.turns) if turn.decision}
        for t in group.trajectories
    }

print(json.dumps({name: decisions(flags) for name, flags in RUNS.items()}))
'''
Decisions = dict[str, dict[str, list]]
"""Trajectory -> turn -> [P, number of children]."""


@pytest.fixture(scope="module")
def decisions(tmp_path_factory) -> dict[str, Decisions]:
    """What rollouts on the scripted engine decide with each of RUNS, in a copy of the package with the rule in it."""
    folder = edited_copy(tmp_path_factory.mktemp("extended"), EDITS)
    return json.loads(run_in(folder, USE_SPIKES))


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
