"""Driver of Tenantry's own engine: its admin port, as the wire reference describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import httpx
from pydantic import TypeAdapter

from tenantry.api.identity import Signer

from .base import AdapterDeclaration, Fence, Replica, ReplicaReport
from .http import call

ADAPTERS_PATH = "/admin/v1/adapters"
DRAIN_PATH = "/admin/v1/drain"
SMOKE_PATH = "/admin/v1/smoke"

T = TypeVar("T")
_REPORT: TypeAdapter[ReplicaReport] = TypeAdapter(ReplicaReport)
_ANY: TypeAdapter[object] = TypeAdapter(object)


class TenantryDriver:
    """Declares to, observes and drains replicas. Stateless: one instance serves every replica at once."""

    def __init__(self, signer: Signer, client: httpx.AsyncClient) -> None:
        self._signer = signer
        self._client = client

    async def declare(
        self, replica: Replica, adapters: Sequence[AdapterDeclaration], fence: Fence, drain_seconds: int
    ) -> ReplicaReport:
        """`PUT /admin/v1/adapters`. Sorted by name, so that the same set is the same bytes."""
        payload = {
            "fence": {"epoch": fence.epoch, "counter": fence.counter},
            "drainSeconds": drain_seconds,
            "adapters": [
                {"name": a.name, "digest": a.digest, "tenant": a.tenant, "pinned": a.pinned}
                for a in sorted(adapters, key=lambda adapter: adapter.name)
            ],
        }
        return await self._call("PUT", replica, ADAPTERS_PATH, _REPORT, payload)

    async def observe(self, replica: Replica) -> ReplicaReport:
        """`GET /admin/v1/adapters`."""
        return await self._call("GET", replica, ADAPTERS_PATH, _REPORT, None)

    async def smoke(self, replica: Replica, name: str, digest: str, tenant: str) -> None:
        """`POST /admin/v1/smoke`."""
        payload = {"name": name, "digest": digest, "tenant": tenant}
        await self._call("POST", replica, SMOKE_PATH, _ANY, payload)

    async def drain(self, replica: Replica) -> None:
        """`POST /admin/v1/drain`. Calling it again changes nothing."""
        await self._call("POST", replica, DRAIN_PATH, _ANY, {})

    async def _call(
        self, method: str, replica: Replica, path: str, answer: TypeAdapter[T], payload: object | None
    ) -> T:
        return await call(
            self._client,
            self._signer,
            method=method,
            base=replica.url,
            path=path,
            audience=replica.audience,
            peer=replica.name,
            answer=answer,
            payload=payload,
        )
