"""A connection to a Redis server. The processes of several nodes share the cache and the rate limit there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from arpo.errors import Outage, UserError

if TYPE_CHECKING:
    import redis

PASSWORD_VARIABLE = "ARPO_REDIS_PASSWORD"
"""Environment variable of the password; a config would be dumped with the run."""
PREFIX = "arpo:"
"""Prefix of all our keys, so that the server may hold other things too."""


def connect(url: str, setting: str) -> redis.Redis:
    """Return a client after a first answer of the server; thread-safe, and usable after a fork. `setting` is the config
    field.

    Raises UserError if redis-py is missing or the address is invalid, and Outage if no server answers.
    """
    if urlsplit(url).password:
        fix = f"configs are saved, so set it in the environment as {PASSWORD_VARIABLE}"
        raise UserError(f"{setting}: {describe(url)} is given with a password; {fix}")
    try:
        import redis
    except ImportError:
        raise UserError(f"{setting}: {url} needs the redis package; pip install -e '.[redis]'") from None
    try:
        password = os.environ.get(PASSWORD_VARIABLE) or None
        client = redis.Redis.from_url(url, password=password, socket_connect_timeout=5.0, socket_timeout=20.0)
        client.ping()
        return client
    except (redis.RedisError, ValueError, OSError) as error:
        reason = f"no Redis server answers at {describe(url)} ({' '.join(str(error).split()).rstrip('.')})"
        is_wrong = isinstance(error, (redis.AuthenticationError, redis.ResponseError, ValueError))
        kind = UserError if is_wrong else Outage
        raise kind(f"{setting}: {reason}; start it, or change that setting") from None


def describe(url: str) -> str:
    """Return the address without user and password, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
