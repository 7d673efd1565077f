"""A server on loopback that speaks the Hub's protocol, as far as huggingface_hub asks: metadata, redirects, ranges;
and uploads: new repositories, large files by their SHA-256, commits.

As on the real Hub, large files come from another server (another name and port here), to which no token may go.
"""

from __future__ import annotations

import base64
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

    `corrupt`: files whose bytes come altered. `cut_after`: the connection breaks after so many bytes of a large file,
    once for each number in it. `gated`: repositories behind a form.
    """

    repos: dict[str, dict[str, bytes]]
    commit: str = COMMIT
    corrupt: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    cut_after: list[int] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """(method, path, headers) of all requests."""
    small: set[str] = field(default_factory=set)
    """Files that are kept in git itself, not in its large-file storage."""
    writer: str = ""
    """The token that may write; others are refused."""
    private: set[str] = field(default_factory=set)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files that have arrived whole, by SHA-256; a repository has them only after a commit."""
    hangs_at_upload: int = 0
    """From this upload of a large file on, counted from 1, the server reads none; 0 = it reads all."""
    num_uploads: int = 0
    """Uploads of large files that were begun."""
    fails_commit: int = 0
    """HTTP status with which commits fail; 0 = they do not."""

    def __enter__(self) -> HubServer:
        self.is_hanging, self.is_released = threading.Event(), threading.Event()
        self.changed, self.num_connections = threading.Condition(), 0
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self)) for _ in range(2)]
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        ports = [server.server_address[1] for server in self.servers]
        self.url, self.cdn = f"http://127.0.0.1:{ports[0]}", f"http://localhost:{ports[1]}"
        return self

    def __exit__(self, *_) -> None:
        self.is_released.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def let_go(self) -> None:
        """Drop the uploads that hang, hang no more, and return when the last connection has ended: of clients that are
        dead, nothing arrives behind this."""
        self.hangs_at_upload = 0
        self.is_released.set()
        with self.changed:
            assert self.changed.wait_for(lambda: not self.num_connections, timeout=120)

    def environment(self, cache: Path) -> dict[str, str]:
        """What a process must have in its environment to ask this server."""
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


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_) -> None:
            pass

        def setup(self) -> None:
            super().setup()
            with hub.changed:
                hub.num_connections += 1

        def finish(self) -> None:
            try:
                super().finish()
            finally:
                with hub.changed:
                    hub.num_connections -= 1
                    hub.changed.notify_all()

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

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            hub.requests.append((self.command, path, headers))
            if headers.get("authorization") != f"Bearer {hub.writer}":
                code = 403 if "authorization" in headers else 401
                return self.json({"error": "Invalid username or password."}, code)
            if path.endswith("/commit/main"):
                return self.commit(path.removeprefix("/api/").removesuffix("/commit/main"), body)
            asked = json.loads(body)
            if path == "/api/repos/create":
                return self.create("models/" + asked["organization"] + "/" + asked["name"], asked)
            if path == "/api/validate-yaml":
                return self.json({"errors": [], "warnings": []})
            if path.endswith("/preupload/main"):
                modes = [
                    (one["path"], "lfs" if one["path"].endswith(".safetensors") else "regular")
                    for one in asked["files"]
                ]
                return self.json(
                    {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]}
                )
            if path.endswith(".git/info/lfs/objects/batch"):
                return self.json({"transfer": "basic", "objects": [self.lfs(one) for one in asked["objects"]]})
            return self.answer(404)

        def do_PUT(self) -> None:
            hub.requests.append(
                (self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
            )
            with hub.changed:
                hub.num_uploads += 1
                hangs = 0 < hub.hangs_at_upload <= hub.num_uploads
                if hangs:  # those before it are stored by then
                    hub.changed.wait_for(lambda: len(hub.stored) >= hub.hangs_at_upload - 1, timeout=600)
            if hangs:
                hub.is_hanging.set()
                hub.is_released.wait(600)
                self.close_connection = True
                return
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if hashlib.sha256(content).hexdigest() != self.path.rpartition("/")[2]:  # cut off
                return self.answer(400)
            with hub.changed:
                hub.stored[self.path.rpartition("/")[2]] = content
                hub.changed.notify_all()
            self.answer(200)

        def create(self, repo: str, asked: dict) -> None:
            known = repo in hub.repos
            hub.repos.setdefault(repo, {})
            if asked.get("visibility") == "private" and not known:
                hub.private.add(repo)
            self.json({"url": f"{hub.url}/{repo.removeprefix('models/')}", "name": repo}, 409 if known else 200)

        def lfs(self, wanted: dict) -> dict:
            """What to do for a large file: nothing where it is stored already."""
            there = wanted["oid"] in hub.stored
            upload = {"upload": {"href": f"{hub.cdn}/upload/{wanted['oid']}", "header": {}}}
            return wanted if there else wanted | {"actions": upload}

        def commit(self, repo: str, body: bytes) -> None:
            if hub.fails_commit:
                return self.json({"error": "no"}, hub.fails_commit)
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    hub.repos[repo][value["path"]] = hub.stored[value["oid"]]
            url = f"{hub.url}/{repo.removeprefix('models/')}/commit/{hub.commit}"
            return self.json({"commitUrl": url, "commitOid": hub.commit, "pullRequestUrl": None})

        def json(self, tree: dict, code: int = 200) -> None:
            self.answer(code, {"Content-Type": "application/json"}, json.dumps(tree).encode())

        def repository(self, repo: str) -> None:
            if repo not in hub.repos:
                return self.answer(401, {"X-Error-Code": "RepoNotFound"})  # the Hub does not tell it from a private one
            siblings = [
                {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
                | ({} if name in hub.small else {"lfs": _lfs(content)})
                for name, content in hub.repos[repo].items()
            ]
            body = {"id": repo.partition("/")[2], "sha": hub.commit, "siblings": siblings, "private": False, "tags": []}
            return self.answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

        def resolve(self, repo: str, name: str) -> None:
            if repo in hub.gated:
                return self.answer(401, {"X-Error-Code": "GatedRepo"})
            if name not in hub.repos.get(repo, {}):
                return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit})
            content = hub.repos[repo][name]
            headers = {"X-Repo-Commit": hub.commit, "Accept-Ranges": "bytes"}
            if name in hub.small:
                return self.content(repo, name, headers | {"ETag": f'"{git_sha1(content)}"'})
            etag = hashlib.sha256(content).hexdigest()
            linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content)), "ETag": f'"{etag}"'}
            return self.answer(302, headers | linked | {"Location": f"{hub.cdn}/blob/{repo}::{name}"})

        def blob(self, repo: str, name: str) -> None:
            self.content(repo, name, {"Accept-Ranges": "bytes"})

        def content(self, repo: str, name: str, headers: dict[str, str]) -> None:
            content = hub.repos[repo][name]
            if name in hub.corrupt:
                content = content[:-1] + bytes([content[-1] ^ 1])
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
            if start:
                headers |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            self.answer(206 if start else 200, headers, content[start:], cut=name not in hub.small)

        def answer(
            self, code: int, headers: dict[str, str] | None = None, body: bytes = b"", cut: bool = False
        ) -> None:
            self.send_response(code)
            for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if cut and hub.cut_after:
                self.wfile.write(body[: hub.cut_after.pop(0)])
                self.wfile.flush()
                self.close_connection = True
                return
            self.wfile.write(body)

    return Handler


def _lfs(content: bytes) -> dict:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
