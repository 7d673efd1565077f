"""A real redis-server for the time of a test module."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.processes import free_port

HANG_S = 300.0
REDIS = f"{Path(__file__).resolve().parents[2]}/extras/redis/cache.py:RedisCache"


@dataclass
class RedisServer:
    address: str
    port: int
    process: subprocess.Popen

    @property
    def url(self) -> str:
        return f"redis://{self.address}:{self.port}/0"

    @property
    def cache(self) -> str:
        """The server as a value of tools.search.cache."""
        return f"{REDIS}={self.url}"


@contextmanager
def redis_server(folder: Path, *arguments: str, address: str = "127.0.0.1") -> Iterator[RedisServer]:
    """Skips the test, with the reason, where redis-server or redis-py is not installed."""
    redis = pytest.importorskip("redis", reason="the redis package is not installed")
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", address, "--dir", str(folder), "--save", ""]
    command += ["--protected-mode", "no"]  # the tests' own network
    with subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + HANG_S
            while True:
                try:
                    redis.Redis(host=address, port=port).ping()
                    break
                except redis.AuthenticationError:
                    break
                except redis.ConnectionError:
                    assert time.monotonic() < deadline and process.poll() is None, "redis-server did not start"
                    time.sleep(0.02)
            yield RedisServer(address, port, process)
        finally:
            process.kill()
