"""What events cannot tell: a metadata-only list of each kind, compared with the store by resourceVersion.

After a watch had to start anew, objects deleted meanwhile get no event. A live read settles each difference, so a list
that is older than the store can do no harm. The same comparison tells at the start when the store is complete.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from tenantry.cluster import ApiError, Client, Forbidden, Key, Resource, uid_of, version_of
from tenantry.cluster.client import Versions
from tenantry.cluster.objects import is_older

from . import metrics
from .hub import Hub
from .watched import selector_of
from .workset import Priority

log = logging.getLogger(__name__)

BLIND_AFTER = 3
"""Resyncs in a row that find what a watch did not tell of, before the process counts as blind."""


class Resync:
    """Compares store and cluster; once at the start, then every `seconds` with jitter."""

    def __init__(
        self,
        client: Client,
        hub: Hub,
        seconds: float,
        *,
        grace_seconds: float = 5.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._hub = hub
        self._seconds = seconds
        self._grace = grace_seconds
        self._chance = chance
        self._missed_in_a_row: dict[Resource, int] = {}

    @property
    def blind(self) -> list[str]:
        """Kinds whose watch has told nothing of changes for several resyncs."""
        return [str(kind) for kind, count in self._missed_in_a_row.items() if count >= BLIND_AFTER]

    async def complete(self) -> None:
        """Wait until the store holds all that exists, then open the gate for workers."""
        started = time.monotonic()
        for resource in self._hub.resources():
            await self._settle(resource, first=True)
        self._hub.synced.set()
        metrics.SYNCED.set(1)
        log.info("store complete", extra={"seconds": round(time.monotonic() - started, 3)})

    async def run(self) -> None:
        """Resync until cancelled. A failed one is tried again at the next turn."""
        while True:
            await asyncio.sleep(self._seconds * (0.9 + 0.2 * self._chance()))
            for resource in self._hub.resources():
                try:
                    await self.once(resource)
                except Forbidden as error:
                    self._missed_in_a_row[resource] = self._missed_in_a_row.get(resource, 0) + 1
                    log.error("resync forbidden: %s", error, extra={"kind": resource.kind})
                except ApiError as error:
                    log.warning("resync failed: %s", error, extra={"kind": resource.kind})

    async def once(self, resource: Resource) -> int:
        """Settle every difference of one kind; how many there were."""
        found = await self._settle(resource, first=False)
        missed = self._missed_in_a_row.get(resource, 0)
        self._missed_in_a_row[resource] = missed + 1 if found else 0
        return found

    async def _settle(self, resource: Resource, *, first: bool) -> int:
        listed = await self._client.versions(resource, labels=selector_of(resource))
        keys = dict.fromkeys([*listed.objects, *self._hub.store.keys(resource)])
        open_keys = [key for key in keys if self._differs(resource, key, listed)]
        deadline = time.monotonic() + self._grace
        while open_keys and time.monotonic() < deadline:
            await asyncio.sleep(0.05)  # an event may be on its way
            open_keys = [key for key in open_keys if self._differs(resource, key, listed)]
        drift = 0
        for key in open_keys:
            what = await self._settle_one(resource, key)
            if what and not first:
                drift += 1
                metrics.DRIFT.labels(resource.kind, what).inc()
                log.warning(
                    "resync found what no event told of", extra={"kind": resource.kind, "object": str(key)}
                )
        return drift

    async def _settle_one(self, resource: Resource, key: Key) -> str | None:
        """Let a live read decide; what was wrong, if anything."""
        known = self._hub.store.get(resource, key)
        live = await self._client.get(resource, key)
        if live is None:
            if known is not None:
                self._hub.left(resource, key, uid_of(known))
            return "ghost" if known is not None else None
        if known is not None and version_of(known) == version_of(live):
            return None
        self._hub.arrived(resource, live, Priority.LOW)
        return "missed"

    def _differs(self, resource: Resource, key: Key, listed: Versions) -> bool:
        known, version = self._hub.store.get(resource, key), listed.objects.get(key)
        if known is None:
            return version is not None
        if version is None:
            return not is_older(listed.at, version_of(known))  # else it was made after the list
        return is_older(version_of(known), version)
