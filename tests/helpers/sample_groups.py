"""Groups of trajectories with everything in them that dumps, viewer and report show."""

from helpers.fakes import EchoTool, ScriptedEngine, byte_tokenizer

from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import TagsCodec
from arpo.sampling.sampler import rollout
from arpo.tools.base import ToolResult, ToolRunner
from arpo.trajectory import BranchDecision, Group, Prompt, StopReason, ToolCall, Trajectory, Turn

CODEC = TagsCodec(byte_tokenizer())
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--<script>"


def script(_prompt: str, path: str, turn: int) -> tuple[str, float]:
    """Two searches and an answer; the roots are sure of themselves until the second result surprises them."""
    if turn < 2:
        return f"<think>{HOSTILE}</think><search>q{turn} of {path}</search>", 1.0 + turn
    return f"<think>t</think><answer>\\boxed{{{len(path)}}}</answer>", 0.5


def sample_groups(num_prompts: int = 3) -> list[Group]:
    """Branched groups of a real rollout. The first prompt's rewards differ, the others' are alike."""

    def search(argument: str) -> ToolResult:
        if argument.startswith("q0"):
            return ToolResult(f"found {HOSTILE}", ok=True, cached=True, seconds=0.25)
        return ToolResult("Error: no answer", ok=False, error_kind="timeout", seconds=2.5)

    prompts = []
    for i in range(num_prompts):
        messages = [{"role": "user", "content": f"question {i} {HOSTILE}"}]
        prompts.append(Prompt(f"p{i}", messages, ["1"], token_ids=tuple(CODEC.render_prompt(messages))))
    always = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2)
    cfg = RolloutConfig(group_size=6, max_response_tokens=1200, max_result_tokens=300, answer_reserve_tokens=60)
    runner = ToolRunner({"search": EchoTool("search", search)})
    try:
        groups = rollout(prompts, ScriptedEngine(CODEC.tokenizer, script), runner, CODEC, cfg, always, seed=0)
    finally:
        runner.close()
    for i, group in enumerate(groups):
        for k, trajectory in enumerate(group.trajectories):
            trajectory.reward = float(i == 0 and k < 3)
            trajectory.reward_parts = {"format": 0.125, "accuracy": trajectory.reward}
            trajectory.advantage = 0.75 if trajectory.reward else -0.75
    return groups


def group() -> Group:
    """A trajectory and its branch, written by hand."""
    call = ToolCall("search", "q", "found", ok=True)
    decision = BranchDecision(0.5, 0.2, 0.56, 0.1, 0, 1, 1, "branched")
    parent = Trajectory("p", "0", [1, 2, 3, 4], [1, 0, 1, 1], [-1.0, 0.0, -1.0, -1.0])
    parent.turns = [Turn(0, 1, 2, 0.2, [call]), Turn(2, 4, 4, 0.5, decision=decision)]
    child = Trajectory("p", "0.0", [1, 2, 5], [1, 0, 1], [-1.0, 0.0, -1.0], parent_id="0", fork_at=2)
    child.turns = [Turn(0, 1, 2, 0.2, [call], inherited=True), Turn(2, 3, 3, 0.4)]
    for t, reward in ((parent, 1.0), (child, -1.0)):
        t.reward, t.reward_parts, t.stop_reason = reward, {"accuracy": float(reward > 0)}, StopReason.EOS
    child.reward_reason = "missing_answer"
    return Group(Prompt("p", [{"role": "user", "content": "q"}], ["a"]), [parent, child])
