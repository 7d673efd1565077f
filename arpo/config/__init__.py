"""Config sections with their facts, checks of names and returned values, and readers of untrusted files."""
