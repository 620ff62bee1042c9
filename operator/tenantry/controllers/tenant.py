"""Tenant: checked, placed, routed; a dedicated one with everything it owns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tenantry.api import TenantSpec, Tier, names
from tenantry.cluster import TENANT, Key, NameTaken, Obj, StillTerminating, is_deleting
from tenantry.cluster.status import timestamp
from tenantry.desired.limits import weight_of
from tenantry.desired.problems import Problem, SpecError
from tenantry.desired.tenant import tenant_problems
from tenantry.placement import moves
from tenantry.placement.moves import Left, Place, Step
from tenantry.runtime.controller import DONE, Context, Result

from . import moving, placing, serving, tenant_status
from .announce import announce
from .clock import seconds_since
from .dedicated import RIGHTS, Dedicated
from .deleting import deleting
from .departures import Departures
from .gates import NOT_GATED, Gates
from .metrics import MOVES
from .networks import Networks
from .placements import NOWHERE
from .tenant_status import NO_ATTESTATION, Facts
from .world import World

AWAIT_SECONDS = 5.0
MOVE_SECONDS = 1.0
HELD_SECONDS = 30.0
RIGHTS_SECONDS = 0.5
DELETION_SECONDS = 2.0
DELETION_DEADLINE_SECONDS = 600.0


class TenantReconciler:
    def __init__(self, world: World) -> None:
        self.world = world
        self.dedicated = Dedicated(world)
        self.networks = Networks(world)
        self.gates = Gates(world)
        self.departures = Departures(world, self.dedicated)

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        tenant = self.world.store.get(TENANT, key)
        if tenant is None:
            self._withdraw(key.name)
            self.world.forget_spec("Tenant", key)
            self.world.links.short_of_nodes.discard(key.name)
            self.world.links.unplaced.discard(key.name)
            return DONE
        if is_deleting(tenant):
            return await self._finalize(tenant, ctx)
        try:
            spec = self.world.tenant_spec(tenant)
            ranges = await self.networks.protected(ctx) if spec.tier.dedicated else []
            problems = tenant_problems(key.name, spec, ctx.config, ranges)
        except SpecError as error:
            return await self._refuse(tenant, "InvalidSpec", str(error), ctx)
        if problems:
            return await self._refuse_edit(tenant, spec, problems, ranges, ctx)
        if spec.tier is Tier.REGULATED and spec.isolation.attestation is None:
            serves = [place.pool for place in moving.places(serving.stored_route(tenant))]
            if moving.tier_in_force(tenant) in (None, Tier.REGULATED):
                self._withdraw(key.name)
                steps = await self.departures.step(tenant, self._left_behind(tenant, (), ()), ctx)
                _, result = await self._finish(tenant, tenant_status.unattested(tenant, spec), steps, ctx)
                return result
            left = self._left_behind(tenant, (), serves)
            return await self._refuse(tenant, "AttestationNotAvailable", NO_ATTESTATION, ctx, left)
        return await self._serve(tenant, spec, ctx)

    async def _serve(self, tenant: Obj, spec: TenantSpec, ctx: Context) -> Result:
        name = tenant["metadata"]["name"]
        weight = weight_of(spec.weight, ctx.config.tiers[spec.tier])
        in_force = moving.tier_in_force(tenant)
        awaited, gated = None, NOT_GATED
        if spec.tier.dedicated:
            try:
                awaited = await self.dedicated.ensure(tenant, spec, ctx)
            except NameTaken as taken:
                return await self._refuse(tenant, "NameTaken", str(taken), ctx)
            except StillTerminating as ending:
                awaited = str(ending)
            else:
                gated = await self.gates.tend(tenant, spec, ctx)
            placed = placing.dedicated(self.world, tenant, spec, weight)
        else:
            placed = placing.shared(self.world, name, spec, weight)
        self._assume(name, placed)
        now = moving.resolve(self.world, tenant, spec, placed.placement, in_force)
        after = [pool.name for pool in now.route.pools] if now.route is not None else []
        flipped = in_force not in (None, spec.tier) and now.moved and now.route is not None
        before = moving.places(serving.stored_route(tenant)) if flipped else ()
        own = [names.dedicated_pool(name)] if spec.tier.dedicated else []
        left = self._left_behind(tenant, before, [*after, *placed.placement.pools, *own])
        steps = await self.departures.step(tenant, left, ctx)
        status = tenant_status.status_of(self.world, Facts(tenant, spec, placed, now, awaited, gated))
        waits = [wait for wait in (gated.after, HELD_SECONDS if now.held else None) if wait is not None]
        if awaited is not None:
            waits.append(RIGHTS_SECONDS if awaited == RIGHTS else AWAIT_SECONDS)
        written, result = await self._finish(tenant, status, steps, ctx, min(waits, default=None))
        if flipped and written and in_force is not None:
            MOVES.labels(in_force.value, spec.tier.value).inc()
            note = f"{in_force} -> {spec.tier}: served by {', '.join(f'`{pool}`' for pool in after)}"
            ctx.recorder.event(tenant, "Moved", note, action="Move")
        return result

    def _left_behind(self, tenant: Obj, before: Iterable[Place], staying: Iterable[str]) -> tuple[Left, ...]:
        """The places to be emptied; among them what a dedicated tier made, though no request ever went there."""
        name = tenant["metadata"]["name"]
        if names.FINALIZER in tenant["metadata"].get("finalizers", []):
            own = self.world.pool(names.dedicated_pool(name))
            uid = own.uid if own is not None else ""
            before = [*before, Place(names.dedicated_pool(name), uid, names.tenant_namespace(name))]
        return moves.leaving(moving.left_places(tenant), before, staying, timestamp())

    async def _refuse_edit(
        self,
        tenant: Obj,
        spec: TenantSpec,
        problems: Sequence[Problem],
        protected: list[tuple[str, str]],
        ctx: Context,
    ) -> Result:
        """What runs goes on as before the edit: proven anew when that is due, and never more open than is allowed."""
        fields = [problem.field for problem in problems]
        if any(field.startswith("isolation.egress") for field in fields):
            await self.networks.narrow(tenant, spec, protected, ctx)
        gated = NOT_GATED
        if not any(field.startswith(("isolation.attestation", "tier")) for field in fields):
            gated = await self.gates.tend(tenant, spec, ctx)
        return await self._refuse(tenant, "InvalidSpec", str(SpecError(problems)), ctx, wait=gated.after)

    async def _refuse(
        self,
        tenant: Obj,
        reason: str,
        message: str,
        ctx: Context,
        left: Sequence[Left] | None = None,
        *,
        wait: float | None = None,
    ) -> Result:
        """Say what is wrong with the spec. What is served goes on, and what was left before is emptied."""
        known = moving.left_places(tenant) if left is None else left
        steps = await self.departures.step(tenant, known, ctx)
        status = tenant_status.refused(self.world, tenant, reason, message)
        _, result = await self._finish(tenant, status, steps, ctx, wait)
        return result

    async def _finish(
        self, tenant: Obj, status: Obj, steps: Sequence[Step], ctx: Context, wait: float | None = None
    ) -> tuple[bool, Result]:
        """Write the status, tell what turned, and come back while something is under way; whether it was written."""
        left = [moving.wire(step.left) for step in steps if step.left is not None]
        status = {**status, "leaving": left, "conditions": moving.departing(status["conditions"], steps)}
        written = await ctx.set_status(tenant, status)
        if written:
            announce(ctx.recorder, tenant, status)
            self.world.wake_adapters(self.world.links.adapters_of(tenant["metadata"]["name"]))
        if left:
            wait = min(wait or MOVE_SECONDS, MOVE_SECONDS)
        return written, DONE if wait is None else Result(wait)

    def _assume(self, name: str, placed: placing.Placing) -> None:
        before = self.world.placements.get(name)
        moved = self.world.placements.assume(name, placed.placement)
        self.world.wake_replicas(sorted(moved))
        if before != placed.placement:
            self.world.wake_adapters(sorted(self.world.links.adapters_of(name)))
            for pool in sorted(set(before.pools) ^ set(placed.placement.pools)):
                self.world.wake_pool(pool)
        if placed.objections:
            self.world.links.unplaced.add(name)
        else:
            self.world.links.unplaced.discard(name)

    def _withdraw(self, name: str) -> None:
        self._assume(name, placing.Placing(NOWHERE, {}))

    # the end

    async def _finalize(self, tenant: Obj, ctx: Context) -> Result:
        self._withdraw(tenant["metadata"]["name"])
        if names.FINALIZER not in tenant["metadata"].get("finalizers", []):
            return DONE
        if serving.stored_route(tenant) is not None:
            await ctx.set_status(tenant, deleting(tenant, "the route is withdrawn", blocked=False))
        left = await self.dedicated.teardown(tenant, ctx)
        if left is None:
            ctx.recorder.event(
                tenant, "Released", "its pool, namespace and nodes are given back", action="Delete"
            )
            await ctx.remove_finalizer(tenant)
            return DONE
        age = seconds_since(tenant["metadata"]["deletionTimestamp"])
        await ctx.set_status(tenant, deleting(tenant, left, blocked=age > DELETION_DEADLINE_SECONDS))
        return Result(DELETION_SECONDS)
