"""What the tools of a run will be asked, and what that costs, before it is started."""

from __future__ import annotations

from arpo.config.tools import ToolsConfig
from arpo.options import RolloutConfig
from arpo.tools import prices, tool_schemas


def expected_calls(tools: ToolsConfig, rollout: RolloutConfig, num_steps: int, num_prompts: int) -> str:
    """Return a line on the tool calls of a whole run of `num_steps`, and their price; "" where there are none.

    From one call a trajectory to the limit. A fork inherits calls, which are not made again, and a cache's answer is
    free, so it may be less; resampled prompts and validations come on top.
    """
    most = rollout.max_tool_calls
    if not tools.names or not most:
        return ""
    number = num_steps * num_prompts * rollout.group_size
    line = (
        f"tool calls: {num_steps:,} steps x {num_prompts} prompts x {rollout.group_size} trajectories are {number:,} "
        f"with one each, {number * most:,} with {most} each (less what forks inherit and caches answer)"
    )
    for name, price in prices(tools.price_per_call, tuple(tool_schemas(tools))).items():
        limit = min(rollout.call_limits.get(name, most), most)
        line += f"; {name} at {price:g} a call: {number * price:,.2f} to {number * limit * price:,.2f}"
    return line
