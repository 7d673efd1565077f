"""A server on loopback that speaks the Hub's protocol, as far as huggingface_hub asks for a download: metadata,
redirects, bytes.

As on the real Hub, large files come from another server (another name and port here), to which no token may go.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """Repositories by "datasets/OWNER/NAME" or "models/OWNER/NAME", each a dict of file names and bytes.

    `gated`: repositories behind a form.
    """

    repos: dict[str, dict[str, bytes]]
    commit: str = COMMIT
    gated: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """(method, path, headers) of all requests."""
    etag: str = ""
    """Said of every file in the place of its checksum."""

    def __enter__(self) -> HubServer:
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self)) for _ in range(2)]
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        ports = [server.server_address[1] for server in self.servers]
        self.url, self.cdn = f"http://127.0.0.1:{ports[0]}", f"http://localhost:{ports[1]}"
        return self

    def __exit__(self, *_) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def environment(self, cache: Path) -> dict[str, str]:
        """The environment of a process that is to ask this server."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def downloads(self) -> list[str | None]:
        """The Range of each GET of a file's bytes; None = from its beginning."""
        return [headers.get("range") for method, path, headers in self.requests if method == "GET" and "/blob" in path]


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            hub.requests.append((self.command, path, headers))
            parts = path.strip("/").split("/")
            if parts[0] == "api":
                self.repository("/".join(parts[1:4]))
            elif parts[0] == "blob":
                self.blob(*path.removeprefix("/blob/").split("::"))
            elif "resolve" in parts:
                at = parts.index("resolve")
                kind = "" if parts[0] == "datasets" else "models/"
                self.resolve(kind + "/".join(parts[:at]), "/".join(parts[at + 2 :]))
            else:
                self.answer(404)

        def repository(self, repo: str) -> None:
            if repo not in hub.repos:
                return self.answer(401, {"X-Error-Code": "RepoNotFound"})  # the Hub does not tell it from a private one
            siblings = [{"rfilename": name} if name else {} for name in hub.repos[repo]]
            body = {"id": repo.partition("/")[2], "sha": hub.commit, "siblings": siblings, "private": False, "tags": []}
            return self.answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

        def resolve(self, repo: str, name: str) -> None:
            if repo in hub.gated:
                return self.answer(401, {"X-Error-Code": "GatedRepo"})
            if name not in hub.repos.get(repo, {}):
                return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit})
            content = hub.repos[repo][name]
            headers = {"X-Repo-Commit": hub.commit}
            etag = hub.etag or hashlib.sha256(content).hexdigest()
            linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content)), "ETag": f'"{etag}"'}
            return self.answer(302, headers | linked | {"Location": f"{hub.cdn}/blob/{repo}::{name}"})

        def blob(self, repo: str, name: str) -> None:
            self.answer(200, body=hub.repos[repo][name])

        def answer(self, code: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
            self.send_response(code)
            for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler
