"""A Hugging Face hub of one process: repositories from directories, with ranges.

Knows the few requests of the client: a repository's list of files, and a file.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

INFO = re.compile(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/([^?]+))?(?:\?.*)?")
TREE = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/tree/([^?]+)(?:\?.*)?")
FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/([^?]+)")


@dataclass
class Hub:
    """What is served, and what was asked for.

    Args:
        repos: (name, revision) -> directory.
        sent: bytes sent of each file, by name.
        break_after: bytes after which the connection is cut, for one file.
    """

    repos: dict[tuple[str, str], Path]
    url: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)
    break_after: dict[str, int] = field(default_factory=dict)

    def commit(self, repo: str, revision: str) -> str | None:
        path = self.repos.get((repo, revision))
        for (name, _), other in self.repos.items():
            sha = hashlib.sha1(str(other).encode()).hexdigest()
            if name == repo and (other == path or sha == revision):
                return sha
        return None

    def directory(self, commit: str) -> Path:
        shas = {
            hashlib.sha1(str(p).encode()).hexdigest(): p for p in self.repos.values()
        }
        return shas[commit]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        if match := FILE.fullmatch(self.path):
            return self.file(*match.groups(), body)
        match = TREE.fullmatch(self.path) or INFO.fullmatch(self.path)
        commit = match and self.hub.commit(match[1], match[2] or "main")
        if not commit:
            return self.missing()
        root = self.hub.directory(commit)
        files = [p for p in sorted(root.rglob("*")) if p.is_file()]
        names = [p.relative_to(root).as_posix() for p in files]
        if TREE.fullmatch(self.path):
            data = [
                {"type": "file", "path": n, "size": p.stat().st_size, "oid": _etag(p)}
                for n, p in zip(names, files, strict=True)
            ]
        else:
            siblings = [{"rfilename": name} for name in names]
            data = {"id": match[1], "modelId": match[1], "sha": commit}
            data |= {"siblings": siblings, "tags": [], "private": False}
        return self.send(json.dumps(data).encode(), {}, body)

    def file(self, repo: str, revision: str, name: str, body: bool) -> None:
        commit = self.hub.commit(repo, revision)
        path = commit and self.hub.directory(commit) / name
        if not path or not path.is_file():
            return self.missing()
        data, status = path.read_bytes(), 200
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": commit}
        headers["Accept-Ranges"] = "bytes"
        if wanted := self.headers.get("Range"):
            start = int(re.fullmatch(r"bytes=(\d+)-\d*", wanted)[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
            self.hub.ranges.append(name)
        return self.send(data, headers, body, status, name)

    def missing(self) -> None:
        headers = {"X-Error-Code": "RepoNotFound"}
        self.send(b"", headers, False, 404)

    def send(
        self, data: bytes, headers: dict, body: bool, status: int = 200, name: str = ""
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if body:
            data = data[: self.hub.break_after.pop(name, len(data))]
            if name:
                self.hub.sent[name] = self.hub.sent.get(name, 0) + len(data)
            self.wfile.write(data)
            self.close_connection = True


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serve(repos: dict[tuple[str, str], Path]) -> Iterator[Hub]:
    """A running hub; ``hub.url`` is its endpoint."""
    hub = Hub(repos)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
