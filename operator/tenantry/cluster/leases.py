"""A coordination Lease: who leads, and how often that changed. The rules of client-go's leader election.

Clocks of different machines are never compared: a holder counts as gone when its Lease has not changed for the whole
lease duration by our own monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .client import Client
from .errors import AlreadyExists, Conflict
from .resources import LEASE, Key, Obj
from .status import micro_timestamp

_BEGINNING = 1_735_689_600
"""2025-01-01 in Unix seconds: leaseTransitions has 32 bits, which then last until 2093."""


@dataclass(frozen=True)
class LeaseTimes:
    """In seconds. A Lease unchanged for `duration` is up for grabs.

    Its holder gives up after `renew_within` without a renewal, tried every `retry`.
    """

    duration: int = 15
    renew_within: float = 10.0
    retry: float = 2.0


class LeaseLock:
    """One process's view of one Lease."""

    def __init__(
        self,
        client: Client,
        key: Key,
        identity: str,
        times: LeaseTimes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._key = key
        self._identity = identity
        self._times = times
        self._clock = clock
        self._lease: Obj | None = None
        self._changed_at = 0.0

    @property
    def transitions(self) -> int:
        """Changes of leadership so far: the epoch of what this leader declares."""
        return int(_spec(self._lease).get("leaseTransitions", 0)) if self._lease else 0

    async def acquire_or_renew(self) -> bool:
        """One attempt; whether this process holds the Lease now. Raises ApiError when that cannot be known."""
        if self._lease is not None and self._holder() == self._identity:
            try:
                self._note(await self._client.replace(self._written(self._lease, taken=False)))
            except Conflict:
                self._lease = None
            else:
                return True
        live = await self._client.get(LEASE, self._key)
        if live is None:
            return await self._make()
        if (
            self._lease is None
            or live["metadata"]["resourceVersion"] != self._lease["metadata"]["resourceVersion"]
        ):
            self._note(live)
        holder = self._holder()
        if holder and holder != self._identity and self._clock() < self._changed_at + self._wait():
            return False
        try:
            self._note(await self._client.replace(self._written(live, taken=holder != self._identity)))
        except Conflict:
            return False
        return True

    async def release(self) -> None:
        """Let others take over at once."""
        if self._lease is None or self._holder() != self._identity:
            return
        lease = self._written(self._lease, taken=False)
        lease["spec"].update({"holderIdentity": "", "leaseDurationSeconds": 1})
        self._note(await self._client.replace(lease))

    async def _make(self) -> bool:
        # A Lease that somebody deleted must not turn the epoch back: seconds are above any count of changes.
        lease = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"namespace": self._key.namespace, "name": self._key.name},
            "spec": {"leaseTransitions": int(time.time()) - _BEGINNING},
        }
        try:
            self._note(await self._client.create(self._written(lease, taken=True)))
        except AlreadyExists:
            return False
        return True

    def _written(self, lease: Obj, *, taken: bool) -> Obj:
        spec = _spec(lease)
        now = micro_timestamp()
        return {
            **lease,
            "spec": {
                **spec,
                "holderIdentity": self._identity,
                "leaseDurationSeconds": self._times.duration,
                "renewTime": now,
                "acquireTime": now if taken else spec.get("acquireTime", now),
                "leaseTransitions": int(spec.get("leaseTransitions", 0)) + taken,
            },
        }

    def _note(self, lease: Obj) -> None:
        self._lease = lease
        self._changed_at = self._clock()

    def _holder(self) -> str:
        return str(_spec(self._lease).get("holderIdentity", "")) if self._lease else ""

    def _wait(self) -> float:
        """The holder's own duration: it may have been configured otherwise than ours."""
        return (
            float(_spec(self._lease).get("leaseDurationSeconds", self._times.duration))
            if self._lease
            else 0.0
        )


def _spec(lease: Obj | None) -> dict[str, Any]:
    return (lease or {}).get("spec") or {}
