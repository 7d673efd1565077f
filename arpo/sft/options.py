"""The data of train_sft.py, as knobs. This file imports nothing, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SFTDataConfig:
    """Conversations."""

    train: str = ""
    """Training conversations: jsonl, json or parquet; ShareGPT `conversations` or OpenAI `messages`. Of any size: they
    are tokenised once, into DIR/NAME/tokens, and read from there step by step."""
    valid: str = ""
    """Validation conversations; empty = no validation."""
    num_conversations_per_step: int = 16
    """Conversations per optimizer step, over all ranks."""
    max_tokens: int = 15000
    """Cut-off: longer conversations are handled as `overlong` says."""
    overlong: Literal["drop", "truncate"] = "drop"
    """drop = leave longer conversations out; truncate = keep what fits, up to the end of a turn (a tool call or an
    EOS). Either way they are counted, and listed in DIR/NAME/tokens/*/overlong.jsonl."""
    max_tokens_per_microbatch: int = 16384
    """Token budget of one forward/backward pass on one rank; must hold the longest conversation. What does not fit into
    one pass is accumulated."""
    mask_results: bool = True
    """False = train on <result> spans too, as the released code does: the model learns to make up results."""
    train_turns: Literal["all", "last"] = "all"
    """all = every assistant turn; last = only the last one, the turns before it as the chat template shows them: for
    templates that rewrite earlier turns, as Qwen3's does with thinking. (Calls and results are within one turn.)"""
    tools: tuple[str, ...] = ("python", "search")
    """Tools of the later rollouts: the default system prompt offers them, and their tags are escaped in results."""
    system_prompt: str = "keep"
    """keep = as the file has it; none = without; default = the protocol's own; anything else = that text."""
