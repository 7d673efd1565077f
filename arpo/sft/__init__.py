"""SFT data: conversations of every style, tokenised once, on disk."""

from arpo.sft import conversations, json_calls

PARSERS = {
    "tags": conversations.parse_conversation,
    "hermes": json_calls.parse_conversation,
    "llama": json_calls.parse_for_llama,
}
"""protocol.format -> parser of a row."""
