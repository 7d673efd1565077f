"""The entries of servers in files and on the command line: what they may say, and that no secret is written down."""

import json
from dataclasses import dataclass, field

import pytest
from helpers.mcp_tools import MCP, config, options

from arpo.config.tools import ToolsConfig
from arpo.errors import UserError
from arpo.log.settings import save_config
from arpo.start.load import load_config
from arpo.tools import own_options, tool_schemas
from extras.tools.mcp.config import McpServer, parse_server, parse_servers
from extras.tools.mcp.tool import without_titles

YAML = f"""
tools:
  names: [python, {MCP}]
  options:
    - {MCP}:
        servers:
          - {{command: npx, args: [-y, server, 3], env: {{API_KEY: $MY_KEY, DEBUG: 1}}, max_tries: 1}}
          - url: http://localhost:8000/mcp
            headers: {{Authorization: "Bearer ${{MY_TOKEN}}"}}
            prefix: web_
            tools: [fetch]
            cache: data/web.sqlite
            mode: replay
"""
SERVERS = (
    McpServer("npx", args=("-y", "server", "3"), env=(("API_KEY", "$MY_KEY"), ("DEBUG", "1")), max_tries=1),
    McpServer(
        url="http://localhost:8000/mcp",
        headers=(("Authorization", "Bearer ${MY_TOKEN}"),),
        prefix="web_",
        tools=("fetch",),
        cache="data/web.sqlite",
        mode="replay",
    ),
)


@dataclass(frozen=True)
class Config:
    tools: ToolsConfig = field(default_factory=ToolsConfig)


def servers_of(cfg: ToolsConfig) -> tuple[McpServer, ...]:
    return parse_servers(own_options(MCP, cfg).servers)


def test_a_file_has_servers_as_mappings_and_the_resolved_config_reads_back(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "swordfish")
    monkeypatch.setenv("MY_TOKEN", "open-sesame")
    (tmp_path / "a.yaml").write_text(YAML)
    cfg = load_config(Config, [str(tmp_path / "a.yaml")])
    assert servers_of(cfg.tools) == SERVERS
    assert SERVERS[0].resolved(SERVERS[0].env) == {"API_KEY": "swordfish", "DEBUG": "1"}
    assert SERVERS[1].resolved(SERVERS[1].headers) == {"Authorization": "Bearer open-sesame"}
    save_config(cfg, tmp_path / "config.yaml")
    written = (tmp_path / "config.yaml").read_text()
    assert "swordfish" not in written + repr(cfg) and "open-sesame" not in written + repr(cfg)
    assert load_config(Config, [str(tmp_path / "config.yaml")]) == cfg


def test_a_flag_has_servers_as_json():
    entries = {"command": "a"}, {"url": "https://h/mcp"}
    cfg = load_config(Config, ["--tools.names", MCP, "--tools.options", options(*entries)])
    assert [server.label for server in servers_of(cfg.tools)] == ["a", "https://h/mcp"]


def test_an_earlier_versions_key_is_told_where_servers_stand_now():
    with pytest.raises(UserError, match=r"'tools\.mcp' is now tools\.options of mcp/servers\.py:McpServers"):
        load_config(Config, ["--tools.mcp", '{"command": "a"}'])
    with pytest.raises(UserError, match="McpServers: servers is empty; give it an entry"):
        tool_schemas(ToolsConfig(names=(MCP,)))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("npx", "must be a mapping like"),
        ({}, "must have either a command or a url"),
        ({"command": "a", "url": "http://h/mcp"}, "must have either a command or a url"),
        ({"comand": "a"}, "unknown key 'comand'; did you mean 'command'"),
        ({"command": "a", "args": "-y"}, "args must be a list of texts, not '-y'"),
        ({"command": 3}, "command must be a text, not 3"),
        ({"command": "a", "env": ["A=1"]}, "env must be a mapping of names to texts"),
        ({"command": "a", "headers": {"A": "1"}}, r"headers=.* is ignored unless url=ADDRESS"),
        ({"url": "http://h/mcp", "args": ["1"]}, r"args=.* is ignored unless command=PROGRAM"),
        ({"command": "a", "deadline_s": 0}, "deadline_s=0.0 must lie between 0.001 and 86400.0"),
        ({"command": "a", "max_tries": 1.5}, "max_tries must be a whole number, not 1.5"),
        ({"command": "a", "max_sessions": -1}, "max_sessions=-1 must be at least 0"),
        ({"command": "a", "max_sessions": 4, "cache": "c"}, "cache cannot go with max_sessions: .*; drop one of them"),
        ({"command": "a", "mode": "replay"}, r"mode=replay is ignored unless cache=FILE"),
        ({"command": "a", "mode": "again", "cache": "c"}, "mode must be one of live, record"),
        ({"command": "a", "prefix": "a b"}, "prefix may have letters, digits and"),
        ({"command": "a", "args": ["--api-key", "abc"]}, r"args: --api-key may be a secret.*; write \$NAME there"),
        ({"command": "a", "args": ["x", "--access_token=abc"]}, "args: --access_token may be a secret"),
        ({"command": "a", "args": ["--header", "Authorization: Bearer abcd"]}, "args: one may be a secret"),
        ({"command": "a", "args": ["X-Api-Key: abc"]}, "args: one may be a secret"),
        ({"command": "a", "args": ["postgresql://me:abc@host/db"]}, "args: one may be a secret"),
        ({"command": "a", "args": ["-e", "PGPASSWORD=abc"]}, "args: one may be a secret"),
        ({"command": "a", "args": ["ghp_abc0123456789"]}, "args: one may be a secret"),
        ({"command": "a", "args": ["https://h/mcp?x=1&apiKey=abc"]}, "args: one may be a secret"),
        ({"command": "a", "args": ['{"a": 1, "password": "abc"}']}, "args: one may be a secret"),
        ({"command": "a", "args": ["Server=h;Password=abc"]}, "args: one may be a secret"),
        ({"command": "a", "args": ["-e", "GITHUB_PAT=abc"]}, "args: one may be a secret"),
        ({"command": "a", "args": ["--pass", "abc"]}, "args: --pass may be a secret"),
        ({"command": "a", "args": ["0abc" * 8]}, "args: one may be a secret"),
        ({"command": "a", "args": ["Zk3abcdefghiJKLMNopqrstuvw"]}, "args: one may be a secret"),
        ({"command": "mysql", "args": ["-p", "abc"]}, "args: -p may be a secret"),
        ({"command": "docker", "args": ["run", "mysql", "-pabc"]}, "args: -p may be a secret"),
        ({"command": "curl", "args": ["-u", "me:abc"]}, "args: -u may be a secret"),
        ({"command": "a", "args": ["--pin", "abc"]}, "args: --pin may be a secret"),
        ({"command": "npx", "args": ["mcp-remote", "https://abc@h/mcp"]}, "args: one may be a secret"),
        ({"command": "npx", "args": ["mcp-remote", "https://h/s?x=abcabcabc"]}, "args: one may be a secret"),
        ({"command": "a", "args": ["tvly-dev-abc01234567"]}, "args: one may be a secret"),
        ({"command": "a", "args": ["pplx-abc01234567"]}, "args: one may be a secret"),
        ({"command": "a", "args": ["BSAabc01234567"]}, "args: one may be a secret"),
        ({"url": "https://h/mcp/0123abcd-0123-4567-89ab-0123456789ab"}, "url may have a secret in it"),
        *(
            ({"url": f"https://h/mcp?{name}=abc"}, "url may have a secret in it")
            for name in ("code", "sig", "k", "otp")
        ),
        ({"url": "https://abc@h/mcp"}, "url may have a secret in it"),
        ({"command": "a", "env": {"PIN": "4711"}}, r"env\.PIN: .*; write \$PIN here"),
        ({"command": "a", "env": {"MY_OTP": "123456"}}, r"env\.MY_OTP: .*; write \$MY_OTP here"),
        ({"command": "a", "env": {"A": "$B abc"}}, r"env\.A: .*; write \$A here"),
        ({"url": "http://h/mcp", "headers": {"X": "Basic $B abc"}}, r"headers\.X: .*; write \$X here"),
        ({"command": "a", "env": {"A": "Bearer abc $B"}}, r"env\.A: .*; write \$A here"),
        ({"url": "http://h/mcp?apiKey=abc"}, "url may have a secret in it"),
        ({"url": "http://h/sk-abc0123456789/mcp"}, "url may have a secret in it"),
        ({"command": "a", "env": {"API_KEY": "abc"}}, r"env\.API_KEY: .*; write \$API_KEY here"),
        ({"command": "a", "env": {"HARMLESS": "abc"}}, r"env\.HARMLESS: .*; write \$HARMLESS here"),
        ({"command": "a", "env": {"MY_KEY": 123456}}, r"env\.MY_KEY: .*; write \$MY_KEY here"),
        ({"url": "http://h/mcp", "headers": {"Authorization": "Bearer x"}}, r"headers\.Authorization: .*run's folder"),
        ({"url": "http://h/mcp", "headers": {"X-Access-Token": "x"}}, r"write \$X_ACCESS_TOKEN here"),
    ],
)
def test_an_entry_that_makes_no_sense_is_told_in_one_line(entry, message):
    cfg = load_config(Config, ["--tools.names", MCP, "--tools.options", options({"command": "fine"}, entry)])
    with pytest.raises(UserError, match=rf"tools\.options: .*McpServers: servers\[1\].*{message}") as error:
        tool_schemas(cfg.tools)
    assert "\n" not in str(error.value) and "abc" not in str(error.value)


@pytest.mark.parametrize("url", ["http://me:swordfish@h/mcp", "http://swordfish@h/mcp", "localhost:8000"])
@pytest.mark.parametrize("more", [{}, {"cache": "c", "mode": "replay"}])
def test_a_url_that_is_none_or_has_a_password_is_refused_before_anything_is_written(url, more):
    with pytest.raises(UserError, match=r"^url of an MCP server|\.url may have a secret") as error:
        tool_schemas(config({"url": url} | more))
    assert "swordfish" not in str(error.value)


def test_what_only_looks_like_a_secret_may_stand_in_a_file():
    env = {"TOKENIZERS_PARALLELISM": "false", "LEVEL": "2", "RATE": "0.5", "API_KEY": "", "PLACE": "$HOME/data"}
    assert dict(parse_server(json.dumps({"command": "a", "env": env}), "x").env) == env
    args = [
        "-y", "@scope/server", "-p", "8080:80", "-p", "8000", "-u", "me", "--user", "me", "--port", "1", "--spin", "a",
        "https://h.example/mcp?limit=10", "https://h/a-long-name-of-a-page", "0123abcd-0123-4567-89ab-0123456789ab",
        "--max-tokens", "10", "--key-file", "a", "--api-key", "/run/key", "--token", "--quiet", "token", "b", "--key",
    ]  # fmt: skip
    assert list(parse_server(json.dumps({"command": "a", "args": args}), "x").args) == args
    runner = {"command": "npx", "args": ["-p", "server-files", "server"]}
    assert parse_server(json.dumps(runner), "x").args == ("-p", "server-files", "server")


def test_keys_stand_anywhere_as_names_of_the_environment_and_only_the_server_gets_them(monkeypatch):
    monkeypatch.setenv("MY_KEY", "swordfish")
    args = ["--api-key", "$MY_KEY", "--token=$MY_KEY", "Authorization: Bearer ${MY_KEY}", "postgres://me:$MY_KEY@h/db"]
    server = parse_server(json.dumps({"command": "a", "args": args}), "x")
    assert [server.filled(arg) for arg in server.args] == [
        arg.replace("${MY_KEY}", "swordfish").replace("$MY_KEY", "swordfish") for arg in args
    ]
    far = parse_server(json.dumps({"url": "http://h/mcp?key=$MY_KEY"}), "x")
    assert far.filled(far.url).endswith("=swordfish") and "swordfish" not in f"{far.label} {server.label}"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UserError, match="needs MY_KEY in the environment"):
        far.secrets()


def test_nothing_that_a_server_says_shows_what_it_was_given(monkeypatch):
    monkeypatch.setenv("LONG", "swordfish-2")
    monkeypatch.setenv("SHORT", "swordfish")
    monkeypatch.setenv("FLAG", "1")
    server = McpServer("a", env=(("A", "$LONG"), ("B", "x${SHORT}"), ("C", "$FLAG")))
    assert server.redacted("swordfish-2 swordfish 1") == "$LONG $SHORT 1"


def test_titles_of_a_schema_go_but_not_arguments_of_that_name():
    schema = {"title": "A", "properties": {"title": {"title": "T", "type": "string", "default": {"title": "x"}}}}
    assert without_titles(schema) == {"properties": {"title": {"type": "string", "default": {"title": "x"}}}}
