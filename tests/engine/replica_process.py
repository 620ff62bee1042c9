"""A replica as `tenantry-engine` starts it, for the tests that end processes: its ports, its log, its engine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import engine_world as world
import httpx
import psutil
from cluster.process import dying_with_me, free_port

COMMAND = Path(sys.executable).parent / "tenantry-engine"


class ReplicaProcess:
    """Started at once; `wait` until it is ready."""

    def __init__(self, model: Path, folder: Path, *flags: str, **environment: str) -> None:
        self.port, self.admin_port = free_port(), free_port()
        self._log = folder / f"replica-{time.monotonic_ns()}.log"
        command = [
            COMMAND, "--model", model, "--model-name", "base", "--dev-open", "--port", str(self.port), "--admin-port",
            str(self.admin_port), "--data-dir", folder / "data", "--dtype", "float32", "--threads", "1", *flags,
        ]  # fmt: skip
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                dying_with_me(command), stderr=log, env={**os.environ, **environment}, start_new_session=True
            )
        self.url, self.admin = (f"http://127.0.0.1:{port}" for port in (self.port, self.admin_port))

    def wait(self) -> ReplicaProcess:
        """Until it is ready."""
        world.wait_for(self._ready, timeout=120)
        return self

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.said
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.admin}/readyz", timeout=5).status_code == 200
        return False

    @property
    def said(self) -> str:
        """Its log."""
        return self._log.read_text()

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        [child] = psutil.Process(self.process.pid).children()
        return child

    def send(self, number: int) -> None:
        """A signal to the first process alone, as a kubelet does."""
        self.process.send_signal(number)

    def send_all(self, number: int) -> None:
        """A signal to the whole group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Ends whatever is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


@contextlib.contextmanager
def running(model: Path, folder: Path, *flags: str, **environment: str) -> Iterator[ReplicaProcess]:
    """A replica that is ready and leaves nothing behind."""
    replica = ReplicaProcess(model, folder, *flags, **environment)
    try:
        yield replica.wait()
    finally:
        replica.close()
