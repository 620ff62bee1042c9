"""Empties the places that a tenant has left: gateways are asked, then what was there is taken away."""

from __future__ import annotations

from collections.abc import Sequence

from tenantry.api import names
from tenantry.cluster import ApiError, Obj
from tenantry.cluster.status import timestamp
from tenantry.placement import moves
from tenantry.placement.moves import GatewayView, Left, Phase, Place, Step
from tenantry.runtime.controller import Context

from . import gateways, moving
from .clock import seconds_since
from .dedicated import Dedicated
from .metrics import PHASE_SECONDS
from .world import World


class Departures:
    """One step of each place at every call; what a step needs stands in the Tenant's status."""

    def __init__(self, world: World, dedicated: Dedicated) -> None:
        self.world = world
        self.dedicated = dedicated

    async def step(self, tenant: Obj, left: Sequence[Left], ctx: Context) -> list[Step]:
        """A place that the stored status does not name yet only waits: first the new route must be written."""
        known = {(entry.place.pool, entry.phase) for entry in moving.left_places(tenant)}
        due = [entry for entry in left if (entry.place.pool, entry.phase) in known]
        asked = any(entry.phase is not Phase.EMPTYING for entry in due)
        views = await self._ask(tenant) if asked else []
        steps = []
        for entry in left:
            if entry not in due:
                steps.append(Step(entry, "the new route was written just now"))
                continue
            remains = await self._empty(tenant, entry.place, ctx) if entry.phase is Phase.EMPTYING else None
            elapsed = seconds_since(entry.since)
            found = moves.step(entry, elapsed, views, remains, timestamp())
            if found.left is None or found.left.phase is not entry.phase:
                PHASE_SECONDS.labels(entry.phase.value).observe(elapsed)
            if found.left is None:
                note = f"nothing of the tenant is left on `{entry.place.pool}`"
                ctx.recorder.event(tenant, "PlaceEmptied", note, action="Move")
            steps.append(found)
        return steps

    async def _ask(self, tenant: Obj) -> list[GatewayView]:
        try:
            return await gateways.views(self.world, tenant["metadata"]["name"])
        except ApiError as error:
            return [GatewayView(f"(not listed: {error})", silent=True)]

    async def _empty(self, tenant: Obj, place: Place, ctx: Context) -> str | None:
        """What is still there; None when nothing is. The dedicated place goes as a whole, of a shared one adapters."""
        if place.pool != names.dedicated_pool(tenant["metadata"]["name"]):
            return moving.remains(self.world, place, tenant)
        try:
            left = await self.dedicated.teardown(tenant, ctx)
            if left is None:
                await ctx.remove_finalizer(tenant)
        except ApiError as error:
            return str(error)
        return left
