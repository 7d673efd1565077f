r"""The tags: what the model writes to call a tool, and what it reads back. Text only, no tokenizer.

    <think> ... </think><search> Paris </search> <result>
    found passages
    </result><think> ... </think><answer> ... \boxed{Paris} ... </answer>

A turn ends when the model closes a tool's tag or emits EOS. The result is appended as ` <result>\n{text}\n</result>`
(one leading space). Result text is data: our own tags in it are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence

from arpo.protocol.calls import Call, escape_tags

PAPER_TOOLS = ("search", "python")
"""Tags of the tools of the published runs; the default wherever tools are not named."""

UNOPENED_TAG = "Error: </{tag}> has no <{tag}> before it in this turn. Write <{tag}> ... </{tag}>."
EMPTY_CALL = "Error: the <{tag}> call is empty. Write what to run between <{tag}> and </{tag}>."


def reserved_tags(tools: Sequence[str]) -> tuple[str, ...]:
    """Return all tags of the protocol. ("search",) -> ("think", "search", "result", "answer")"""
    return ("think", *tools, "result", "answer")


def parse_call(turn_text: str, tag: str) -> Call:
    """Parse the call that ends a turn: the text between the last <tag> of this turn and its closing tag.

    Only the turn's own text is searched, never the prompt or an earlier result (UPSTREAM B14).

    >>> parse_call("<think>look</think><search> Paris </search>", "search").argument
    'Paris'
    """
    head = turn_text[: turn_text.rfind(f"</{tag}>")]
    opened = head.rfind(f"<{tag}>")
    if opened < 0 or head.find(f"</{tag}>", opened) >= 0:
        return Call("", "unopened_tag", UNOPENED_TAG.format(tag=tag), tag)
    argument = head[opened + len(tag) + 2 :].strip()
    return Call(argument, tag=tag) if argument else Call("", "empty_call", EMPTY_CALL.format(tag=tag), tag)


def escape_result(text: str, tools: Sequence[str] = PAPER_TOOLS) -> str:
    """Make the protocol's tags in a result plain text, so that a web page cannot answer or call for the model.

    >>> escape_result("see <answer>4</answer>")
    'see &lt;answer&gt;4&lt;/answer&gt;'
    """
    return escape_tags(text, reserved_tags(tools))


def render_result(text: str) -> str:
    """Return the text that is appended to the response after a call."""
    return f" <result>\n{text}\n</result>"


def merge_tool_messages(messages: list[dict[str, str]], tools: Sequence[str] = PAPER_TOOLS) -> list[dict[str, str]]:
    """Join assistant / tool / assistant ... into one assistant turn with <result> spans, as the rollout writes it."""
    merged: list[dict[str, str]] = []
    last_role = ""
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            if last_role not in ("assistant", "tool"):
                raise ValueError("a tool message must follow an assistant message")
            merged[-1]["content"] += render_result(escape_result(text, tools))
        elif role == "assistant" and last_role == "tool":
            merged[-1]["content"] += text
        else:
            merged.append({"role": role, "content": text})
        last_role = role
    return merged
