"""A real MCP server, which misbehaves on request: over stdio, or with a port over streamable HTTP.

    python mcp_server.py [--port PORT] [--token TOKEN] [--log FILE] [--tools add,say] [--busy FILE]

It writes a line with its process id to FILE when it starts, and one for each call. With --busy FILE and a token it
answers as many requests as a number in that file with HTTP 503.
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Literal

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

args = argparse.ArgumentParser()
args.add_argument("--port", type=int, default=0)
args.add_argument("--log", default=os.devnull)
args.add_argument("--token", default="")
args.add_argument("--tools", default="")
args.add_argument("--busy", default="")
cfg = args.parse_args()
server = MCPServer("test")


def log(text: str) -> None:
    with Path(cfg.log).open("a") as file:
        file.write(f"{os.getpid()} {text}\n")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    log("add")
    return a + b


def say(text: str) -> str:
    """Say it again."""
    log("say")
    return text


def paint(colour: Literal["red", "green"], size: float = 1.0) -> list:
    """Paint a picture."""
    return [f"{colour} {size}", Image(data=b"123456", format="png")]


def refuse(reason: str) -> str:
    """Fail, and say why."""
    raise ToolError(f"no: {reason}")


def show_env(name: str) -> str:
    """Show a variable of the environment."""
    return os.environ.get(name, "(unset)")


def die_once(marker: str) -> str:
    """Die in the middle of a call, but not where the file is there already."""
    log("die_once")
    if not Path(marker).exists():
        Path(marker).touch()
        os._exit(3)
    return f"alive as {os.getpid()}"


def die() -> str:
    """Die in the middle of a call."""
    log("die")
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(3)


async def wait(seconds: float) -> str:
    """Wait, and serve others meanwhile."""
    log("wait")
    await asyncio.sleep(seconds)
    log("waited")
    return "waited"


async def hang() -> str:
    """Hang, with everything."""
    log("hang")
    time.sleep(1000)
    return "never"


def children() -> str:
    """Start a process that outlives its input, and say its id."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)
    return str(pid)


notes: list[str] = []


def note(text: str) -> str:
    """Keep a note, and say all of them."""
    notes.append(text)
    return " ".join(notes)


def count() -> str:
    """Say how many notes there are, and keep that too. A second tool with the state of the first."""
    notes.append(str(len(notes)))
    return notes[-1]


def answer() -> str:
    """Have the name of a tag. Only listed where it is asked for, as `python`."""
    return "42"


def python(code: str) -> str:
    """Have the name of another tool."""
    return code


log("start")
known = (add, say, paint, refuse, show_env, die_once, die, wait, hang, children)
if "MCP_TEST_TOOLS" in os.environ:
    cfg.tools = os.environ["MCP_TEST_TOOLS"]
named = cfg.tools.split(",") if cfg.tools else [function.__name__ for function in known]
for function in (*known, note, count, answer, python):
    if function.__name__ in named:
        server.tool()(function)
if not cfg.port:
    server.run()
elif not cfg.token:
    server.run("streamable-http", port=cfg.port)
else:
    import uvicorn
    from starlette.responses import PlainTextResponse

    app = server.streamable_http_app()

    def num_busy() -> int:
        return int(Path(cfg.busy).read_text()) if cfg.busy and Path(cfg.busy).exists() else 0

    async def guarded(scope, receive, send):
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and headers.get(b"authorization") != f"Bearer {cfg.token}".encode():
            await PlainTextResponse("who are you?", 401)(scope, receive, send)
        elif scope["type"] == "http" and (left := num_busy()):
            Path(cfg.busy).write_text(str(left - 1))
            await PlainTextResponse("come back later", 503)(scope, receive, send)
        else:
            await app(scope, receive, send)

    uvicorn.run(guarded, port=cfg.port, log_level="error")
