# ruff: noqa: RUF001 (the Chinese prompt's punctuation is meant)
"""The system prompts of the benchmarks, each with the tools it offers."""

from __future__ import annotations

from dataclasses import replace

from arpo.protocol import form_of
from arpo.protocol.prompts import with_system_prompt
from arpo.tools import system_prompt_for
from arpo.trajectory import Prompt

_TOOLS = {"code_search": ("python", "search"), "search": ("search",), "math": ("python",), "base": ()}
PROMPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{kind: (system_prompt_for("default", tools), tools) for kind, tools in _TOOLS.items()},
    "chinese": (
        "你是一个乐于助人的助手，借助搜索工具和 Python 解释器，一步一步地解答给定的问题。\n"
        "在 <think> </think> 中思考。需要搜索时，写 <search> 搜索词 </search>；需要运行代码时，"
        "写 <python> 代码 </python>，并用 print 输出所需的内容。每次调用之后，结果会出现在 <result> 和 </result> 之间；"
        "然后继续思考，需要时可以再次调用。"
        "确定之后，在 <answer> </answer> 中给出最终答案，准确的答案写在 \\boxed{} 里。\n"
        "例如：<think> 需要知道什么 </think><search> 搜索词 </search> <result> 找到的段落 </result>"
        "<think> 由此可知 </think><python> print(6 * 7) </python> <result> 42 </result><think> 完成 </think>"
        "<answer> 最终答案是 \\[ \\boxed{42} \\] </answer>",
        ("python", "search"),
    ),
}
"""Kind -> system prompt and tools. code_search is the prompt of training."""


def with_benchmark_prompt(prompt: Prompt, system_prompt: str, form: str = "tags") -> Prompt:
    """Return the prompt with a system prompt and its tools.

    system_prompt: a key of PROMPTS, or a text for `with_system_prompt`; a text changes no tools. form: the value of
    protocol.format. If the chat template lists the tools for this form, a key of PROMPTS gives the form's text.
    """
    text, tools = PROMPTS.get(system_prompt, (system_prompt, prompt.tools))
    if system_prompt in PROMPTS and form_of(form).template_lists_tools:
        text = system_prompt_for("default", tools, form=form)
    return replace(prompt, messages=with_system_prompt(prompt.messages, text), tools=tools)


def is_chinese(text: str) -> bool:
    """True if at least a third of the letters are Chinese characters.

    >>> is_chinese("截至2024年12月31日"), is_chinese("Who wrote 西游记, in English Journey to the West?")
    (True, False)
    """
    letters = [c for c in text if c.isalpha()]
    return bool(letters) and sum("\u4e00" <= c <= "\u9fff" for c in letters) * 3 >= len(letters)
