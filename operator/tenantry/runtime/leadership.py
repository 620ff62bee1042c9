"""Leadership by a Lease, in a thread and event loop of its own: a busy main loop must not cost us the Lease.

Only the leader reconciles. Who loses the Lease ends the process at once: in-flight work may no longer be ours to do,
and every reconcile bears being cut off anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tenantry.cluster import ApiError, Client, Key
from tenantry.cluster.leases import LeaseLock, LeaseTimes

from . import metrics
from .controller import Fence

log = logging.getLogger(__name__)

LEASE_NAME = "tenantry-operator"


def identity() -> str:
    """Unique for each process, so that a restart is a change of leadership."""
    return f"{os.environ.get('HOSTNAME') or socket.gethostname()}_{uuid.uuid4()}"


def exit_at_once() -> None:
    """What a leader does that leads no more."""
    os._exit(1)


class Leadership(threading.Thread):
    """Acquires and renews the Lease until `stop`. `elected` is set in the main loop when this process leads."""

    def __init__(
        self,
        kubeconfig: Path | None,
        namespace: str,
        *,
        name: str | None = None,
        times: LeaseTimes | None = None,
        on_lost: Callable[[], None] = exit_at_once,
    ) -> None:
        super().__init__(name="leadership", daemon=True)
        self.me = name or identity()
        self.elected = asyncio.Event()
        self.beat = time.monotonic()
        self._kubeconfig = kubeconfig
        self._key = Key(namespace, LEASE_NAME)
        self._times = times or LeaseTimes()
        self._on_lost = on_lost
        self._main = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._renewed: float | None = None
        self._epoch = 0
        self._counter = 0

    def fence(self) -> Fence:
        """A pair higher than any given before, by this leader or an earlier one. To be called from the main loop."""
        if not self.leads():
            raise RuntimeError("only the leader declares anything to replicas")
        self._counter += 1
        return Fence(self._epoch, self._counter)

    def leads(self) -> bool:
        """Whether this process leads and nobody can have taken the Lease since it was last renewed.

        False in a process that was stopped for long, before the Lease itself could tell it. From any thread.
        """
        renewed = self._renewed
        return renewed is not None and time.monotonic() - renewed < self._times.duration

    def beats(self, within: float) -> bool:
        """Whether the thread came round in the last `within` seconds."""
        return self.is_alive() and time.monotonic() - self.beat <= within

    def stop(self) -> None:
        """Give the Lease back, so that the next one need not wait; blocks until that is done."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=10)

    def run(self) -> None:
        try:
            asyncio.run(self._lead())
        except Exception:
            # nobody renews any more, so nobody may go on as if this process led
            log.critical("the leadership thread crashed: this process ends", exc_info=True)
            self._on_lost()

    async def _lead(self) -> None:
        client = await Client.connect(
            self._kubeconfig,
            attempts=1,
            timeout_seconds=self._times.renew_within / 2,
            user_agent="tenantry-leader",
        )
        lock = LeaseLock(client, self._key, self.me, self._times)
        metrics.MASTER.labels(LEASE_NAME).set(0)
        try:
            while not self._stopping.is_set():
                self.beat = asked = time.monotonic()
                held = await self._attempt(lock)
                if held:
                    first, self._renewed = self._renewed is None, asked
                    if first:
                        self._epoch = lock.transitions
                        log.info("leading", extra={"lease": str(self._key), "epoch": self._epoch})
                        metrics.MASTER.labels(LEASE_NAME).set(1)
                        self._main.call_soon_threadsafe(self.elected.set)
                elif self._renewed is not None and (held is False or self._late()):
                    self._renewed = None
                    log.critical("leadership lost: this process ends")
                    metrics.MASTER.labels(LEASE_NAME).set(0)
                    self._on_lost()
                    return
                await asyncio.to_thread(self._stopping.wait, self._times.retry)
            await self._release(lock)
        finally:
            await client.close()

    def _late(self) -> bool:
        return time.monotonic() - (self._renewed or 0.0) > self._times.renew_within

    async def _attempt(self, lock: LeaseLock) -> bool | None:
        """Whether the Lease is held; None when the API server did not say."""
        try:
            return await lock.acquire_or_renew()
        except ApiError as error:
            log.warning("lease not renewed: %s", error)
            return None

    async def _release(self, lock: LeaseLock) -> None:
        try:
            await lock.release()
        except ApiError as error:
            log.warning("lease not released: %s", error)
