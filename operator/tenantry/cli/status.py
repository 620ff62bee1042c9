"""`tenantry status` and `tenantry why`: what the cluster says about a tenant, in words. Reads only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenantry.api.common import GROUP, VERSION
from tenantry.api.names import dedicated_pool

from .errors import CliError
from .table import table

Obj = dict[str, Any]

PAGE = 500
ABNORMAL_WHEN_TRUE = ("Stalled", "Reconciling", "Degraded", "RolledBack", "Suspended")


class Cluster:
    """The cluster that KUBECONFIG (or the pod) points to."""

    def __init__(self) -> None:
        from kubernetes import client, config

        load: Any = config.load_config
        try:
            load()
        except (config.ConfigException, OSError, TypeError) as error:
            raise CliError("no cluster: `KUBECONFIG` must name a kubeconfig file that can be read") from error
        self._api = client.CustomObjectsApi()
        self._refusal: type[Exception] = client.ApiException

    def tenant(self, name: str) -> Obj:
        """Raises CliError."""
        return self._call(
            f"Tenant `{name}`", lambda: self._api.get_cluster_custom_object(GROUP, VERSION, "tenants", name)
        )

    def pool(self, name: str) -> Obj | None:
        """None when there is no such pool. Raises CliError."""
        return self._maybe(lambda: self._api.get_cluster_custom_object(GROUP, VERSION, "adapterpools", name))

    def adapter(self, namespace: str, name: str) -> Obj | None:
        """None when there is no such adapter. Raises CliError."""
        return self._maybe(
            lambda: self._api.get_namespaced_custom_object(GROUP, VERSION, namespace, "adapters", name)
        )

    def all(self, plural: str) -> list[Obj]:
        """Every object of a kind of ours, over all namespaces. Raises CliError."""
        found: list[Obj] = []
        more: str | None = None
        while more is None or more:
            page = {"limit": PAGE, **({"_continue": more} if more else {})}
            answer = self._call(
                f"`{plural}.{GROUP}`",
                lambda page=page: self._api.list_cluster_custom_object(GROUP, VERSION, plural, **page),
            )
            found += answer["items"]
            more = str(answer["metadata"].get("continue") or "")
        return found

    def _maybe(self, get: Any) -> Obj | None:
        try:
            return self._call("", get)
        except _Missing:
            return None

    def _call(self, what: str, get: Any) -> Obj:
        from urllib3.exceptions import HTTPError

        try:
            found: Obj = get()
        except self._refusal as error:
            status = getattr(error, "status", None)
            if status == 404:
                raise _Missing(f"{what} must exist: there is none of that name in this cluster") from error
            raise CliError(
                f"the API server answered {status} {getattr(error, 'reason', '')}".rstrip()
            ) from error
        except HTTPError as error:
            raise CliError("the API server cannot be reached: check `KUBECONFIG`") from error
        return found


class _Missing(CliError):
    pass


def status(cluster: Cluster, name: str) -> str:
    """The tenant at a glance. Raises CliError."""
    return describe(cluster.tenant(name))


def why(cluster: Cluster, name: str) -> tuple[str, bool]:
    """Everything that keeps the tenant from being served, down to pools and adapters; and whether there is any."""
    tenant = cluster.tenant(name)
    spec = tenant.get("spec", {})
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
    others += [
        (f"Adapter {space}/{adapter}", cluster.adapter(space, adapter)) for space, adapter in sorted(refs)
    ]
    return explain(tenant, others)


def describe(tenant: Obj) -> str:
    """The facts of `status`, one thing a line."""
    spec, seen = tenant.get("spec", {}), tenant.get("status", {})
    in_force = seen.get("tier")
    tier = spec.get("tier", "?")
    lines = [
        f"Tenant {tenant['metadata']['name']}",
        f"  tier      {tier}" + (f" (in force: {in_force})" if in_force not in (None, tier) else ""),
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
    for model in (seen.get("route") or {}).get("models", []):
        targets = ", ".join(f"{t['servedName']} ({t.get('weight', 100)}%)" for t in model["targets"])
        lines.append(f"  serves    {model['name']} = {targets}")
    guarantees = seen.get("isolation", [])
    if guarantees:
        rows = [[g["guarantee"], g["state"], g.get("reason", "")] for g in guarantees]
        lines += ["", table(["guarantee", "state", "reason"], rows)]
    rows = [[c["type"], c["status"], c["reason"], c.get("message", "")] for c in _conditions(tenant)]
    if rows:
        lines += ["", table(["condition", "status", "reason", "message"], rows)]
    return "\n".join(lines) + "\n"


def explain(tenant: Obj, others: Iterable[tuple[str, Obj | None]]) -> tuple[str, bool]:
    """What is wrong, most telling first; and whether anything is."""
    name = f"Tenant {tenant['metadata']['name']}"
    findings = [f"{name}: {stale}"] if (stale := _stale(tenant)) else []
    findings += [f"{name}: {text}" for text in _troubles(tenant)]
    for what, obj in others:
        if obj is None:
            findings.append(f"{what} does not exist: create it, or correct the reference in {name}")
        else:
            findings += [f"{what}: {text}" for text in _troubles(obj)]
    if not findings:
        return f"{name} is served as its spec says; nothing is in its way.\n", False
    return "".join(f"{finding}\n" for finding in findings), True


def _troubles(obj: Obj) -> list[str]:
    """Conditions that are not as they should be."""
    found = []
    if not _conditions(obj):
        return ["the operator has not looked at it yet: is it running, and is it the leader?"]
    for condition in _conditions(obj):
        kind, state = condition["type"], condition["status"]
        bad = (
            state == "True" if kind in ABNORMAL_WHEN_TRUE else kind in ("Ready", "Placed") and state != "True"
        )
        if bad:
            found.append((kind != "Stalled", kind != "Ready", f"{kind} is {state}: {_sentence(condition)}"))
    return [text for _, _, text in sorted(found)]


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


def _conditions(obj: Obj) -> list[Obj]:
    return list(obj.get("status", {}).get("conditions", []))
