"""Sockets and servers of a process that serves several ports and minds its own signals."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn

from tenantry_engine.errors import EngineError

_STUCK_CLIENT_SECONDS = 60


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that no one can connect to before a server listens on it. Raises EngineError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # a client that does not take what was sent is gone after this time, and with it what it holds
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_CLIENT_SECONDS * 1000)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise EngineError(f"`--port` and `--admin-port` must be free: {host}:{port}: {error}") from error
    return sock


def end(servers: list[Server]) -> None:
    """They take no new connection, and end when their answers are out."""
    for server in servers:
        server.should_exit = True


class Server(uvicorn.Server):
    """Several servers share the process, so signals are ours to handle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def configuration(
    app: object, shutdown_seconds: float = 60, context: ssl.SSLContext | None = None
) -> uvicorn.Config:
    """`context`: how the port speaks TLS; None: not at all."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(shutdown_seconds),
        server_header=False,
    )
    if context is not None:
        config.load()
        config.ssl = context  # ours renews its certificates; uvicorn's own is made from files, once
    return config
