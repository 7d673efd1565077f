"""Prompts read from files, and the order in which a run trains on them."""

from arpo.data.order import ORDERS, PromptOrder
from arpo.data.prompts import load_prompts, parse_prompt, tokenize_prompts
from arpo.data.rows import read_rows
from arpo.protocol.messages import BadRow

__all__ = ["ORDERS", "BadRow", "PromptOrder", "load_prompts", "parse_prompt", "read_rows", "tokenize_prompts"]
