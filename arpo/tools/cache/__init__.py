"""Record and replay of tool calls."""
