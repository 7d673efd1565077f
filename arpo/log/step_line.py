"""The console's line on a training step of RL."""

from __future__ import annotations

from collections.abc import Mapping


def console_text(values: Mapping[str, float]) -> str:
    """Return the console's line on a training step, from the metrics of all ranks."""
    parts = []
    if "reward/mean" in values:
        parts.append(f"reward {values['reward/mean']:+.3f}")
    else:
        parts.append("every trajectory ended by an infrastructure error")
    shown = {
        "valid/accuracy": "valid {:.3f}",
        "reward/solved_share": "solved {:.2f}",
        "reward/positive_share": "reward>0 {:.2f}",
    }
    if "valid/accuracy" not in values:  # a custom reward need not say which answers are right
        shown["valid/reward"] = "valid reward {:+.3f}"
    shown["valid/unscored"] = "({:.0f} without a reward)"  # these count as wrong
    parts += [text.format(values[name]) for name, text in shown.items() if name in values]
    parts.append(f"calls {values['tools/calls_per_trajectory']:.2f} (ran {values['tools/all/calls']:.0f})")
    parts.append(f"branches {values['branching/branches_per_prompt']:.1f}")
    if "tools/replayed" in values:
        parts.append(_replays(values))
    parts.append(f"tokens {values['response/tokens']:.0f}")
    if "loss/entropy" in values:
        parts.append(f"entropy {values['loss/entropy']:.2f}  mismatch kl {values['mismatch/kl']:.1e}")
    else:
        parts.append(_why_no_update(values))
    times = f"rollout {values['time/rollout']:.1f}, update {values['time/update']:.1f}"
    parts.append(f"{values['time/step']:.1f} s ({times})")
    return "  ".join(parts)


def _why_no_update(values: Mapping[str, float]) -> str:
    if "critic/loss" in values:
        return "no policy update (the critic warms up)"
    if "group/not_trained_on" in values:
        return "no policy update: this batch is not trained on, for the reason in the warning above"
    reasons = {name.partition("/")[2]: n for name, n in values.items() if name.startswith("reward_reason/")}
    if values.get("group/mixed_share") != 0 or not reasons:
        return "no policy update"
    most = max(reasons, key=lambda reason: reasons[reason])
    share = reasons[most] / sum(reasons.values())
    return f"no policy update: all groups alike ({most} {share:.0%}), docs/troubleshooting.md#all-groups-are-dead"


def _replays(values: Mapping[str, float]) -> str:
    text = f"replayed {values['tools/replayed']:.0f}"
    mismatches = values["tools/replay_mismatch"]
    return f"{text} ({mismatches:.0f} otherwise)" if mismatches else text
