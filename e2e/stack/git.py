"""A Git repository that Flux can clone: on this machine's disk, served over HTTP by Git's own backend."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cluster.shell import run

_IDENTITY = {
    "GIT_AUTHOR_NAME": "platform",
    "GIT_AUTHOR_EMAIL": "platform@example.com",
    "GIT_COMMITTER_NAME": "platform",
    "GIT_COMMITTER_EMAIL": "platform@example.com",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


@dataclass(frozen=True)
class Repository:
    """A work tree with one branch, `main`; `url` is where it can be cloned from."""

    folder: Path
    url: str

    def git(self, *arguments: str) -> str:
        """Standard output of a git command in the work tree."""
        return run("git", *arguments, cwd=self.folder, environment={**os.environ, **_IDENTITY}).strip()

    def commit(self, message: str, files: dict[str, str]) -> str:
        """Write the files and commit them; the commit's hash."""
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)
        return self.head

    def revert(self) -> str:
        """`git revert` of the last commit; the new commit's hash."""
        self.git("revert", "--no-edit", "HEAD")
        return self.head

    @property
    def head(self) -> str:
        return self.git("rev-parse", "HEAD")


@contextmanager
def serve(root: Path) -> Iterator[Repository]:
    """An empty repository below `root`, served on a free port of loopback until the block ends."""
    folder = root / "fleet"
    folder.mkdir(parents=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(root))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        repository = Repository(folder, f"http://127.0.0.1:{server.server_address[1]}/fleet/.git")
        repository.git("init", "--quiet", "--initial-branch=main")
        yield repository
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(root: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """One request is one run of `git http-backend`, a CGI program (RFC 3875)."""

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            if self.headers.get("transfer-encoding") == "chunked":
                self._answer(self._chunks())
            else:
                self._answer(self.rfile.read(int(self.headers.get("content-length") or 0)))

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _chunks(self) -> bytes:
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _answer(self, body: bytes) -> None:
            path, _, query = self.path.partition("?")
            environment = {
                **os.environ,
                **_IDENTITY,
                "GIT_PROJECT_ROOT": str(root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "GIT_PROTOCOL": self.headers.get("git-protocol", ""),
                "REQUEST_METHOD": self.command,
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "CONTENT_TYPE": self.headers.get("content-type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("content-encoding", ""),
            }
            done = subprocess.run(
                ["git", "http-backend"], input=body, capture_output=True, env=environment, check=False
            )
            head, _, content = done.stdout.partition(b"\r\n\r\n")
            headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
            self.send_response(int(headers.pop("Status", "200").split()[0]))
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler
