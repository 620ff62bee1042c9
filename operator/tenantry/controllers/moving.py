"""A tenant that changes its tier: what serves until the new place is complete, and whether the old one is empty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from tenantry.api import Route, TenantSpec, Tier, names
from tenantry.api.tenant import LeftPlace, RouteTarget
from tenantry.attestation.proof import GateState
from tenantry.cluster import Key, Obj, find_condition, uid_of
from tenantry.desired import gate, gateway
from tenantry.desired.conditions import Verdict, progress, stall
from tenantry.desired.conditions import wire as conditions_of
from tenantry.desired.limits import limits_within, weight_of
from tenantry.desired.tenant import ADAPTER_TIERS
from tenantry.placement.moves import PREPARE_SECONDS, Left, Phase, Place, Step

from . import bindings, pods, serving
from .clock import seconds_since
from .networks import own_gateway_answers
from .placements import Placement, routed_replicas
from .serving import Serving
from .world import Pool, World

PREPARING: Final = Phase.PREPARING.value
BLOCKED: Final = "MoveBlocked"
NOT_EMPTY: Final = "OldPlaceNotEmpty"


def tier_in_force(tenant: Obj) -> Tier | None:
    """The tier by which the stored route was made; None when nothing is routed."""
    status = tenant.get("status") or {}
    if serving.stored_route(tenant) is None or status.get("tier") not in set(Tier):
        return None
    return Tier(status["tier"])


def resolve(
    world: World, tenant: Obj, spec: TenantSpec, placement: Placement, in_force: Tier | None = None
) -> Serving:
    """The route that holds now. `in_force`: the tier whose place the stored route names.

    Within a tier each alias moves as soon as it can. Between tiers all move at once, with limits and weight, and only
    when the new place is complete: until then the route stays what it was.
    """
    now = serving.resolve(world, tenant, spec, placement)
    if in_force is None or in_force is spec.tier:
        return now
    waits = lacks(world, tenant, spec, placement)
    held = hold(world, tenant, spec, in_force) if waits else None
    if held is None:
        return replace(now, in_force=in_force)
    name, answered = serving.name_of(tenant), {model.name for model in held.models}
    ready = all(
        any(world.is_ready(pool, replica) for lane in entry.lanes for replica in lane.replicas)
        for entry in held.pools
        if (pool := world.pool(entry.name)) is not None
    )
    return Serving(
        route=held,
        missing=tuple(
            model
            for model in spec.models
            if serving.target_of(world, name, spec, model, placement, old=held) is None
        ),
        moved=False,
        ready=ready,
        unserved=tuple(sorted({model.name for model in serving.aliases(tenant, spec)} - answered)),
        in_force=in_force,
        held=True,
        waits=waits,
    )


def preparing(tenant: Obj, now: Serving, reconciling: Verdict, stalled: Verdict) -> tuple[Verdict, Verdict]:
    """(Reconciling, Stalled) while the new place is made ready: the cause, and who serves until then."""
    blocked = stalled.status == "True"
    cause = stalled if blocked else reconciling
    message = f"{cause.message}; the place of tier {now.in_force} serves until then"
    if blocked:
        return stall(cause.reason, message)
    found = find_condition(tenant, "Reconciling") or {}
    if found.get("status") == "True" and found.get("reason") == PREPARING:
        late = seconds_since(found["lastTransitionTime"]) > PREPARE_SECONDS
    else:
        late = (find_condition(tenant, "Stalled") or {}).get("reason") == BLOCKED
    return stall(BLOCKED, message) if late else progress(PREPARING, message)


def departing(conditions: list[Obj], steps: Sequence[Step]) -> list[Obj]:
    """The conditions with what is still to be done at places that were left, where nothing else is under way."""
    left = [step for step in steps if step.left is not None]
    busy = any(c["type"] in ("Reconciling", "Stalled") and c["status"] == "True" for c in conditions)
    if not left or busy:
        return conditions
    first = max(left, key=lambda step: step.overdue)
    assert first.left is not None
    message = f"left `{first.left.place.pool}`: {first.message}"
    verdicts = stall(NOT_EMPTY, message) if first.overdue else progress(first.left.phase.value, message)
    others = [c for c in conditions if c["type"] not in ("Reconciling", "Stalled")]
    return sorted([*others, *conditions_of(verdicts)], key=lambda condition: str(condition["type"]))


def lacks(world: World, tenant: Obj, spec: TenantSpec, placement: Placement) -> str:
    """What the new place lacks to serve all that the old one serves; empty when it is complete."""
    name, before, old = serving.name_of(tenant), routed_replicas(tenant), serving.stored_route(tenant)
    carried = serving.aliases(tenant, spec) or spec.models
    needed: dict[str, set[tuple[str, str]]] = {}
    for model in carried:
        pool_name = placement.models.get(model.name)
        if pool_name is None:
            return f"`{model.name}` has no place"
        target = serving.target_of(world, name, spec, model, placement, old=old)
        if target is not None and target.digest:
            versions = {(target.name, target.digest)}
            if target.second is not None:
                versions.add((target.second.served_name, target.second.digest))
            needed.setdefault(pool_name, set()).update(versions)
        elif (
            target is None
            and bindings.reference(model) is not None
            and _any_placed_ready(world, pool_name, placement)
        ):
            return f"`{model.name}`: its adapter is on no replica yet"
        else:
            needed.setdefault(pool_name, set())
    for pool_name, adapters in sorted(needed.items()):
        pool, placed = world.pool(pool_name), placement.pools.get(pool_name)
        replicas = placed.replicas if placed is not None else ()
        if pool is None or not replicas:
            return f"pool `{pool_name}` has no replicas yet"
        for replica in replicas:
            if not world.is_ready(pool, replica):
                if Key(pool_name, replica) in before:
                    continue  # it serves the tenant already, as well as it can
                return f"replica `{replica}` is not ready"
            if not serving.holds(world, pool, replica, adapters):
                return f"replica `{replica}` does not hold every adapter yet"
    return _open(world, name, spec, placement)


def _open(world: World, tenant: str, spec: TenantSpec, placement: Placement) -> str:
    """What of gates and of the tenant's own gateway the new place lacks."""
    if gate.is_secured(spec):
        for pool_name, placed in sorted(placement.pools.items()):
            pool = world.pool(pool_name)
            for replica in placed.replicas:
                if pool is None or not _has_opened(world, pool, replica):
                    return f"the gate of replica `{replica}` has not opened yet"
    if gateway.is_own(spec) and not own_gateway_answers(world, tenant):
        return f"the tenant's own gateway `{names.own_gateway(tenant)}` does not answer yet"
    return ""


def _has_opened(world: World, pool: Pool, replica: str) -> bool:
    proof, pod = world.proofs.get(Key(pool.name, replica)), world.pod(pool, replica)
    if proof is None or pod is None or proof.pod_uid != uid_of(pod):
        return False
    return proof.state is GateState.OPEN


def hold(world: World, tenant: Obj, spec: TenantSpec, in_force: Tier) -> Route | None:
    """The stored route, as far as it may and can go on, by the tier in force."""
    old = serving.stored_route(tenant)
    if old is None:
        return None
    wanted = {model.name for model in spec.models}
    pools = []
    for entry in old.pools:
        pool = world.pool(entry.name)
        if pool is None or pool.deleting or pool.uid != entry.uid:
            continue
        there = set(world.replicas(pool))
        lanes = [
            lane.model_copy(update={"replicas": kept})
            for lane in entry.lanes
            if (kept := [replica for replica in lane.replicas if replica in there])
        ]
        if lanes:
            pools.append(entry.model_copy(update={"lanes": lanes, "tls": world.is_secured(pool)}))
    alive = {entry.name for entry in pools}
    models = [
        model
        for model in old.models
        if model.name in wanted
        and model.pool in alive
        and all(_may_go_on(world, serving.name_of(tenant), spec, target) for target in model.targets)
    ]
    if not models:
        return None
    used = {model.pool for model in models}
    policy = world.config.tiers.get(in_force)
    return old.model_copy(
        update={
            "pools": [entry for entry in pools if entry.name in used],
            "models": models,
            "limits": old.limits if policy is None else limits_within(spec.limits, policy),
            "weight": old.weight if policy is None else weight_of(spec.weight, policy),
        }
    )


def _may_go_on(world: World, tenant: str, spec: TenantSpec, target: RouteTarget) -> bool:
    """Whether the alias may keep its adapter: a tier without adapters asks for none, but takes none away before."""
    if not target.digest:
        return True
    key = bindings.adapter_of(target.served_name)
    listed = key is not None and key.namespace in spec.adapter_namespaces
    without = spec.tier not in ADAPTER_TIERS
    return (listed or without) and serving.exists(world, tenant, target.served_name, target.digest)


def _any_placed_ready(world: World, pool_name: str, placement: Placement) -> bool:
    pool, placed = world.pool(pool_name), placement.pools.get(pool_name)
    return pool is not None and placed is not None and any(world.is_ready(pool, r) for r in placed.replicas)


def left_places(tenant: Obj) -> tuple[Left, ...]:
    """The places that the stored status says were left."""
    stored = (tenant.get("status") or {}).get("leaving") or []
    parsed = [LeftPlace.model_validate(entry) for entry in stored]
    return tuple(
        Left(Place(p.pool, p.uid, p.namespace, tuple(p.replicas)), Phase(p.phase), p.since) for p in parsed
    )


def wire(left: Left) -> Obj:
    """The entry of `status.leaving`."""
    place = left.place
    return {
        "pool": place.pool,
        "uid": place.uid,
        "namespace": place.namespace,
        "replicas": list(place.replicas)[:128],
        "phase": left.phase.value,
        "since": left.since,
    }


def places(route: Route | None) -> Iterator[Place]:
    """Where a route sends requests."""
    for pool in route.pools if route is not None else []:
        replicas = sorted({replica for lane in pool.lanes for replica in lane.replicas})
        yield Place(pool.name, pool.uid, pool.namespace, tuple(replicas))


def remains(world: World, place: Place, tenant: Obj) -> str | None:
    """What replicas of a shared pool still hold of the tenant, by their own word; None when it is nothing.

    A process that ended holds nothing, and a replica without adapters never held more than the requests that ran.
    """
    pool = world.pool(place.pool)
    if pool is None or pool.uid != place.uid or pool.spec.lora is None:
        return None
    for replica in place.replicas:
        pod = world.pod(pool, replica)
        process = pods.incarnation(pod) if pod is not None else None
        if process is None:
            continue
        seen = world.observations.get(Key(pool.name, replica), process)
        if seen is None or seen.report is None:
            return f"replica `{replica}` does not say what it holds"
        held = [entry.name for entry in seen.report.adapters if entry.tenant == uid_of(tenant)]
        if held:
            return f"replica `{replica}` still holds `{held[0]}`" + (
                f" and {len(held) - 1} more" if len(held) > 1 else ""
            )
    return None
