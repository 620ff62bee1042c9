"""`/healthz`, `/readyz` and `/metrics`, from a thread of their own: a stuck event loop cannot vouch for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

Check = Callable[[], list[str]]
"""What is wrong, in words; empty = fine."""


class HealthServer:
    """Serves until `stop`. Port 0 picks a free one, see `port`."""

    def __init__(self, port: int, alive: Check, ready: Check, host: str = "") -> None:
        checks = {"/healthz": alive, "/readyz": ready}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, generate_latest(), CONTENT_TYPE_LATEST)
                elif path in checks:
                    problems = checks[path]()
                    text = "\n".join(problems) or "ok"
                    self._answer(503 if problems else 200, f"{text}\n".encode(), "text/plain; charset=utf-8")
                else:
                    self._answer(404, b"not found\n", "text/plain; charset=utf-8")

            def _answer(self, status: int, body: bytes, content_type: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Probes are no news."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
