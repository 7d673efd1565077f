"""The entries of `servers`: how a server is started or reached, which of its tools are offered, and its limits.

On the command line an entry is JSON, in a YAML file a mapping. Keys of services stand in the environment. The entry
names only the variables:

    servers:
      - {command: npx, args: [-y, some-server], env: {API_KEY: $SOME_KEY}}
      - {url: https://host/mcp, headers: {Authorization: Bearer $OTHER_KEY}, prefix: web_}
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from string import Template
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

from arpo.config.facts import AtLeast, Between, Needs, ignored, out_of_range
from arpo.errors import UserError, require

MODES = ("live", "record", "replay", "replay_strict")
PROGRAM = Needs("command", use="PROGRAM")
ADDRESS = Needs("url", use="ADDRESS")
DURATION_S = Between(0.001, 86400.0)
SECRET_NAMES = (
    "key", "token", "secret", "password", "passwd", "passphrase", "pwd", "-pass", "_pass", "_pat", "credential",
    "credentials", "auth", "authorization", "cookie", "passcode", "signature",
)  # fmt: skip
"""Ends of names whose values must not stand in a config."""
_SECRET_WORDS = re.compile(r"(?:.*[-_.])?(?:pin|otp|totp|code|sig|pat|k)", re.IGNORECASE)
"""More names of secret values. Other words have the same endings, so only the full name counts, or the name behind a
dash."""
_SHORT_FLAGS = {"-u": r".*:.*", "-p": r"(?!\d+(?::\d+)*$)[^@]*", "--user": r".*:.*"}
"""Flags before a user name with a password, or before a password, and the form of the values. A port does not match."""
_PASSWORD_CLIENTS = ("mysql", "mysqldump", "mysqladmin", "mariadb", "mariadb-dump", "sshpass")
"""Programs with the password directly behind -p."""
_PACKAGE_RUNNERS = ("npx", "npm", "pnpm", "bunx", "yarn")
"""Programs with a package behind -p."""
_SCHEMES = {"bearer", "basic", "token", "apikey"}
"""Words allowed beside a $NAME."""
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_MOST_QUERY_CHARS = 8
"""Longer values in the query of an address may be keys, under any name."""
_SECRET = re.compile(
    r"\b(?i:bearer|basic)\s+[^\s$]|://[^/\s@:]*:[^/\s@$][^/\s@]*@|://(?!\$)[^/\s@:]+@"
    r"|\b(?:sk-|[spr]k_|gh[opsu]_|github_pat_|glpat-|hf_|xox[abprs]-|AKIA|AIza|ya29\.|eyJ"
    r"|tvly-|pplx-|xai-|gsk_|r8_|fc-|jina_|lin_api_|ntn_|nvapi-|npm_|pypi-|dckr_pat_|dop_v1_|shpat_|figd_|SG\.|BSA)[\w-]{8}"
    rf"|(?:^|[\s?&#;,{{'\"])[\w-]*(?i:{'|'.join(SECRET_NAMES)})['\"]?\s*[:=]\s*['\"]?(?!\w+ \$)[^\s'\"$/-]"
    r"|(?=[\w-]*[a-z])(?=[\w-]*[A-Z])(?=[\w-]*\d)\b[\w-]{24}|\b[0-9a-f]{32}\b"
)
"""Matches texts with a secret in them: a key in the form of a known service, a password in an address, a value beside
a secret name, 24 letters and digits without a word, or 32 hexadecimal digits."""
_PLAIN = re.compile(r"true|false|[\d.]+", re.IGNORECASE)
"""Values of env and headers allowed in plain text. All others must be $NAME."""
_LEAST_SECRET_CHARS = 4
"""Shorter values of the environment are not hidden: hiding every "1" would only mangle results."""
_PREFIX = re.compile(r"[A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class McpServer:
    """One server of the Model Context Protocol: a process to start (`command`), or an address (`url`)."""

    command: str = ""
    """Program with MCP on standard input and output. Every rank starts a process of this program."""
    args: Annotated[tuple[str, ...], PROGRAM] = ()
    """Arguments of the program. $NAME is a variable of the environment. A key must be written as $NAME."""
    env: Annotated[tuple[tuple[str, str], ...], PROGRAM] = ()
    """Environment of the program, in addition to PATH, HOME, USER, LOGNAME, SHELL and TERM. A value is $NAME (a
    variable of our environment), a number, true or false."""
    url: str = ""
    """Address of a streamable HTTP server, like http://host:8000/mcp. $NAME is replaced as in `args`."""
    headers: Annotated[tuple[tuple[str, str], ...], ADDRESS] = ()
    """Headers of every request to the address. Values as in `env`."""
    prefix: str = ""
    """Text put before the names of the server's tools."""
    tools: tuple[str, ...] = ()
    """Names of the offered tools, without the prefix; empty = all tools of the server."""
    deadline_s: Annotated[float, DURATION_S] = 60.0
    """Longest time of one call in seconds, all tries included. The time does not include the wait for a turn, or for a
    restart of the server."""
    start_s: Annotated[float, DURATION_S] = 60.0
    """Longest time for the server to start and to list its tools, in seconds."""
    max_concurrent: Annotated[int, AtLeast(1)] = 8
    """Most calls of a rank under way at the same time."""
    max_sessions: Annotated[int, AtLeast(0)] = 0
    """For servers with state: each trajectory gets a server of its own (a process for `command`, a connection for
    `url`), and at most this many trajectories of a rank have a server at a time. 0 = all trajectories share one."""
    max_tries: Annotated[int, AtLeast(1)] = 3
    """Most times a call is sent if connections break. 1 = never send a call again, as the server may have executed
    the first."""
    cache: str = ""
    """Cache of call -> result, as in tools.search.cache; empty = every call is made."""
    mode: Annotated[str, Needs("cache", use="FILE")] = "record"
    """Use of the cache, as in tools.search.mode; a replay needs no server."""

    @property
    def label(self) -> str:
        """Name of the server in messages, without anything secret."""
        return self.url or " ".join([self.command, *self.args])[:80]

    @property
    def identity(self) -> dict[str, object]:
        """The settings that identify the server. They are part of the keys of its cache."""
        return {"url": self.url} if self.url else {"command": self.command, "args": list(self.args)}

    @property
    def replays(self) -> bool:
        """True if all calls are answered from the cache."""
        return self.mode in ("replay", "replay_strict")

    def secrets(self) -> dict[str, str]:
        """Return the environment variables named in the entry. Raises UserError for a missing variable."""
        texts = (self.url, *self.args, *(text for _, text in (*self.env, *self.headers)))
        names = {name for text in texts for name in Template(text).get_identifiers()}
        for name in sorted(names):
            if name not in os.environ:
                raise UserError(f"MCP server {self.label} needs {name} in the environment; set it")
        return {name: os.environ[name] for name in sorted(names)}

    def resolved(self, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return `env` or `headers` with all values `filled`."""
        return {name: self.filled(text) for name, text in pairs}

    def filled(self, text: str) -> str:
        """Replace each $NAME by the value of the variable. The result is for the server only: never write it down."""
        return Template(text).safe_substitute(self.secrets())

    def redacted(self, text: str) -> str:
        """Hide the values of the server's environment variables in a text from the server."""
        for name, value in sorted(self.secrets().items(), key=lambda item: -len(item[1])):
            if len(value) >= _LEAST_SECRET_CHARS:
                text = text.replace(value, f"${name}")
        return text


def names_secret(name: str) -> bool:
    """Return whether a value of this name may be a secret. "--api-key", "accessToken" -> True, "max_tokens" -> False"""
    return name.lower().endswith(SECRET_NAMES) or bool(_SECRET_WORDS.fullmatch(name.lstrip("-")))


def parse_servers(entries: Iterable[str]) -> tuple[McpServer, ...]:
    """Return the servers of the entries. For an invalid entry, raises ValueError with the position of the entry."""
    return tuple(parse_server(entry, f"servers[{number}]") for number, entry in enumerate(entries))


@cache
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


def _value(value: Any, default: Any, *, pairs: bool, where: str) -> Any:
    """Convert a value to the type of the field's default. Raises ValueError for a value of another type."""
    if pairs:
        fits = isinstance(value, dict) and all(isinstance(one, str | int | float) for one in value.values())
        require(fits, f"{where} must be a mapping of names to texts")
        return tuple((name, str(one)) for name, one in value.items())
    if isinstance(default, tuple):
        fits = isinstance(value, list) and all(isinstance(one, str | int | float) for one in value)
        require(fits, f"{where} must be a list of texts, not {value!r}")
        return tuple(map(str, value))
    kind = {str: "a text", int: "a whole number", float: "a number"}[type(default)]
    is_whole = type(value) is int and isinstance(default, float)
    require(is_whole or type(value) is type(default), f"{where} must be {kind}, not {value!r}")
    return type(default)(value)


def _check(server: McpServer, where: str) -> None:
    """Raise ValueError if no call could be made with these values, or if a secret would be written down."""
    _check_secrets(server, where)  # first: other messages show values
    require(bool(server.command) != bool(server.url), f"{where} must have either a command or a url")
    wrong = [out_of_range(server), *(one.message for one in ignored(server))]
    require(not any(wrong), f"{where}.{next(filter(None, wrong), '')}")
    why = "what a server with state answers depends on the calls before"
    both = server.max_sessions and server.cache
    require(not both, f"{where}.cache cannot go with max_sessions: {why}; drop one of them")
    require(server.mode in MODES, f"{where}.mode must be one of {', '.join(MODES)}, not {server.mode!r}")
    is_tag = _PREFIX.fullmatch(server.prefix)
    require(is_tag, f"{where}.prefix may have letters, digits and _.- only, not {server.prefix!r}")


def _check_secrets(server: McpServer, where: str) -> None:
    """Raise ValueError if a value may be a secret. The entry is copied into the run's folder and shown in messages."""
    for key, pairs in (("env", server.env), ("headers", server.headers)):
        for name, text in pairs:
            variable = "$" + re.sub("[^A-Za-z0-9_]", "_", name).upper()
            why = "the config is copied into the run's folder, so a value that may be secret stands in the environment"
            is_plain = not text or (_PLAIN.fullmatch(text) and not names_secret(name))
            is_plain = is_plain or _is_reference(text)
            require(is_plain, f"{where}.{key}.{name}: {why}; write {variable} here")
    program = os.path.basename(server.command)
    for arg, following in pairwise([server.command, *server.args, ""]):
        program = os.path.basename(arg) if os.path.basename(arg) in _PASSWORD_CLIENTS else program
        follows = arg.startswith("-") and "=" not in arg and names_secret(arg)
        if arg in _SHORT_FLAGS and not (arg == "-p" and program in _PACKAGE_RUNNERS):
            follows = re.fullmatch(_SHORT_FLAGS[arg], following)
        name = arg.partition("=")[0] if arg.startswith("-") else "one"
        is_secret = _SECRET.search(arg) or (follows and following and following[0] not in "-/$")
        if program in _PASSWORD_CLIENTS and arg.startswith("-p") and arg[2:3] not in ("", "$"):
            name = "-p"
            is_secret = True
        is_secret = is_secret or ("://" in arg and _may_hold_key(arg))
        require(not is_secret, f"{where}.args: {name} may be a secret, which messages would show; write $NAME there")
    is_secret = _SECRET.search(server.url) or _may_hold_key(server.url)
    require(not is_secret, f"{where}.url may have a secret in it; write $NAME there, or into headers")


def _is_reference(text: str) -> bool:
    """Return whether a text has only $NAMEs and names of schemes. "Bearer $KEY" -> True"""
    words = [word for word in text.split() if word.lower().rstrip(":") not in _SCHEMES]
    return bool(words) and all(Template(word).get_identifiers() for word in words) and not _SECRET.search(text)


def _may_hold_key(url: str) -> bool:
    """Return whether an address has a key in its path, as a UUID, or in its query."""
    parts = urlsplit(url)
    pairs = [(name, value) for name, value in parse_qsl(parts.query) if not value.startswith("$")]
    is_key = any(names_secret(name) or len(value) > _MOST_QUERY_CHARS for name, value in pairs)
    return is_key or bool(_UUID.search(parts.path))
