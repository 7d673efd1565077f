"""The default system prompt, made of what each tool says about itself, and putting it into a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ANSWER_RULE = r"When you are sure, give the final answer inside <answer> </answer>, the exact answer in \boxed{}."
BOX_RULE = r"When you are sure, give the final answer, the exact answer in \boxed{}."
_EXAMPLE_END = r"<answer> The final answer is \[ \boxed{42} \] </answer>"


class About(NamedTuple):
    """Texts with which a tool is introduced in the default system prompt."""

    noun: str
    """Name of the tool with its article: "a search tool"."""
    usage: str
    """Instruction to call it: "to search, write <search> query </search>"."""
    example: str
    """A call and its result. The last tool's is followed by the answer 42, which its result should lead to."""


def default_system_prompt(tools: Sequence[About]) -> str:
    r"""Return the protocol's own system prompt, for these tools in this order.

    >>> default_system_prompt([About("a clock", "to know the time, write <clock> UTC </clock>", "...")])[71:142]
    'with the help of a clock.\nThink inside <think> </think>. To know the ti'
    """
    head = "You are a helpful assistant that solves the given question step by step"
    if not tools:
        example = f"<think> what is needed, and what follows </think>{_EXAMPLE_END}"
        return f"{head}.\nThink inside <think> </think>. {ANSWER_RULE}\nExample: {example}"
    nouns = " and ".join(filter(None, (", ".join(tool.noun for tool in tools[:-1]), tools[-1].noun)))
    usage = "; ".join(tool.usage for tool in tools)
    example = "<think> what follows </think>".join(tool.example for tool in tools)
    return (
        f"{head}, with the help of {nouns}.\n"
        f"Think inside <think> </think>. {usage[0].upper()}{usage[1:]}. After each call the result appears between "
        f"<result> and </result>; then think again, and call again if you need to. {ANSWER_RULE}\n"
        f"Example: <think> what is needed </think>{example}<think> done </think>{_EXAMPLE_END}"
    )


def json_system_prompt(tools: Sequence[str]) -> str:
    """Return the system prompt for calls in JSON. The chat template lists the tools, so it names none."""
    call = " Call tools wherever they help." if tools else ""
    return f"You are a helpful assistant that solves the given question step by step.{call} {BOX_RULE}"


def with_system_prompt(messages: list[dict[str, str]], system_prompt: str) -> list[dict[str, str]]:
    """Return the messages with this system prompt instead of their own. `keep` leaves theirs, `none` removes it."""
    if system_prompt == "keep":
        return messages
    rest = [m for m in messages if m["role"] != "system"]
    return rest if system_prompt in ("none", "") else [{"role": "system", "content": system_prompt}, *rest]
