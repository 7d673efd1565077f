"""Records of an evaluation, and replies of a judge, as tests need them."""

from pathlib import Path

from arpo.evals.records import Record, SetDump, read_records
from arpo.protocol import FORMS
from arpo.trajectory import Group, Prompt, ToolCall, Trajectory, Turn

CALL = ToolCall("search", "q", "r", ok=True, seconds=0.5)


def record(
    text: str,
    answers=("4",),
    *,
    benchmark: str = "bench",
    question_id: str = "q0",
    sample: int = 0,
    question: str = "How many?",
    data_source: str = "",
    meta: dict | None = None,
    metric: str = "qa",
    wall_s: float = 1.5,
    segments: list | None = None,
    tool_calls=(),
    stop_reason: str = "eos",
    num_tokens: int = 10,
    num_sampled_tokens: int = 8,
    protocol: str = "tags",
) -> Record:
    """A finished trajectory that wrote `text`; results in it are the tool's."""
    messages = [{"role": "user", "content": question}]
    trajectory = Trajectory(
        question_id,
        str(sample),
        token_ids=[0] * num_tokens,
        loss_mask=[int(i < num_sampled_tokens) for i in range(num_tokens)],
        rollout_logprobs=[0.0] * num_tokens,
        turns=[Turn(0, num_tokens, num_tokens, tool_calls=list(tool_calls))],
        stop_reason=stop_reason,
        text=text,
        segments=FORMS["tags"].rules.derive_segments(text) if segments is None else segments,
    )
    return Record(
        prompt=Prompt(question_id, messages, list(answers), data_source, meta=meta or {}),
        trajectory=trajectory,
        benchmark=benchmark,
        sample=sample,
        metric=metric,
        wall_s=wall_s,
        protocol=protocol,
    )


def boxed(answer: str, **other) -> Record:
    return record(rf"<think>t</think><answer>\boxed{{{answer}}}</answer>", **other)


def saved(
    run: Path, groups: list[Group], benchmark: str, metric: str, tools=("search", "python"), protocol="tags"
) -> list[Record]:
    """The records of groups that an evaluation has saved into the run; trajectory i took i + 0.5 seconds."""
    dump = SetDump(run, benchmark, metric=metric, tools=tools, protocol=protocol)
    for group in groups:
        dump.add(group, [i + 0.5 for i in range(len(group.trajectories))])
    return read_records(run)


def reply(text: object) -> dict:
    """A chat completion that says `text`."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}
