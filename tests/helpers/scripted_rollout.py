"""Rollouts on a scripted engine: one call of `play` is a rollout of which a test says everything."""

from helpers.fakes import EchoTool, ScriptedEngine, byte_tokenizer

from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import TagsCodec
from arpo.sampling.sampler import rollout
from arpo.tools.base import ToolRunner
from arpo.trajectory import Prompt

TOKENIZER = byte_tokenizer()
CODEC = TagsCodec(TOKENIZER)
CALL = "<think>t</think><search>q</search>"
ANSWER = "<think>t</think><answer>\\boxed{1}</answer>"
SHORT = RolloutConfig(group_size=4, max_response_tokens=600, max_result_tokens=200, answer_reserve_tokens=60)
LONG = RolloutConfig(
    group_size=8, max_response_tokens=9000, max_result_tokens=900, answer_reserve_tokens=60, max_tool_calls=6
)
NO_BRANCHES = BranchingConfig(selector="none", num_initial_rollouts=4)


def prompt(prompt_id: str = "p0", tools=("python", "search")) -> Prompt:
    messages = [{"role": "user", "content": "question"}]
    return Prompt(prompt_id, messages, ["1"], tools=tools, token_ids=tuple(CODEC.render_prompt(messages)))


def score(groups) -> None:
    """Rewards of 0 and 1 that look random, but depend on the tokens alone."""
    for t in (t for group in groups for t in group.trajectories if t.reward is None):
        t.reward = float(len(t.token_ids) % 2)


def play(
    script, *, cfg=SHORT, branching=NO_BRANCHES, tools=None, prompts=None, seed=0, engine=None, codec=CODEC, prices=None
):
    engine = engine or ScriptedEngine(codec.tokenizer, script)
    tools = tools or [EchoTool("search", "found"), EchoTool("python", "2")]
    runner = ToolRunner({t.tag: t for t in tools}, prices)
    try:
        groups = rollout(prompts or [prompt()], engine, runner, codec, cfg, branching, seed=seed)
    finally:
        runner.close()
    return groups


def call_then_answer(_prompt, _path, turn):
    return CALL if turn == 0 else ANSWER


def tool_text(trajectory) -> str:
    return "".join(text for text, by_model in trajectory.segments if not by_model)
