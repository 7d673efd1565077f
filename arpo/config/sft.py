"""The data options of train_sft.py. This file imports nothing slow, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from arpo.config.facts import MAY_CHANGE, AtLeast


@dataclass(frozen=True)
class SFTDataConfig:
    """The conversations to train on, and how they become rows of tokens."""

    train: str = ""
    """File of training conversations: jsonl, json or parquet; ShareGPT `conversations` or OpenAI `messages`. Any size
    will do: it is tokenised once, into DIR/NAME/tokens, and read from there step by step. Or a data set on the Hub,
    OWNER/NAME[@REVISION][:FILE]."""
    valid: Annotated[str, MAY_CHANGE] = ""
    """Validation conversations, a file or a name too; empty = no validation."""
    num_conversations_per_step: Annotated[int, AtLeast(1)] = 16
    """Number of conversations per optimizer step, over all ranks."""
    max_tokens: Annotated[int, AtLeast(1)] = 15000
    """Longest conversation, in tokens. Longer ones are left out, counted, and listed in
    DIR/NAME/tokens/*/overlong.jsonl."""
    max_tokens_per_microbatch: Annotated[int, AtLeast(1), MAY_CHANGE] = 16384
    """Token budget of one forward/backward pass on one rank; must hold the longest conversation. Gradients of the
    passes of a step are accumulated."""
    mask_results: bool = True
    """Leave <result> spans out of the loss. False = train on them, as the released code does: the model learns to make
    up results."""
    train_turns: Literal["all", "last"] = "all"
    """all = train on every assistant turn; last = only on the last one, with earlier turns as the chat template shows
    them: for templates that rewrite these, as Qwen3's does with thinking. (A turn includes its calls and results.)"""
    tools: tuple[str, ...] = ("python", "search")
    """Tools of the later rollouts: the default system prompt offers them, and their tags are escaped in results."""
    system_prompt: str = "keep"
    """System prompt. keep = as the file has it; none = without; default = the protocol's; anything else = that text.
    Where there is none, some chat templates (Qwen2.5's, SmolLM2's) write one of their own."""
