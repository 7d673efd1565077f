"""The policy's model: loading, attention, head, adapters, and optimizer; and the critic."""

from arpo.model.policy import Policy, load_policy, load_tokenizer

__all__ = ["Policy", "load_policy", "load_tokenizer"]
