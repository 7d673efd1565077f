"""The line that says before a run what its tool calls will be and cost."""

from arpo.config.tools import ToolsConfig
from arpo.options import RolloutConfig
from arpo.start.costs import expected_calls


def test_the_papers_run_is_some_hundred_thousand_calls():
    line = expected_calls(ToolsConfig(), RolloutConfig(), 156, 128)
    assert line == (
        "tool calls: 156 steps x 128 prompts x 16 trajectories are 319,488 with one each, 958,464 with 3 each (less "
        "what forks inherit and caches answer)"
    )


def test_a_price_makes_it_money_up_to_the_tools_own_limit():
    tools = ToolsConfig(price_per_call=("search=0.0015", "python=0"))
    line = expected_calls(tools, RolloutConfig(max_calls_per_tool=("search=2",)), 156, 128)
    assert "; search at 0.0015 a call: 479.23 to 958.46; python at 0 a call: 0.00 to 0.00" in line


def test_a_run_without_calls_has_no_such_line():
    assert expected_calls(ToolsConfig(names=()), RolloutConfig(), 156, 128) == ""
    assert expected_calls(ToolsConfig(), RolloutConfig(max_tool_calls=0), 156, 128) == ""
