"""A stand-in for the Hub's API: repositories in memory, behind the requests that huggingface_hub makes."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

TOKEN = "hf_" + "abcdefgh" * 4


@dataclass
class Repository:
    """Its files, commits and tags."""

    is_private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[tuple[str, list[str]]] = field(default_factory=list)
    tags: dict[str, dict[str, bytes]] = field(default_factory=dict)


@dataclass
class Hub:
    """All repositories, and what goes wrong."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by their checksum."""
    num_uploads: int = 0
    broken_commit: int = 0
    """Number of the commit that fails once; 0: none."""
    tokens: set[str] = field(default_factory=set)
    """Of the requests."""


def oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self):
        name = self.path.partition("/api/models/")[2].partition("/revision")[0]
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.answer(
                404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            )
        elif self.is_allowed():
            self.answer(
                200,
                {
                    "id": name,
                    "private": repository.is_private,
                    "sha": "0" * 40,
                    "siblings": [],
                },
            )

    def do_PUT(self):
        data = self.body()
        self.hub.num_uploads += 1
        self.hub.stored[hashlib.sha256(data).hexdigest()] = data
        self.answer(200, {})

    def do_POST(self):
        data = self.body()
        if not self.is_allowed():
            return
        if self.path == "/api/repos/create":
            self.create(json.loads(data))
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            self.batch(json.loads(data))
        else:
            name, _, others = (
                self.path.removeprefix("/api/models/")
                .rpartition("/main")[0]
                .rpartition("/")
            )
            repository = self.hub.repositories[name]
            getattr(self, others.replace("-", "_"))(repository, data)

    def body(self):
        if self.headers["Content-Length"] is not None:
            return self.rfile.read(int(self.headers["Content-Length"]))
        actual = b""
        while size := int(self.rfile.readline(), 16):  # sent in chunks
            actual += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return actual

    def create(self, values):
        name = f"{values.get('organization') or 'me'}/{values['name']}"
        is_new = name not in self.hub.repositories
        if is_new:
            self.hub.repositories[name] = Repository(
                values.get("visibility") == "private" or bool(values.get("private"))
            )
        self.answer(
            200 if is_new else 409, {"url": f"{self.hub.url}/{name}", "name": name}
        )

    def preupload(self, repository, data):
        rows = []
        for file in json.loads(data)["files"]:
            path = file["path"]
            is_large = path.endswith(".safetensors")
            mode = "lfs" if is_large else "regular"
            row = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in repository.files:
                content = repository.files[path]
                row["oid"] = (
                    hashlib.sha256(content).hexdigest() if is_large else oid(content)
                )
            rows.append(row)
        self.answer(200, {"files": rows})

    def batch(self, values):
        objects = []
        for object in values["objects"]:
            upload = {
                "upload": {"href": f"{self.hub.url}/lfs/{object['oid']}", "header": {}}
            }
            objects.append(
                {
                    **object,
                    **({} if object["oid"] in self.hub.stored else {"actions": upload}),
                }
            )
        self.answer(200, {"objects": objects, "transfer": "basic"})

    def commit(self, repository, data):
        name = next(
            name for name, entry in self.hub.repositories.items() if entry is repository
        )
        if len(repository.commits) + 1 == self.hub.broken_commit:
            self.hub.broken_commit = 0
            self.answer(500, {"error": "try again"})
            return
        header, *lines = [json.loads(line) for line in data.splitlines()]
        paths = []
        for line in lines:
            value = line["value"]
            if line["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.stored[value["oid"]]
            else:
                repository.files[value["path"]] = base64.b64decode(value["content"])
            paths.append(value["path"])
        repository.commits.append((header["value"]["summary"], paths))
        self.answer(
            200,
            {
                "success": True,
                "commitOid": "1" * 40,
                "commitUrl": f"{self.hub.url}/{name}/commit/1",
            },
        )

    def tag(self, repository, data):
        repository.tags[json.loads(data)["tag"]] = dict(repository.files)
        self.answer(200, {})

    def is_allowed(self):
        inputs = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        self.hub.tokens.add(unquote(inputs))
        if inputs != TOKEN:
            self.answer(401, {"error": "Invalid credentials"})
        return inputs == TOKEN

    def answer(self, code, value, headers=None):
        data = json.dumps(value).encode()
        self.send_response(code)
        for name, text in {
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def running_hub():
    hub = Hub()
    handler = type("OwnHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
