"""The charts on TensorBoard's page "Custom Scalars", in order: title with unit -> regular expressions for tags."""

from __future__ import annotations

Charts = dict[str, tuple[str, ...]]

SFT_CHARTS: Charts = {
    "loss (nats per loss token)": ("loss/nll", "valid/nll"),
    "gradient norm": ("optim/grad_norm",),
    "learning rate": ("optim/lr",),
    "tokens per second and rank": ("tokens/trained_per_second",),
    "memory (GiB)": ("memory/.*",),
}
RL_CHARTS: Charts = {
    "reward": ("reward/mean", "valid/reward"),
    "accuracy, also by data source": ("reward/accuracy", "accuracy/.*", "valid/accuracy", "valid/accuracy/.*"),
    "spread of the reward": ("reward/std", "group/reward_std"),
    "share of mixed groups": ("group/mixed_share",),
    "response length (tokens)": ("response/tokens", "response/sampled_tokens"),
    "entropy (nats)": ("loss/entropy", "entropy/root", "entropy/after_tool"),
    "tool calls per trajectory": ("tools/calls_per_trajectory",),
    "rollout against trainer: KL": ("mismatch/kl",),
    "tokens per second and rank": ("tokens/.*_per_second",),
    "memory (GiB)": ("memory/.*",),
}
