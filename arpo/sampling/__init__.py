"""Who samples what, and when is a step full."""
