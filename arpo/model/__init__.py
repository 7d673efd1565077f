"""The policy: head, attention, loading, adapters, critic, optimizer."""

from arpo.model.policy import Policy, load_policy, load_tokenizer

__all__ = ["Policy", "load_policy", "load_tokenizer"]
