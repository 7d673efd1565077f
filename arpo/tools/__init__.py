"""Tools that the policy calls from inside a rollout."""
