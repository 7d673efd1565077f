"""The number of tool calls of a run, and their price, before the run starts."""

from __future__ import annotations

from arpo.config.tools import ToolsConfig
from arpo.options import RolloutConfig
from arpo.tools import prices, tool_schemas


def expected_calls(tools: ToolsConfig, rollout: RolloutConfig, num_steps: int, num_prompts: int) -> str:
    """Return a line on the tool calls of a run of `num_steps` steps, and their price; "" for a run without calls.

    The range is from one call per trajectory to the limit. The real number may be lower: a fork does not repeat
    inherited calls, and a cached answer is free. The real number may be higher: resampled prompts and validations are
    not counted.
    """
    most = rollout.max_tool_calls
    if not tools.names or not most:
        return ""
    num_trajectories = num_steps * num_prompts * rollout.group_size
    line = (
        f"tool calls: {num_steps:,} steps x {num_prompts} prompts x {rollout.group_size} trajectories are "
        f"{num_trajectories:,} with one each, {num_trajectories * most:,} with {most} each "
        "(less what forks inherit and caches answer)"
    )
    for name, price in prices(tools.price_per_call, tuple(tool_schemas(tools))).items():
        limit = min(rollout.call_limits.get(name, most), most)
        least = num_trajectories * price
        line += f"; {name} at {price:g} a call: {least:,.2f} to {least * limit:,.2f}"
    return line
