"""A server that answers as the Hub does, on loopback: repository information and file downloads, errors included."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_reader"


class Hub:
    """What the server holds: repositories of revisions of files.

    Args:
        revisions (`dict`): by repository and branch or tag, a folder.
        gated (`set[str]`): repositories whose files want [`TOKEN`].
        cut (`set[str]`): file names of which only a half arrives.
    """

    def __init__(self) -> None:
        self.revisions: dict[str, dict[str, Path]] = {}
        self.gated: set[str] = set()
        self.cut: set[str] = set()
        self.requests: list[str] = []
        self.url = ""

    def add(self, repository: str, folder: Path, revision: str = "main") -> str:
        """Publishes a folder; the name of its repository."""
        self.revisions.setdefault(repository, {})[revision] = folder
        return repository

    def commit(self, repository: str, revision: str) -> str:
        return hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()

    def folder(self, repository: str, revision: str) -> tuple[str, Path] | None:
        """The commit and folder of a branch, a tag or a commit."""
        for name, folder in self.revisions[repository].items():
            commit = self.commit(repository, name)
            if revision in (name, commit):
                return commit, folder
        return None

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        hub = self

        class Handler(_Handler):
            def __init__(self, *args: Any) -> None:
                self.hub = hub
                super().__init__(*args)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            self._information("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else "main", parts[4:])
        elif parts[2:3] == ["resolve"]:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._error(404, "EntryNotFound")

    def _information(self, repository: str, revision: str, rest: list[str]) -> None:
        if repository not in self.hub.revisions:
            return self._error(401, "RepoNotFound")
        if rest and rest[0] != "revision":
            return self._error(404, "EntryNotFound")
        found = self.hub.folder(repository, revision)
        if found is None:
            return self._error(404, "RevisionNotFound")
        commit, folder = found
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        body = {"id": repository, "modelId": repository, "sha": commit, "private": False, "tags": []}
        self._send(200, json.dumps(body | {"siblings": [{"rfilename": name} for name in files]}).encode())

    def _file(self, repository: str, revision: str, name: str) -> None:
        if repository not in self.hub.revisions:
            return self._error(401, "RepoNotFound")
        found = self.hub.folder(repository, revision)
        if found is None:
            return self._error(404, "RevisionNotFound")
        if repository in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._error(403, "GatedRepo", f"Access to model {repository} is restricted.")
        commit, folder = found
        if not (folder / name).is_file():
            return self._error(404, "EntryNotFound", headers={"X-Repo-Commit": commit})
        data = (folder / name).read_bytes()
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Linked-Size": str(len(data)),
        }
        self._send(200, data[: len(data) // 2] if name in self.hub.cut else data, headers)

    def _error(self, status: int, code: str, message: str = "", headers: dict[str, str] | None = None) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message or code, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
