"""Tenant: checked, placed, routed; a dedicated one with everything it owns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tenantry.api import Route, TenantSpec, Tier, names
from tenantry.api.tenant import GatewayPlace, TenantModel
from tenantry.cluster import (
    TENANT,
    Key,
    NameTaken,
    Obj,
    StillTerminating,
    find_condition,
    has_condition,
    is_deleting,
)
from tenantry.cluster.status import timestamp
from tenantry.desired import gateway, isolation
from tenantry.desired.conditions import (
    Verdict,
    no,
    not_ready,
    progress,
    settled,
    shorten,
    stall,
    unknown,
    wire,
    yes,
)
from tenantry.desired.limits import weight_of
from tenantry.desired.problems import Problem, SpecError
from tenantry.desired.tenant import tenant_problems
from tenantry.placement import moves
from tenantry.placement.moves import Left, Place, Step
from tenantry.runtime.controller import DONE, Context, Result

from . import bindings, claims, moving, placing, serving
from .announce import announce
from .clock import seconds_since
from .dedicated import RIGHTS, Dedicated
from .deleting import deleting
from .departures import Departures
from .gates import NOT_GATED, Gated, Gates
from .metrics import MOVES
from .networks import Networks, own_gateway_answers, own_gateway_serves
from .placements import NOWHERE, Placement
from .world import World

AWAIT_SECONDS = 5.0
MOVE_SECONDS = 1.0
HELD_SECONDS = 30.0
RIGHTS_SECONDS = 0.5
DELETION_SECONDS = 2.0
DELETION_DEADLINE_SECONDS = 600.0

NO_ATTESTATION = (
    "tier Regulated needs nodes that prove what they run, and is served on nothing less: "
    "`isolation.attestation` must name a verifier and a policy that the tier is offered"
)


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
                _, result = await self._finish(tenant, _regulated(tenant, spec), steps, ctx)
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
        status = self._status(tenant, spec, placed, now, awaited, gated=gated)
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
        _, result = await self._finish(tenant, self._refused(tenant, reason, message), steps, ctx, wait)
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

    # the status

    def _status(
        self,
        tenant: Obj,
        spec: TenantSpec,
        placed: placing.Placing,
        now: serving.Serving,
        awaited: str | None,
        *,
        gated: Gated,
    ) -> Obj:
        stored = tenant.get("status") or {}
        in_force = spec.tier.value if now.route is not None and now.moved else stored.get("tier")
        tier = _tier_of(spec, now)
        seen = claims.observations(self.world, tenant, spec, now.route, tier)
        status: Obj = {
            "placement": self._placement(placed.placement, now.route if now.held else None),
            "isolation": isolation.guarantees(tier, self._rendered(now, awaited), seen),
            "conditions": wire(self._verdicts(tenant, spec, placed, now, awaited, seen=seen, gated=gated)),
        }
        if now.route is not None:
            served = now.route if now.held else self._by_its_gateway(tenant, spec, now.route)
            status["route"] = served.wire()
            status["endpoint"] = self._endpoint(served, tenant["metadata"]["name"])
            if in_force:
                status["tier"] = in_force
        return status

    def _by_its_gateway(self, tenant: Obj, spec: TenantSpec, route: Route) -> Route:
        own = own_gateway_serves(self.world, tenant["metadata"]["name"], spec)
        return route.model_copy(update={"gateway": GatewayPlace.DEDICATED if own else GatewayPlace.SHARED})

    def _reached(self, tenant: Obj, spec: TenantSpec, now: serving.Serving) -> bool:
        """Whether the gateway that the route names answers. Of a held route that was so before."""
        name = tenant["metadata"]["name"]
        own = not now.held and own_gateway_serves(self.world, name, spec)
        return not own or own_gateway_answers(self.world, name)

    def _placement(self, placement: Placement, held: Route | None) -> list[Obj]:
        """Where the tenant is placed, and where it is served until that place is complete."""
        entries = []
        for pool_name, placed in placement.pools.items():
            pool = self.world.pool(pool_name)
            if pool is not None:
                reason = shorten(placed.reason, 512)
                entry = {"pool": pool_name, "namespace": pool.namespace, "reason": reason}
                entries.append({**entry, "replicas": list(placed.replicas)[:128]})
        for place in moving.places(held):
            if place.pool not in placement.pools:
                entry = {"pool": place.pool, "namespace": place.namespace, "reason": "until the move is done"}
                entries.append({**entry, "replicas": list(place.replicas)[:128]})
        return sorted(entries, key=lambda entry: str(entry["pool"]))

    def _endpoint(self, route: Route, tenant: str) -> Obj:
        url = self.world.config.gateway_url
        if route.gateway is GatewayPlace.DEDICATED:
            url = gateway.url(tenant, self.world.config.release_namespace)
        return {"url": url, "models": [model.name for model in route.models]}

    def _rendered(self, now: serving.Serving, awaited: str | None) -> bool:
        return now.held or (now.route is not None and now.moved and awaited is None)

    def _verdicts(
        self,
        tenant: Obj,
        spec: TenantSpec,
        placed: placing.Placing,
        now: serving.Serving,
        awaited: str | None,
        *,
        seen: Mapping[str, isolation.Observation],
        gated: Gated,
    ) -> list[Verdict]:
        tier = _tier_of(spec, now)
        verdicts = [self._placed(placed), _network(tier, awaited, seen), _suspended(spec)]
        if self._rendered(now, awaited):
            verdicts.append(isolation.verified(tier, seen))
        stored = tenant.get("status") or {}
        if spec.suspend:
            summary = no("Ready", "Suspended", "`suspend` is true: the gateway refuses every request")
            going = self._progress(tenant, placed, now, awaited, gated=gated) if now.held else settled()
            return [*verdicts, summary, *going]
        progressing = self._progress(tenant, placed, now, awaited, gated=gated)
        if now.ready and not now.unserved and self._reached(tenant, spec, now):
            return [*verdicts, yes("Ready", "Serving", _serves(now.route)), *progressing]
        reconciling, stalled = progressing
        why = stalled if stalled.status == "True" else reconciling
        on_its_way = stalled.status != "True"
        return [*verdicts, not_ready(stored, why.reason, why.message, provisioning=on_its_way), *progressing]

    def _placed(self, placed: placing.Placing) -> Verdict:
        if not placed.objections:
            pools = ", ".join(f"`{pool}`" for pool in sorted(placed.placement.pools))
            return yes("Placed", "Placed", f"on {pools}")
        return no("Placed", "NotPlaced", _objections(placed))

    def _progress(
        self, tenant: Obj, placed: placing.Placing, now: serving.Serving, awaited: str | None, *, gated: Gated
    ) -> tuple[Verdict, Verdict]:
        arriving = self._arriving(tenant, placed, now, awaited, gated=gated)
        return arriving if not now.held else moving.preparing(tenant, now, *arriving)

    def _arriving(
        self, tenant: Obj, placed: placing.Placing, now: serving.Serving, awaited: str | None, *, gated: Gated
    ) -> tuple[Verdict, Verdict]:
        """Whether everything runs where the spec wants it."""
        if gated.halted is not None:
            return stall(*gated.halted)
        if awaited is not None:
            return progress("Provisioning", awaited)
        homeless = [alias for alias in placed.objections if alias not in placed.placement.models]
        if homeless:
            return stall("NoPool", _objections(placed))
        if placed.too_large:
            return stall("TooLarge", placed.too_large)
        if gated.waiting is not None and not now.ready:
            return progress("Attesting", gated.waiting)
        if placed.objections:
            return progress("NoReplicas", _objections(placed))
        if now.missing:
            return self._waiting_for(tenant, now.missing)
        if now.waits:
            return progress("Preparing", now.waits)
        if not now.moved:
            return progress("Moving", "requests still go to the old place until the new one is ready")
        if not now.ready:
            return progress("NoReplicaReady", "no replica of the tenant is ready")
        return settled()

    def _waiting_for(self, tenant: Obj, missing: Sequence[TenantModel]) -> tuple[Verdict, Verdict]:
        """Why a placed model is not served: mostly its adapter."""
        waits = []
        for model in missing:
            key = bindings.reference(model)
            if key is None:
                waits.append(f"`{model.name}`: no replica is ready")
                continue
            adapter = self.world.adapter(key)
            if adapter is None:
                waits.append(f"`{model.name}`: Adapter `{key}` must exist: create it")
            elif adapter.get("spec", {}).get("tenantRef") != tenant["metadata"]["name"]:
                return stall("AdapterNotBound", f"`{model.name}`: Adapter `{key}` belongs to another tenant")
            elif has_condition(adapter, "Stalled"):
                found = find_condition(adapter, "Stalled") or {}
                why = f"{found.get('reason')}: {found.get('message')}"
                return stall("AdapterStalled", f"`{model.name}`: Adapter `{key}`: {why}")
            else:
                waits.append(f"`{model.name}`: Adapter `{key}` is not loaded yet")
        return progress("ModelsNotServed", "; ".join(waits[:5]))

    def _refused(self, tenant: Obj, reason: str, message: str) -> Obj:
        """The verdict on a spec that cannot be served. What is served already goes on, by the spec before."""
        stored = tenant.get("status") or {}
        route = serving.prune_route(self.world, tenant)
        status = {name: stored[name] for name in ("tier", "placement", "isolation") if name in stored}
        if route is None:
            ready = not_ready(stored, reason, message, provisioning=False)
            status.pop("tier", None)
        else:
            status |= {
                "route": route.wire(),
                "endpoint": self._endpoint(route, tenant["metadata"]["name"]),
            }
            ready = yes("Ready", "ServesEarlierSpec", "served as before the last edit, which is refused")
        others = [
            Verdict(kind, found["status"], found["reason"], found.get("message", ""))
            for kind in ("Placed", "NetworkIsolated", "IsolationVerified", "Suspended")
            if (found := find_condition(tenant, kind)) is not None
        ]
        return {**status, "conditions": wire([ready, *stall(reason, message), *others])}

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


def _regulated(tenant: Obj, spec: TenantSpec) -> Obj:
    verdicts = [
        not_ready(tenant.get("status") or {}, "AttestationNotAvailable", NO_ATTESTATION, provisioning=False),
        *stall("AttestationNotAvailable", NO_ATTESTATION),
        no("Placed", "AttestationNotAvailable", "nothing that this release can place it on is attested"),
        no("NetworkIsolated", "NotProvided", "nothing of the tenant runs"),
        _suspended(spec),
    ]
    return {"isolation": isolation.guarantees(spec.tier, False, {}), "conditions": wire(verdicts)}


def _tier_of(spec: TenantSpec, now: serving.Serving) -> Tier:
    """The tier whose place serves now: that of the spec, or the one before until the new place is complete."""
    return now.in_force if now.held and now.in_force is not None else spec.tier


def _network(tier: Tier, awaited: str | None, seen: Mapping[str, isolation.Observation]) -> Verdict:
    if not tier.dedicated:
        return no("NetworkIsolated", "NotProvided", f"tier {tier.value} runs on shared pods")
    if awaited is not None:
        return unknown("NetworkIsolated", "Provisioning", awaited)
    return isolation.network(seen.get("NetworkIsolation"))


def _suspended(spec: TenantSpec) -> Verdict:
    if spec.suspend:
        return yes("Suspended", "Requested", "`suspend` is true")
    return no("Suspended", "NotRequested")


def _serves(route: Route | None) -> str:
    listed = [model.name for model in route.models] if route is not None else []
    return f"{len(listed)} of {len(listed)} models are served"


def _objections(placed: placing.Placing) -> str:
    reasons: dict[str, list[str]] = {}
    for alias, reason in sorted(placed.objections.items()):
        reasons.setdefault(reason, []).append(f"`{alias}`")
    return "; ".join(f"{', '.join(aliases)}: {reason}" for reason, aliases in reasons.items())
