"""The default system prompt, built from the tools' introductions, and its place in a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence

from arpo.protocol.schema import About, ToolSchema, example_call

ANSWER_RULE = r"When you are sure, give the final answer inside <answer> </answer>, the exact answer in \boxed{}."
BOX_RULE = r"When you are sure, give the final answer, the exact answer in \boxed{}."
_EXAMPLE_END = r"<answer> The final answer is \[ \boxed{42} \] </answer>"


def default_system_prompt(tools: Sequence[About], listed: Sequence[ToolSchema] = ()) -> str:
    r"""Return the default system prompt for these tools, in this order.

    listed: tools without an introduction. Their schemas are listed at the end.

    >>> default_system_prompt([About("a clock", "to know the time, write <clock> UTC </clock>", "...")])[73:144]
    'with the help of a clock.\nThink inside <think> </think>. To know the ti'
    """
    head = "You are a helpful assistant that solves the given question step by step"
    if not tools and not listed:
        example = f"<think> what is needed, and what follows </think>{_EXAMPLE_END}"
        return f"{head}.\nThink inside <think> </think>. {ANSWER_RULE}\nExample: {example}"
    if listed:
        call = f"<{listed[0].name}> {example_call(listed[0])} </{listed[0].name}>"
        usage = f"to call a tool of the list, write its arguments between its tags, like {call}"
        example = "" if tools else f"{call} <result> 42 </result>"  # the examples of other tools are enough
        tools = [*tools, About("the tools listed at the end", usage, example)]
    *others, last = [tool.noun for tool in tools]
    nouns = f"{', '.join(others)} and {last}" if others else last
    usage = "; ".join(tool.usage for tool in tools)
    example = "<think> what follows </think>".join(tool.example for tool in tools if tool.example)
    return (
        f"{head}, with the help of {nouns}.\n"
        f"Think inside <think> </think>. {usage[0].upper()}{usage[1:]}. After each call the result appears between "
        f"<result> and </result>; then think again, and call again if you need to. {ANSWER_RULE}\n"
        f"Example: <think> what is needed </think>{example}<think> done </think>{_EXAMPLE_END}"
        f"{''.join(map(_listing, listed))}"
    )


def json_system_prompt(tools: Sequence[str]) -> str:
    """Return the system prompt for calls in JSON. No tool is named, since the chat template lists the tools."""
    call = " Call tools wherever they help." if tools else ""
    return f"You are a helpful assistant that solves the given question step by step.{call} {BOX_RULE}"


def _listing(schema: ToolSchema) -> str:
    r"""Return a tool's entry in the list: a call, the description, and the arguments.

    >>> _listing(ToolSchema("now", "Tell the time.", {"type": "object", "properties": {}}))
    '\n\n<now> {} </now>\nTell the time.\nArguments, as a JSON schema: {"type": "object", "properties": {}}'
    """
    name = schema.text_argument
    if name:
        arguments = f"{name}: {schema.properties[name].get('description', 'a text')}"
        choices = schema.properties[name].get("enum")
        if choices:
            arguments += f" (one of {json.dumps(choices, ensure_ascii=False)})"
    else:
        arguments = f"Arguments, as a JSON schema: {json.dumps(schema.parameters, ensure_ascii=False)}"
    return f"\n\n<{schema.name}> {example_call(schema)} </{schema.name}>\n{schema.description.strip()}\n{arguments}"


def with_system_prompt(messages: list[dict[str, str]], system_prompt: str) -> list[dict[str, str]]:
    """Return the messages with this system prompt. `keep` leaves the old system prompt, `none` removes it."""
    if system_prompt == "keep":
        return messages
    rest = [m for m in messages if m["role"] != "system"]
    return rest if system_prompt in ("none", "") else [{"role": "system", "content": system_prompt}, *rest]
