"""A hub on loopback: what `huggingface_hub` asks of huggingface.co for a model, both ways, and how it may fail.

Uploads are those without Xet (HF_HUB_DISABLE_XET): files are stored by their digests. Of each repository it has one
branch, `main`, at one commit. Nothing of it comes from the library that asks.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMITTED = "c" * 40
"""The commit of what is uploaded."""


@dataclass
class Repo:
    """Files by name; or how it fails: 'gated', 'silent', 'broken', 'read only', 'stuck' amid its weights."""

    commit: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    fails: str = ""
    is_private: bool = False


@dataclass
class Hub:
    """The hub at `url`; `asked` are its requests so far, `tokens` what came in their Authorization."""

    repos: MutableMapping[str, Repo]
    url: str = ""
    stored: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def hub(repos: Mapping[str, Repo]) -> Iterator[Hub]:
    """Serve `repos` until the end of the block."""
    here = Hub(dict(repos))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": here}))
    here.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield here
    finally:
        here.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = self._heard()
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        repo = self.hub.repos.get(name)
        if repo is None:
            return self._answer(
                401, {"error": "\x1b[31mInvalid username or password."}, {"X-Error-Code": "RepoNotFound"}
            )
        if repo.fails == "silent":
            self.hub.over.wait(600)
            self.close_connection = True
            return None
        if repo.fails == "broken":
            return self._answer(500, {"error": "\x1b[31moops"})
        if is_api and rest[:1] == ["tree"]:
            return self._answer(200, [_entry(name, content) for name, content in repo.files.items()])
        if is_api:
            if rest and rest != ["revision", "main"] and rest[1:] != [repo.commit]:
                return self._answer(404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": file} for file in repo.files]
            return self._answer(200, {"id": name, "sha": repo.commit, "siblings": siblings, "private": repo.is_private})
        if repo.fails == "gated":
            return self._answer(403, {"error": "no"}, {"X-Error-Code": "GatedRepo"})
        file = "/".join(rest[2:])
        if rest[:1] != ["resolve"] or file not in repo.files:
            return self._answer(404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})
        content = repo.files[file]
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": repo.commit}
        return self._send(200, content, headers, is_stuck=repo.fails == "stuck" and file == "model.safetensors")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self._heard()
        content = self._body()
        self.hub.stored[hashlib.sha256(content).hexdigest()] = content
        self._send(200, b"", {})

    def do_POST(self) -> None:
        path = self._heard()
        body = self._body()
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.hub.repos:
                return self._answer(409, {"error": "it is there", "url": f"{self.hub.url}/{name}"})
            if asked["organization"] != "org":
                return self._answer(403, {"error": "\x1b[31mnot yours"})
            self.hub.repos[name] = Repo(COMMITTED, is_private=asked.get("visibility", "public") == "private")
            return self._answer(200, {"url": f"{self.hub.url}/{name}"})
        name, _, rest = path.removeprefix("/api/models/").removeprefix("/").partition(".git/")
        name, _, what = (name, "", rest) if rest else _parted(name)
        repo = self.hub.repos[name]
        if repo.fails == "read only":
            return self._answer(403, {"error": "no"})
        if what == "info/lfs/objects/batch":
            objects = [
                one | {"actions": {"upload": {"href": f"{self.hub.url}/put"}}} for one in json.loads(body)["objects"]
            ]
            return self._answer(200, {"transfer": "basic", "objects": objects})
        if what == "preupload/main":
            modes = {True: "lfs", False: "regular"}
            files = [
                {"path": f["path"], "uploadMode": modes[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        made = dict(repo.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                made[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                made[value["path"]] = self.hub.stored[value["oid"]]
        self.hub.repos[name] = Repo(COMMITTED, made, is_private=repo.is_private)
        return self._answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{COMMITTED}", "commitOid": COMMITTED})

    def _heard(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if token := self.headers.get("Authorization"):
            self.hub.tokens.add(token)
        return path

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, data: object, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str], *, is_stuck: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and is_stuck:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.hub.over.wait(600)
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


def _parted(path: str) -> tuple[str, str, str]:
    """'org/x', and 'commit/main' behind it."""
    parts = path.split("/")
    return "/".join(parts[:2]), "/", "/".join(parts[2:])


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
