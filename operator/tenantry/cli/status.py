"""`tenantry status` and `tenantry why`: what the cluster says about tenants, in words or as data. Reads only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenantry.api.names import dedicated_pool

from .cluster import Cluster, Obj
from .output import View, document
from .table import table

ABNORMAL_WHEN_TRUE = ("Stalled", "Reconciling", "Degraded", "RolledBack", "Suspended")


def status(cluster: Cluster, name: str | None, view: View) -> str:
    """One tenant at a glance, or all of them, one a line. Raises CliError."""
    if name is None:
        return overview(cluster.tenants(), view)
    tenant = cluster.tenant(name)
    return document(summary(tenant), view) if view.structured else describe(tenant, wide=view is View.WIDE)


def why(cluster: Cluster, name: str, view: View) -> tuple[str, bool]:
    """Everything that keeps the tenant from being served, down to pools and adapters; and whether there is any."""
    tenant = cluster.tenant(name)
    found = findings(tenant, related(cluster, tenant))
    if view.structured:
        return document({"tenant": name, "served": not found, "findings": found}, view), bool(found)
    return sentences(tenant, found, wide=view is View.WIDE), bool(found)


def related(cluster: Cluster, tenant: Obj) -> list[tuple[str, Obj | None]]:
    """The pools and adapters that the tenant refers to or runs on; None for those that are not there."""
    spec, name = tenant.get("spec", {}), tenant["metadata"]["name"]
    others: list[tuple[str, Obj | None]] = []
    pools = {entry["pool"] for entry in tenant.get("status", {}).get("placement", [])}
    pools |= {model["poolRef"] for model in spec.get("models", []) if model.get("poolRef")}
    # The operator makes a dedicated tenant's own pool: nobody can be told to create it.
    own = dedicated_pool(name)
    if spec.get("dedicated") and (found := cluster.pool(own)) is not None:
        others.append((f"AdapterPool {own}", found))
    pools.discard(own)
    others += [(f"AdapterPool {pool}", cluster.pool(pool)) for pool in sorted(pools)]
    refs = {
        (model["adapterRef"]["namespace"], model["adapterRef"]["name"])
        for model in spec.get("models", [])
        if model.get("adapterRef")
    }
    return others + [
        (f"Adapter {space}/{adapter}", cluster.adapter(space, adapter)) for space, adapter in sorted(refs)
    ]


def overview(tenants: list[Obj], view: View) -> str:
    """All tenants."""
    if view.structured:
        return document([summary(tenant) for tenant in tenants], view)
    header = ["tenant", "tier", "ready", "reason", "pools"]
    rows = [_row(tenant) for tenant in tenants]
    if view is View.WIDE:
        header += ["models", "in flight", "tokens/min", "keys"]
        rows = [[*row, *_wide(tenant)] for row, tenant in zip(rows, tenants, strict=True)]
    return table(header, rows) + "\n" if rows else "no tenants\n"


def _row(tenant: Obj) -> list[str]:
    ready = _condition(tenant, "Ready") or {}
    seen = tenant.get("status", {})
    return [
        tenant["metadata"]["name"],
        _tier(tenant),
        str(ready.get("status", "Unknown")),
        str(ready.get("reason", "NotSeen")),
        ",".join(place["pool"] for place in seen.get("placement", [])) or "-",
    ]


def _wide(tenant: Obj) -> list[str]:
    limits = ((tenant.get("status", {}).get("route")) or {}).get("limits", {})
    return [
        ",".join(model["name"] for model in tenant.get("spec", {}).get("models", [])),
        str(limits.get("maxInFlight", "-")),
        str(limits.get("tokensPerMinute", "-")),
        str(len(tenant.get("spec", {}).get("auth", {}).get("apiKeys", []))),
    ]


def summary(tenant: Obj) -> Obj:
    """The facts of `status` as data: what people and programs ask for, under names that stay."""
    spec, seen = tenant.get("spec", {}), tenant.get("status", {})
    route = seen.get("route") or {}
    return {
        "tenant": tenant["metadata"]["name"],
        "tier": spec.get("tier"),
        "tierInForce": seen.get("tier"),
        "upToDate": not _stale(tenant),
        "ready": (_condition(tenant, "Ready") or {}).get("status", "Unknown"),
        "endpoint": seen.get("endpoint"),
        "placement": seen.get("placement", []),
        "leaving": seen.get("leaving", []),
        "models": route.get("models", []),
        "limits": route.get("limits"),
        "guarantees": seen.get("isolation", []),
        "conditions": _conditions(tenant),
    }


def describe(tenant: Obj, *, wide: bool = False) -> str:
    """The facts of `status`, one thing a line; `wide` with limits, digests and times."""
    seen = tenant.get("status", {})
    lines = [
        f"Tenant {tenant['metadata']['name']}",
        f"  tier      {_tier(tenant)}",
        f"  ready     {_sentence(_condition(tenant, 'Ready'))}",
    ]
    if stale := _stale(tenant):
        lines.append(f"  note      {stale}")
    endpoint = seen.get("endpoint")
    if endpoint:
        lines.append(f"  endpoint  {endpoint['url']}  models: {', '.join(endpoint.get('models', []))}")
    for place in seen.get("placement", []):
        replicas = ", ".join(place.get("replicas", [])) or "no replica"
        lines.append(
            f"  runs on   {place['pool']} in {place['namespace']}: {replicas} ({place.get('reason', '')})"
        )
    for place in seen.get("leaving", []):
        lines.append(
            f"  leaves    {place['pool']} in {place['namespace']}: {place['phase']} since {place['since']}"
        )
    route = seen.get("route") or {}
    for model in route.get("models", []):
        targets = ", ".join(_target(target, wide) for target in model["targets"])
        lines.append(f"  serves    {model['name']} = {targets}")
    if wide and route.get("limits"):
        limits = ", ".join(f"{name} {value}" for name, value in route["limits"].items())
        lines.append(f"  limits    {limits}, weight {route.get('weight', 1)}")
    guarantees = seen.get("isolation", [])
    if guarantees:
        rows = [
            [g["guarantee"], g["state"], *_since(g, "since", wide), g.get("reason", "")] for g in guarantees
        ]
        lines += ["", table(["guarantee", "state", *(["since"] if wide else []), "reason"], rows)]
    rows = [
        [c["type"], c["status"], c["reason"], *_since(c, "lastTransitionTime", wide), c.get("message", "")]
        for c in _conditions(tenant)
    ]
    if rows:
        header = ["condition", "status", "reason", *(["since"] if wide else []), "message"]
        lines += ["", table(header, rows)]
    return "\n".join(lines) + "\n"


def findings(tenant: Obj, others: Iterable[tuple[str, Obj | None]]) -> list[dict[str, str]]:
    """What is wrong, most telling first: the object, the condition where there is one, since when, and the words."""
    name = f"Tenant {tenant['metadata']['name']}"
    found = [_finding(name, stale)] if (stale := _stale(tenant)) else []
    found += _troubles(name, tenant)
    for what, obj in others:
        if obj is None:
            found.append(_finding(what, f"does not exist: create it, or correct the reference in {name}"))
        else:
            found += _troubles(what, obj)
    return found


def sentences(tenant: Obj, found: list[dict[str, str]], *, wide: bool = False) -> str:
    """One line a finding; `wide` says since when."""
    if not found:
        name = tenant["metadata"]["name"]
        return f"Tenant {name} is served as its spec says; nothing is in its way.\n"
    lines = []
    for finding in found:
        text = finding["message"]
        colon = "" if text.startswith("does not exist") else ":"
        since = f" (since {finding['since']})" if wide and finding["since"] else ""
        lines.append(f"{finding['object']}{colon} {text}{since}\n")
    return "".join(lines)


def _troubles(name: str, obj: Obj) -> list[dict[str, str]]:
    """Conditions that are not as they should be."""
    found = []
    if not _conditions(obj):
        return [_finding(name, "the operator has not looked at it yet: is it running, and is it the leader?")]
    for condition in _conditions(obj):
        kind, state = condition["type"], condition["status"]
        bad = (
            state == "True" if kind in ABNORMAL_WHEN_TRUE else kind in ("Ready", "Placed") and state != "True"
        )
        if bad:
            text = f"{kind} is {state}: {_sentence(condition)}"
            since = str(condition.get("lastTransitionTime", ""))
            found.append((kind != "Stalled", kind != "Ready", text, kind, since))
    return [_finding(name, text, kind, since) for _, _, text, kind, since in sorted(found)]


def _finding(what: str, message: str, condition: str = "", since: str = "") -> dict[str, str]:
    return {"object": what, "condition": condition, "since": since, "message": message}


def _tier(tenant: Obj) -> str:
    tier, in_force = tenant.get("spec", {}).get("tier", "?"), tenant.get("status", {}).get("tier")
    return str(tier) + (f" (in force: {in_force})" if in_force not in (None, tier) else "")


def _target(target: Obj, wide: bool) -> str:
    digest = f", {target['digest']}" if wide and target.get("digest") else ""
    return f"{target['servedName']} ({target.get('weight', 100)}%{digest})"


def _since(entry: Obj, field: str, wide: bool) -> list[str]:
    return [str(entry.get(field, ""))] if wide else []


def _stale(obj: Obj) -> str:
    generation = obj["metadata"].get("generation", 0)
    observed = obj.get("status", {}).get("observedGeneration", -1)
    return "" if observed >= generation else "the operator has not yet acted on the last edit of the spec"


def _sentence(condition: Obj | None) -> str:
    if condition is None:
        return "unknown: the operator has not looked at it yet"
    message = condition.get("message", "")
    return f"{condition['reason']}: {message}" if message else str(condition["reason"])


def _condition(obj: Obj, kind: str) -> Obj | None:
    return next((condition for condition in _conditions(obj) if condition["type"] == kind), None)


def _conditions(obj: Obj) -> list[dict[str, Any]]:
    return list(obj.get("status", {}).get("conditions", []))
