"""A client for unreliable HTTP services: deadlines, retries, rate limits and a circuit breaker."""
