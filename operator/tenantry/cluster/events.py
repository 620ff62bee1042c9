"""Events for people (events.k8s.io/v1), aggregated into series so that a repeated one costs no request each time.

Recording never waits and never fails a reconcile: events are best effort and the queue is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from .client import Client
from .errors import ApiError, NotFound
from .resources import EVENT, Key, Obj, key_of
from .status import micro_timestamp

log = logging.getLogger(__name__)

SERIES_SECONDS = 360.0
"""A repetition within this time joins the series, whose count is written at most once in this time."""

_NOTE_LIMIT = 1024
_KNOWN_LIMIT = 4096
_QUEUE_LIMIT = 1000


@dataclass
class _Series:
    event: Key
    count: int
    written_at: float


class Recorder:
    """Records events. `run()` writes them until it is cancelled."""

    def __init__(
        self,
        client: Client,
        controller: str = "tenantry.dev/operator",
        instance: str = "tenantry-operator",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._controller = controller
        self._instance = instance[:128]
        self._now = now
        self._known: OrderedDict[tuple[str, ...], _Series] = OrderedDict()
        self._queue: asyncio.Queue[tuple[tuple[str, ...], Obj]] = asyncio.Queue(_QUEUE_LIMIT)
        self._unwritten = 0

    def event(
        self,
        regarding: Obj,
        reason: str,
        note: str,
        *,
        action: str,
        type: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """Record that `action` on the object had the outcome `reason` (both CamelCase words)."""
        metadata = regarding["metadata"]
        key = key_of(regarding)
        namespace = key.namespace or "default"
        now = self._now()
        event: Obj = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": f"{key.name[:200]}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
            "eventTime": micro_timestamp(now),
            "reportingController": self._controller,
            "reportingInstance": self._instance,
            "action": action[:128],
            "reason": reason[:128],
            "type": type,
            "note": _shortened(note),
            "regarding": {
                "apiVersion": regarding["apiVersion"],
                "kind": regarding["kind"],
                "name": key.name,
                **({"namespace": key.namespace} if key.namespace else {}),
                "uid": metadata.get("uid", ""),
            },
        }
        identity = (str(metadata.get("uid", "")), type, reason, action)
        try:
            self._queue.put_nowait((identity, event))
            self._unwritten += 1
        except asyncio.QueueFull:
            log.warning("event dropped: the queue is full", extra={"reason": reason})

    def idle(self) -> bool:
        """Whether all that was recorded is written."""
        return self._unwritten == 0

    async def run(self) -> None:
        """Write what was recorded."""
        while True:
            identity, event = await self._queue.get()
            try:
                await self._write(identity, event)
            except ApiError as error:
                log.warning("event not written: %s", error)
            finally:
                self._unwritten -= 1

    async def _write(self, identity: tuple[str, ...], event: Obj) -> None:
        now = self._now().timestamp()
        series = self._known.get(identity)
        if series is None or now - series.written_at > SERIES_SECONDS * 2:
            self._remember(identity, _Series(key_of(event), 1, now))
            await self._client.create(event)
            return
        series.count += 1
        if series.count == 2 or now - series.written_at >= SERIES_SECONDS:
            series.written_at = now
            patch = {"series": {"count": series.count, "lastObservedTime": micro_timestamp(self._now())}}
            try:
                await self._client.merge_patch(EVENT, series.event, patch)
            except NotFound:
                self._remember(identity, _Series(key_of(event), 1, now))
                await self._client.create(event)

    def _remember(self, identity: tuple[str, ...], series: _Series) -> None:
        self._known[identity] = series
        self._known.move_to_end(identity)
        while len(self._known) > _KNOWN_LIMIT:
            self._known.popitem(last=False)


def _shortened(note: str) -> str:
    """At most as many bytes as the API server takes."""
    data = note.encode()
    return note if len(data) <= _NOTE_LIMIT else data[: _NOTE_LIMIT - 3].decode(errors="ignore") + "…"


__all__ = ["SERIES_SECONDS", "Recorder"]
