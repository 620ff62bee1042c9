"""A whole replica in one process, HTTP too: for tests and tools. What serves is two processes (`main`, `process`)."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path

from tenantry_engine.config import EngineConfig
from tenantry_engine.engine import Engine
from tenantry_engine.identity import Verifier
from tenantry_engine.ipc.link import EngineLink
from tenantry_engine.ipc.service import Service
from tenantry_engine.server.admin import Admin
from tenantry_engine.server.front import Front
from tenantry_engine.server.serving import Serving
from tenantry_engine.startup import load_engine
from tenantry_engine.tokenizer import Tokenizer


@dataclass
class Replica:
    """Its halves are joined by the same link as two processes."""

    engine: Engine
    front: Front
    _service: Service
    _socket: socket.socket

    @classmethod
    def load(
        cls, config: EngineConfig, verifier: Verifier | None, *, adapters: Path | None = None
    ) -> Replica:
        """Loads everything; nothing runs yet. Raises EngineError."""
        engine, facts = load_engine(config)
        ours, theirs = socket.socketpair()
        service = Service(engine, facts, theirs, gone=lambda: None)
        engine.ended = lambda reason: service.close()
        front = Front.make(
            EngineLink(facts), config.model, Tokenizer(config.model), verifier, adapters=adapters
        )
        return cls(engine, front, service, ours)

    @property
    def serving(self) -> Serving:
        """The application of the serving port."""
        return self.front.serving

    @property
    def admin(self) -> Admin:
        """The application of the admin port."""
        return self.front.admin

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to serve; to be called on the loop that runs the applications."""
        self._connecting = loop.create_task(self.front.link.connect(self._socket))
        self.engine.start()
        self._service.start()
        self.admin.ready = True

    def close(self) -> None:
        """Frees what a replica that was never started holds, too."""
        self._service.close()
        self._socket.close()
