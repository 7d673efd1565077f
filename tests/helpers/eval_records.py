"""Records of an evaluation, and replies of a judge, as tests need them."""

from arpo.evals.records import Record

CALL = {
    "tag": "search", "argument": "q", "result": "r", "ok": True, "error_kind": None,
    "executed": True, "cached": False, "seconds": 0.5, "cost": 0.0,
}  # fmt: skip


def record(text: str, answers=("4",), **other) -> Record:
    """A finished trajectory that wrote `text`; results in it are the tool's."""
    fields = {
        "benchmark": "bench", "question_id": "q0", "sample": 0, "question": "How many?", "data_source": "",
        "split": "", "segments": [], "stop_reason": "eos", "num_tokens": 10, "num_sampled_tokens": 8, "wall_s": 1.5,
        "tool_calls": [], "metric": "qa",
    }  # fmt: skip
    return Record(text=text, answers=list(answers), **{**fields, **other})


def boxed(answer: str, **other) -> Record:
    return record(rf"<think>t</think><answer>\boxed{{{answer}}}</answer>", **other)


def reply(text: object) -> dict:
    """A chat completion that says `text`."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}
