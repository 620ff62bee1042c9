"""What a Tenant's status says of one reconcile: where it is placed, what it may rely on, and what keeps it waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenantry.api import Route, TenantSpec, Tier
from tenantry.api.tenant import GatewayPlace, TenantModel
from tenantry.cluster import Obj, find_condition, has_condition
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
from tenantry.desired.isolation import Observation

from . import bindings, claims, moving, serving
from .gates import NOT_GATED, Gated
from .networks import own_gateway_answers, serving_gateway
from .placements import Placement
from .placing import Placing
from .world import World

NO_ATTESTATION = (
    "tier Regulated needs nodes that prove what they run, and is served on nothing less: "
    "`isolation.attestation` must name a verifier and a policy that the tier is offered"
)


@dataclass(frozen=True)
class Facts:
    """What one reconcile found. `awaited`: what the tenant's own objects wait for, in words."""

    tenant: Obj
    spec: TenantSpec
    placed: Placing
    now: serving.Serving
    awaited: str | None = None
    gated: Gated = NOT_GATED

    @property
    def name(self) -> str:
        return serving.name_of(self.tenant)

    @property
    def tier(self) -> Tier:
        """The tier whose place serves now: that of the spec, or the one before until the new place is complete."""
        held = self.now.in_force if self.now.held else None
        return held if held is not None else self.spec.tier

    @property
    def rendered(self) -> bool:
        """Whether everything that the tier promises is in place."""
        now = self.now
        return now.held or (now.route is not None and now.moved and self.awaited is None)


def status_of(world: World, facts: Facts) -> Obj:
    """The whole status but `leaving`."""
    now, stored = facts.now, facts.tenant.get("status") or {}
    in_force = facts.spec.tier.value if now.route is not None and now.moved else stored.get("tier")
    seen = claims.observations(world, facts.tenant, facts.spec, now.route, facts.tier)
    status: Obj = {
        "placement": _placement(world, facts.placed.placement, now.route if now.held else None),
        "isolation": isolation.guarantees(facts.tier, facts.rendered, seen),
        "conditions": wire(_verdicts(world, facts, seen)),
    }
    if now.route is not None:
        served = now.route if now.held else _by_its_gateway(world, facts, now.route)
        status["route"] = served.wire()
        status["endpoint"] = _endpoint(world, served, facts.name)
        if in_force:
            status["tier"] = in_force
    return status


def refused(world: World, tenant: Obj, reason: str, message: str) -> Obj:
    """The verdict on a spec that cannot be served. What is served already goes on, by the spec before."""
    stored = tenant.get("status") or {}
    route = serving.prune_route(world, tenant)
    status = {name: stored[name] for name in ("tier", "placement", "isolation") if name in stored}
    if route is None:
        ready = not_ready(stored, reason, message, provisioning=False)
        status.pop("tier", None)
    else:
        status |= {"route": route.wire(), "endpoint": _endpoint(world, route, serving.name_of(tenant))}
        ready = yes("Ready", "ServesEarlierSpec", "served as before the last edit, which is refused")
    others = [
        Verdict(kind, found["status"], found["reason"], found.get("message", ""))
        for kind in ("Placed", "NetworkIsolated", "IsolationVerified", "Suspended")
        if (found := find_condition(tenant, kind)) is not None
    ]
    return {**status, "conditions": wire([ready, *stall(reason, message), *others])}


def unattested(tenant: Obj, spec: TenantSpec) -> Obj:
    """Regulated without a word on attestation: nothing runs."""
    verdicts = [
        not_ready(tenant.get("status") or {}, "AttestationNotAvailable", NO_ATTESTATION, provisioning=False),
        *stall("AttestationNotAvailable", NO_ATTESTATION),
        no("Placed", "AttestationNotAvailable", "nothing that it could be placed on is attested"),
        no("NetworkIsolated", "NotProvided", "nothing of the tenant runs"),
        _suspended(spec),
    ]
    return {"isolation": isolation.guarantees(spec.tier, False, {}), "conditions": wire(verdicts)}


# where it is


def _placement(world: World, placement: Placement, held: Route | None) -> list[Obj]:
    """Where the tenant is placed, and where it is served until that place is complete."""
    entries = []
    for pool_name, placed in placement.pools.items():
        pool = world.pool(pool_name)
        if pool is not None:
            reason = shorten(placed.reason, 512)
            entry = {"pool": pool_name, "namespace": pool.namespace, "reason": reason}
            entries.append({**entry, "replicas": list(placed.replicas)[:128]})
    for place in moving.places(held):
        if place.pool not in placement.pools:
            entry = {"pool": place.pool, "namespace": place.namespace, "reason": "until the move is done"}
            entries.append({**entry, "replicas": list(place.replicas)[:128]})
    return sorted(entries, key=lambda entry: str(entry["pool"]))


def _by_its_gateway(world: World, facts: Facts, route: Route) -> Route:
    return route.model_copy(update={"gateway": serving_gateway(world, facts.name, facts.spec)})


def _endpoint(world: World, route: Route, tenant: str) -> Obj:
    url = world.config.gateway_url
    if route.gateway is GatewayPlace.DEDICATED:
        url = gateway.url(tenant, world.config.release_namespace)
    return {"url": url, "models": [model.name for model in route.models]}


def _reached(world: World, facts: Facts) -> bool:
    """Whether the gateway that the route names answers. Of a held route that was so before."""
    if facts.now.held or serving_gateway(world, facts.name, facts.spec) is GatewayPlace.SHARED:
        return True
    return own_gateway_answers(world, facts.name)


# conditions


def _verdicts(world: World, facts: Facts, seen: Mapping[str, Observation]) -> list[Verdict]:
    now, placed = facts.now, facts.placed
    verdicts = [_placed(placed), _network(facts.tier, facts.awaited, seen), _suspended(facts.spec)]
    if facts.rendered:
        verdicts.append(isolation.verified(facts.tier, seen))
    stored = facts.tenant.get("status") or {}
    if facts.spec.suspend:
        summary = no("Ready", "Suspended", "`suspend` is true: the gateway refuses every request")
        return [*verdicts, summary, *(_progress(world, facts) if now.held else settled())]
    progressing = _progress(world, facts)
    if now.ready and not now.unserved and _reached(world, facts):
        return [*verdicts, yes("Ready", "Serving", _serves(now.route)), *progressing]
    reconciling, stalled = progressing
    why = stalled if stalled.status == "True" else reconciling
    on_its_way = stalled.status != "True"
    return [*verdicts, not_ready(stored, why.reason, why.message, provisioning=on_its_way), *progressing]


def _placed(placed: Placing) -> Verdict:
    if not placed.objections:
        pools = ", ".join(f"`{pool}`" for pool in sorted(placed.placement.pools))
        return yes("Placed", "Placed", f"on {pools}")
    return no("Placed", "NotPlaced", _objections(placed))


def _network(tier: Tier, awaited: str | None, seen: Mapping[str, Observation]) -> Verdict:
    if not tier.dedicated:
        return no("NetworkIsolated", "NotProvided", f"tier {tier.value} runs on shared pods")
    if awaited is not None:
        return unknown("NetworkIsolated", "Provisioning", awaited)
    return isolation.network(seen.get("NetworkIsolation"))


def _suspended(spec: TenantSpec) -> Verdict:
    if spec.suspend:
        return yes("Suspended", "Requested", "`suspend` is true")
    return no("Suspended", "NotRequested")


def _progress(world: World, facts: Facts) -> tuple[Verdict, Verdict]:
    arriving = _arriving(world, facts)
    return arriving if not facts.now.held else moving.preparing(facts.tenant, facts.now, *arriving)


def _arriving(world: World, facts: Facts) -> tuple[Verdict, Verdict]:
    """Whether everything runs where the spec wants it: (Reconciling, Stalled)."""
    placed, now, gated = facts.placed, facts.now, facts.gated
    homeless = [alias for alias in placed.objections if alias not in placed.placement.models]
    found = settled()
    if gated.halted is not None:
        found = stall(*gated.halted)
    elif facts.awaited is not None:
        found = progress("Provisioning", facts.awaited)
    elif homeless:
        found = stall("NoPool", _objections(placed))
    elif placed.too_large:
        found = stall("TooLarge", placed.too_large)
    elif gated.waiting is not None and not now.ready:
        found = progress("Attesting", gated.waiting)
    elif placed.objections:
        found = progress("NoReplicas", _objections(placed))
    elif now.missing:
        found = _waiting_for(world, facts.name, now.missing)
    elif now.waits:
        found = progress("Preparing", now.waits)
    elif not now.moved:
        found = progress("Moving", "requests still go to the old place until the new one is ready")
    elif not now.ready:
        found = progress("NoReplicaReady", "no replica of the tenant is ready")
    return found


def _waiting_for(world: World, tenant: str, missing: Sequence[TenantModel]) -> tuple[Verdict, Verdict]:
    """Why a placed model is not served: mostly its adapter."""
    waits = []
    for model in missing:
        key = bindings.reference(model)
        if key is None:
            waits.append(f"`{model.name}`: no replica is ready")
            continue
        adapter = world.adapter(key)
        if adapter is None:
            waits.append(f"`{model.name}`: Adapter `{key}` must exist: create it")
        elif adapter.get("spec", {}).get("tenantRef") != tenant:
            return stall("AdapterNotBound", f"`{model.name}`: Adapter `{key}` belongs to another tenant")
        elif has_condition(adapter, "Stalled"):
            found = find_condition(adapter, "Stalled") or {}
            why = f"{found.get('reason')}: {found.get('message')}"
            return stall("AdapterStalled", f"`{model.name}`: Adapter `{key}`: {why}")
        else:
            waits.append(f"`{model.name}`: Adapter `{key}` is not loaded yet")
    return progress("ModelsNotServed", "; ".join(waits[:5]))


def _serves(route: Route | None) -> str:
    listed = [model.name for model in route.models] if route is not None else []
    return f"{len(listed)} of {len(listed)} models are served"


def _objections(placed: Placing) -> str:
    reasons: dict[str, list[str]] = {}
    for alias, reason in sorted(placed.objections.items()):
        reasons.setdefault(reason, []).append(f"`{alias}`")
    return "; ".join(f"{', '.join(aliases)}: {reason}" for reason, aliases in reasons.items())
