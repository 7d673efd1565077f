"""Records of an evaluation, and replies of a judge, as tests need them."""

from pathlib import Path

from arpo.evals.records import Record, SetDump, read_records
from arpo.protocol import FORMS
from arpo.trajectory import Group, ToolCall

CALL = ToolCall("search", "q", "r", ok=True, seconds=0.5)


def record(text: str, answers=("4",), **other) -> Record:
    """A finished trajectory that wrote `text`; results in it are the tool's."""
    fields = {
        "benchmark": "bench", "question_id": "q0", "sample": 0, "question": "How many?", "data_source": "",
        "stop_reason": "eos", "num_tokens": 10, "num_sampled_tokens": 8, "wall_s": 1.5,
        "tool_calls": [], "metric": "qa",
    }  # fmt: skip
    fields |= {"segments": FORMS["tags"].rules.derive_segments(text)} | other
    return Record(text=text, answers=list(answers), **fields)


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
