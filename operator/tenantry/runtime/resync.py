"""What events cannot tell: a metadata-only list of each kind, compared with the store by resourceVersion.

After a watch had to start anew, objects deleted meanwhile get no event: then the comparison is made at once, else every
few minutes. A live read settles each difference, so a list that is older than the store can do no harm. The same
comparison tells at the start when the store is complete.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import islice

from tenantry.cluster import ApiError, Client, Forbidden, Key, Resource, uid_of, version_of
from tenantry.cluster.client import Versions
from tenantry.cluster.objects import is_older

from . import metrics
from .hub import Hub
from .patience import EndlessBackoffs, patiently
from .watched import selector_of
from .workset import Priority

log = logging.getLogger(__name__)

RELIST_SECONDS = 1.0
"""Between the first sign of a watch that began anew and the comparison: other kinds' watches begin anew too."""

TRIES = 6
"""For one kind in one resync, over about half a minute; then the next resync has to do."""

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
            await patiently(f"first list of {resource}", partial(self._settle, resource, first=True))
        self._hub.synced.set()
        metrics.SYNCED.set(1)
        log.info("store complete", extra={"seconds": round(time.monotonic() - started, 3)})

    async def run(self) -> None:
        """Resync until cancelled, and at once when a watch began anew. A failed one is tried again at the next turn."""
        while True:
            await self._turn()
            for resource in self._hub.resources():
                try:
                    await patiently(
                        f"resync of {resource}",
                        partial(self.once, resource),
                        islice(EndlessBackoffs(), TRIES),
                    )
                except Forbidden as error:
                    self._missed_in_a_row[resource] = self._missed_in_a_row.get(resource, 0) + 1
                    log.error("resync forbidden: %s", error, extra={"kind": resource.kind})
                except ApiError as error:
                    log.warning("resync failed: %s", error, extra={"kind": resource.kind})

    async def _turn(self) -> None:
        """Wait until it is time, or until a watch began anew."""
        try:
            async with asyncio.timeout(self._seconds * (0.9 + 0.2 * self._chance())):
                await self._hub.relisted.wait()
        except TimeoutError:
            return
        await asyncio.sleep(RELIST_SECONDS)
        self._hub.relisted.clear()
        log.info("a watch began anew: comparing every kind")

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
