"""Branches after calls of tools with state, on a real vLLM engine, with the real jail and real databases.

The tokens are prescribed in the engine's sampler, so that a random model makes calls that mean something; the rest is
as ever: prefix cache, entropies, decisions, the order in which tools answer.
"""

import asyncio
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
from helpers.python_tools import start
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import TagsCodec
from arpo.sampling.sampler import rollout
from arpo.tools.base import ToolContext, ToolRunner
from arpo.trajectory import Prompt
from benchmarks.rollout_streaming import PrescribedTokens
from extras.tools.notebook import NotebookConfig, NotebookTool
from extras.tools.sql import SqlConfig, SqlTool

CFG = RolloutConfig(
    group_size=6, max_response_tokens=1500, max_tool_calls=4, max_result_tokens=200, answer_reserve_tokens=20
)
SETUP = "CREATE TABLE t (x INTEGER); INSERT INTO t VALUES (1), (2);"
NOTEBOOK = NotebookConfig(wall_s=60.0, session_cpu_s=60.0, memory_mib=256, max_concurrent=4)
SELECTORS = {
    "forked at results": BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2, entropy_tokens=4),
    "replayed after the end": BranchingConfig(selector="tree_grpo", num_initial_rollouts=2),
}


class Calls(PrescribedTokens):
    """Four calls of either tool, then an answer; the code depends on the trajectory and the turn."""

    def make(self, request_id: str) -> list[int]:
        _, path, turn = request_id.rsplit("|", 2)
        number = random.Random(request_id).randrange(100)
        calls = [
            f"<notebook>x = globals().get('x', []) + [{number}]\nimport random\n(x, random.random())</notebook>",
            f"<sql>INSERT INTO t VALUES ({number}); SELECT count(*), sum(x) FROM t</sql>",
        ]
        is_last = int(turn) == CFG.max_tool_calls
        text = f"answer of {path}" if is_last else calls[random.Random(f"{request_id}|tool").randrange(2)]
        return [*self.codec.tokenizer.encode(text, add_special_tokens=False), self.codec.tokenizer.eos_token_id]


@pytest.mark.slow
def test_siblings_read_what_fresh_sessions_that_are_asked_the_same_read(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    tools = {"notebook": start(NOTEBOOK, kind=NotebookTool), "sql": SqlTool(SqlConfig())}
    codec = TagsCodec(AutoTokenizer.from_pretrained(folder), tools=tuple(tools))
    engine_cfg = EngineConfig(dtype="float32", kv_cache_gib=0.05, max_num_seqs=32)
    engine = Engine(str(folder), engine_cfg, max_model_len=2000, seed=0)
    runner = ToolRunner(tools)
    messages = [{"role": "user", "content": "how many?"}]
    prompts = [
        Prompt(f"p{i}", messages, ["42"], meta={"sql": SETUP}, token_ids=tuple(codec.render_prompt(messages)))
        for i in range(2)
    ]
    try:
        engine.llm.collective_rpc(Calls(codec, 0, 0).install)
        for name, branching in SELECTORS.items():
            groups = rollout(prompts, engine, runner, codec, CFG, branching, seed=f"1|{name}")
            branches = [t for g in groups for t in g.trajectories if t.parent_id and t.own_tool_calls]
            assert branches, name
            replayed = sum(c.replayed for t in branches for c in t.tool_calls)
            is_exact = name == "forked at results" and tools["notebook"].sandbox.tier == "namespaces"
            assert replayed == 0 if is_exact else replayed > 0
            for t in (t for group in groups for t in group.trajectories):
                assert len(t.tool_calls) == 4 and all(call.executed for call in t.tool_calls)
                assert [c.result for c in t.tool_calls] == asyncio.run(read_alone(tools, t.tool_calls)), t.trajectory_id
                assert not any(call.replay_mismatches for call in t.tool_calls)
    finally:
        runner.close()
        engine.close()


async def read_alone(tools: dict, calls: list) -> list[str]:
    context = ToolContext("p", "alone", 0, row={"sql": SETUP})
    sessions = {tag: await tool.open(context) for tag, tool in tools.items()}
    results = [await tools[c.tag].run(c.argument, context, sessions[c.tag]) for c in calls]
    for tag, tool in tools.items():
        await tool.close(sessions[tag])
    return [result.text for result in results]
