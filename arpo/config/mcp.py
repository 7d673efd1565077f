"""The entries of `tools.mcp`: how a server is started or reached, which of its tools are offered, and its limits.

An entry is JSON, in a YAML file a mapping. Keys of services stand in the environment, and here only their names:

    tools:
      mcp:
        - {command: npx, args: [-y, some-server], env: {API_KEY: $SOME_KEY}}
        - {url: https://host/mcp, headers: {Authorization: Bearer $OTHER_KEY}, prefix: web_}
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from arpo.errors import UserError, require

MODES = ("live", "record", "replay", "replay_strict")
SECRET_NAMES = ("key", "token", "secret", "password", "passwd", "credential", "credentials", "auth")
"""Ends of names whose values must not stand in a config."""
_PLAIN = re.compile(r"true|false|[\d.]+", re.IGNORECASE)
"""Values of env and headers that may stand there as they are; all others are $NAME."""
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_LEAST_SECRET_CHARS = 4
"""Shorter values of the environment are no secrets: hiding every "1" would only mangle results."""
_PREFIX = re.compile(r"[A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class McpServer:
    """One server of the Model Context Protocol: a process that is started (`command`), or an address (`url`)."""

    command: str = ""
    """Program that speaks MCP on its standard input and output. Every rank starts its own."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    env: tuple[tuple[str, str], ...] = ()
    """Its environment beside PATH, HOME, USER, LOGNAME, SHELL and TERM: $NAME, a variable of ours; numbers, true and
    false may stand there as they are."""
    url: str = ""
    """Address of a streamable HTTP server, like http://host:8000/mcp."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers of every request to it, likewise."""
    prefix: str = ""
    """Stands before the names of the server's tools."""
    tools: tuple[str, ...] = ()
    """Names of the tools that are offered, as the server calls them; none = all."""
    deadline_s: float = 60.0
    """Longest time of one call in seconds, all tries included. Waiting for its turn, or for a server that starts again,
    is not counted."""
    start_s: float = 60.0
    """Longest time that the server may take to start and to list its tools, in seconds."""
    max_concurrent: int = 8
    """Most calls of a rank that are under way at the same time."""
    max_sessions: int = 0
    """Most trajectories of a rank that have a server each, for servers with state: a process for `command`, a
    connection for `url`. 0 = all trajectories share one."""
    max_tries: int = 3
    """Most times that a call is sent where connections break; 1 = what may have been carried out is not repeated."""
    cache: str = ""
    """Cache of call -> result, a file or redis://host:port/db; empty = every call is made."""
    mode: str = "record"
    """Use of the cache, as in tools.search.mode; a replay needs no server."""

    @property
    def label(self) -> str:
        """Name of the server in messages, without anything secret."""
        return self.url or " ".join([self.command, *self.args])[:80]

    @property
    def identity(self) -> dict[str, object]:
        """The settings that decide which server answers; part of the keys of its cache."""
        return {"url": self.url} if self.url else {"command": self.command, "args": list(self.args)}

    @property
    def replays(self) -> bool:
        """True where nothing but the cache is asked."""
        return self.mode in ("replay", "replay_strict")

    def what_decides(self) -> dict[str, object]:
        """Return the settings that make other trajectories."""
        own = {"is_per_trajectory": True} if self.max_sessions else {}
        return self.identity | {"prefix": self.prefix, "tools": list(self.tools)} | own

    def secrets(self) -> dict[str, str]:
        """Return the variables of the environment that the entry refers to. Raises UserError for a missing one."""
        names = {name for _, text in (*self.env, *self.headers) for name in references(text)}
        for name in sorted(names):
            if name not in os.environ:
                raise UserError(f"tools.mcp: {self.label} needs {name} in the environment; set it")
        return {name: os.environ[name] for name in sorted(names)}

    def resolved(self, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return `env` or `headers` with the values of the environment. For the server only, never to be written."""
        values = self.secrets()
        return {name: _REFERENCE.sub(lambda m: values[m[1] or m[2]], text) for name, text in pairs}

    def redacted(self, text: str) -> str:
        """Return a text of the server in which no value of the environment stands that was given to it."""
        for name, value in sorted(self.secrets().items(), key=lambda item: -len(item[1])):
            if len(value) >= _LEAST_SECRET_CHARS:
                text = text.replace(value, f"${name}")
        return text


def references(text: str) -> list[str]:
    """Return the names of the environment in a text. "Bearer $A" -> ["A"], "x${B}" -> ["B"]"""
    return [match[1] or match[2] for match in _REFERENCE.finditer(text)]


def names_secret(name: str) -> bool:
    """Return whether what has this name may be a secret. "--api-key", "accessToken" -> True, "max_tokens" -> False"""
    return name.lower().endswith(SECRET_NAMES)


def parse_servers(entries: Iterable[str]) -> tuple[McpServer, ...]:
    """Return the servers of `tools.mcp`. Raises ValueError, which names the entry, for one that makes no sense."""
    return tuple(parse_server(entry, f"tools.mcp[{number}]") for number, entry in enumerate(entries))


def parse_server(entry: str, where: str) -> McpServer:
    """Return the server of one entry. Raises ValueError."""
    try:
        tree = json.loads(entry)
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise ValueError(f'{where} must be a mapping like {{"command": ...}} or {{"url": ...}}, not {entry[:60]!r}')
    known = {f.name: f.default for f in fields(McpServer)}
    for key, value in tree.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise ValueError(f"{where}: unknown key {key!r}; {hint}")
        tree[key] = _value(value, known[key], pairs=key in ("env", "headers"), where=f"{where}.{key}")
    server = McpServer(**tree)
    _check(server, where)
    return server


def entry_of(server: McpServer) -> str:
    """Return the entry of a server, without what is as ever. The other way round than `parse_server`."""
    default = asdict(McpServer())
    values = {k: dict(v) if k in ("env", "headers") else v for k, v in asdict(server).items() if v != default[k]}
    return json.dumps(values)


def _value(value: Any, default: Any, *, pairs: bool, where: str) -> Any:
    """Return a value as the field has it. Raises ValueError for one of another type."""
    if pairs:
        if not isinstance(value, Mapping) or not all(isinstance(one, str | int | float) for one in value.values()):
            raise ValueError(f"{where} must be a mapping of names to texts")
        return tuple((str(name), str(one)) for name, one in value.items())
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(one, str | int | float) for one in value):
            raise ValueError(f"{where} must be a list of texts, not {value!r}")
        return tuple(map(str, value))
    kinds = {str: "a text", int: "a whole number", float: "a number"}
    fits = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, fits) or isinstance(value, bool):
        raise ValueError(f"{where} must be {kinds[type(default)]}, not {value!r}")
    return type(default)(value)


def _check(server: McpServer, where: str) -> None:
    """Raise ValueError for values with which no call could be made, or with which a secret would be written down."""
    require(bool(server.command) != bool(server.url), f"{where} must have either a command or a url")
    for key in ("args", "env") if server.url else ("headers",):
        beside = "url" if server.url else "command"
        require(not getattr(server, key), f"{where}.{key} has no effect beside {beside}; drop it")
    for key in ("deadline_s", "start_s", "max_concurrent", "max_tries"):
        value = getattr(server, key)
        require(0 < value < math.inf, f"{where}.{key} must be finite and above 0, not {value:g}")
    require(server.max_sessions >= 0, f"{where}.max_sessions must be 0 or more, not {server.max_sessions}")
    why = "what a server with state answers depends on the calls before"
    both = server.max_sessions and server.cache
    require(not both, f"{where}.cache cannot go with max_sessions: {why}; drop one of them")
    require(server.mode in MODES, f"{where}.mode must be one of {', '.join(MODES)}, not {server.mode!r}")
    useless = server.mode != "record" and not server.cache
    require(not useless, f"{where}.mode={server.mode} is ignored unless {where}.cache names a cache")
    is_tag = _PREFIX.fullmatch(server.prefix)
    require(is_tag, f"{where}.prefix may have letters, digits and _.- only, not {server.prefix!r}")
    _check_secrets(server, where)


def _check_secrets(server: McpServer, where: str) -> None:
    """Raise ValueError where a secret may stand in what is copied into the run's folder, and shown in messages."""
    for key, pairs in (("env", server.env), ("headers", server.headers)):
        for name, text in pairs:
            variable = "$" + re.sub("[^A-Za-z0-9_]", "_", name).upper()
            why = "the config is copied into the run's folder, so a value that may be secret stands in the environment"
            is_plain = not text or (_PLAIN.fullmatch(text) and not names_secret(name))
            require(is_plain or references(text), f"{where}.{key}.{name}: {why}; write {variable} here")
    for arg, following in pairwise([*server.args, ""]):
        name, is_pair, own = arg.partition("=")
        value = own if is_pair else following
        is_secret = name.startswith("-") and names_secret(name) and not value.startswith(("-", "/"))
        require(
            not (is_secret and value),
            f"{where}.args: {name} may be a secret, which messages would show; give it by env",
        )
    is_secret = any(names_secret(name) for name, _ in parse_qsl(urlsplit(server.url).query))
    require(not is_secret, f"{where}.url may have a secret in it; put it into the environment, and $NAME into headers")
