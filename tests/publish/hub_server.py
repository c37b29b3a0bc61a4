"""A stand-in for the Hub's API: repositories in memory, behind the requests that huggingface_hub makes."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_" + "abcdefgh" * 4


@dataclass
class Repository:
    """Its files and commits."""

    is_private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Their summaries."""


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


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self):
        name = self.path.partition("/api/models/")[2].partition("/revision")[0]
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.answer({"error": "Repository not found"}, 404)
        elif self.is_allowed():
            self.answer({"id": name, "private": repository.is_private})

    def do_PUT(self):
        data = self.body()
        self.hub.num_uploads += 1
        self.hub.stored[hashlib.sha256(data).hexdigest()] = data
        self.answer({})

    def do_POST(self):
        data = self.body()
        if not self.is_allowed():
            return
        if self.path == "/api/repos/create":
            self.create(json.loads(data))
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            self.batch(json.loads(data))
        else:
            path = self.path.removeprefix("/api/models/").removesuffix("/main")
            name, _, action = path.rpartition("/")
            repository = self.hub.repositories[name]
            if action == "preupload":
                self.preupload(repository, data)
            else:
                self.commit(repository, data)

    def body(self):
        if self.headers["Content-Length"] is not None:
            return self.rfile.read(int(self.headers["Content-Length"]))
        data = b""
        while size := int(self.rfile.readline(), 16):  # sent in chunks
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def create(self, values):
        name = f"{values['organization']}/{values['name']}"
        is_new = name not in self.hub.repositories
        if is_new:
            is_private = values["visibility"] == "private"
            self.hub.repositories[name] = Repository(is_private)
        address = f"{self.hub.url}/{name}"
        self.answer({"url": address, "name": name}, 200 if is_new else 409)

    def preupload(self, repository, data):
        rows = []
        for file in json.loads(data)["files"]:
            path = file["path"]
            content = repository.files.get(path, b"")
            if path.endswith(".safetensors"):
                mode = "lfs"
                checksum = hashlib.sha256(content)
            else:
                mode = "regular"
                checksum = hashlib.sha1(b"blob %d\0" % len(content) + content)
            row = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in repository.files:
                row["oid"] = checksum.hexdigest()
            rows.append(row)
        self.answer({"files": rows})

    def batch(self, values):
        objects = values["objects"]
        for entry in objects:
            if entry["oid"] not in self.hub.stored:
                address = f"{self.hub.url}/lfs/{entry['oid']}"
                entry["actions"] = {"upload": {"href": address, "header": {}}}
        self.answer({"objects": objects, "transfer": "basic"})

    def commit(self, repository, data):
        if len(repository.commits) + 1 == self.hub.broken_commit:
            self.hub.broken_commit = 0
            self.answer({"error": "try again"}, 500)
            return
        header, *lines = [json.loads(line) for line in data.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.stored[value["oid"]]
            else:
                repository.files[value["path"]] = base64.b64decode(value["content"])
        repository.commits.append(header["value"]["summary"])
        address = f"{self.hub.url}/me/name/commit/1"
        self.answer({"success": True, "commitOid": "1" * 40, "commitUrl": address})

    def is_allowed(self):
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        self.hub.tokens.add(token)
        if token != TOKEN:
            self.answer({"error": "Invalid credentials"}, 401)
        return token == TOKEN

    def answer(self, value, code=200):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
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
