"""A connection to a Redis server, for what the processes of several nodes share: the cache and the rate limit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from arpo.errors import UserError

if TYPE_CHECKING:
    import redis

SCHEMES = ("redis", "rediss")
PASSWORD_VARIABLE = "ARPO_REDIS_PASSWORD"
"""Environment variable of the password; a config would be dumped with the run."""
PREFIX = "arpo:"
"""Prefix of all our keys, so that the server may hold other things too."""
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 20.0


def is_redis_url(place: object) -> bool:
    """True for redis://host:port/db (rediss:// with TLS); False for a file."""
    return str(place).partition("://")[0] in SCHEMES and "://" in str(place)


def connect(url: str, setting: str) -> redis.Redis:
    """A client whose server has answered; thread-safe, and usable after a fork. `setting` names the config field.

    Raises UserError where redis-py is missing, the address makes no sense, or nobody answers there.
    """
    if urlsplit(url).password:
        raise UserError(
            f"{setting}: {describe(url)} is given with a password, and configs are saved; set it in the environment "
            f"as {PASSWORD_VARIABLE}"
        )
    try:
        import redis
    except ImportError:
        raise UserError(f"{setting}: {url} needs the redis package; pip install 'arpo-torch[redis]'") from None
    try:
        client = redis.Redis.from_url(
            url,
            password=os.environ.get(PASSWORD_VARIABLE) or None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=CALL_TIMEOUT_S,
        )
        client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"{setting}: no Redis server answers at {describe(url)} ({reason}); start it, or change that setting"
        ) from None
    return client


def describe(url: str) -> str:
    """The address without user and password, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
