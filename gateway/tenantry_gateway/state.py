"""The gateway's view of the cluster: tenants and the addresses of replicas, trimmed on arrival.

Fed by `watch`, read by everything else, all on one event loop. What cannot be understood is dropped and told, never
half used: a tenant whose route is broken is served by nothing, and all others serve on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError
from tenantry.api.tenant import ApiKey, EffectiveLimits, GatewayPlace, LanePreference, Prompt, Route

from .prompt import render

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Key:
    """A credential by its hash. `expires_at` in Unix seconds."""

    name: str
    sha256: str
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class Target:
    """One served name behind an alias; `digest` is empty for the base model."""

    served_name: str
    digest: str
    weight: int


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    pool: str
    targets: tuple[Target, ...]
    fallback: str | None


@dataclass(frozen=True, slots=True)
class Lane:
    """Replicas of one lane that serve the tenant, by pod name."""

    name: str
    service: str
    slots: int
    max_input_tokens: int | None
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    name: str
    uid: str
    namespace: str
    lanes: dict[str, Lane]
    tls: bool = False


@dataclass(frozen=True, slots=True)
class Tenant:
    """What the data path needs of a Tenant. `limits` is None while nothing serves the tenant."""

    name: str
    uid: str
    keys: tuple[Key, ...]
    prompt: str
    suspended: bool
    weight: int
    lane: LanePreference
    limits: EffectiveLimits | None
    pools: dict[str, Pool]
    models: dict[str, Model]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a pod answers, by the EndpointSlices. `ready` is Kubernetes' word for it."""

    pod: str
    address: str
    ready: bool


@dataclass(frozen=True, slots=True)
class Slice:
    namespace: str
    service: str
    endpoints: tuple[Endpoint, ...]


def parse_tenant(item: dict[str, Any]) -> Tenant:
    """Trim a Tenant. Raises ValidationError, KeyError or ValueError where it is not one."""
    metadata, spec = item["metadata"], item["spec"]
    auth = spec.get("auth") or {}
    keys = tuple(_key(ApiKey.model_validate(key)) for key in auth.get("apiKeys") or [])
    prompt = Prompt.model_validate(spec.get("prompt") or {})
    found = (item.get("status") or {}).get("route")
    route = None if found is None else Route.model_validate(found)
    return Tenant(
        name=metadata["name"],
        uid=metadata["uid"],
        keys=keys,
        prompt=render(prompt),
        suspended=bool(spec.get("suspend")),
        weight=route.weight if route else 1,
        lane=route.lane if route else LanePreference.AUTO,
        limits=route.limits if route else None,
        pools={pool.name: _pool(pool) for pool in route.pools} if route else {},
        models={
            model.name: Model(
                model.name,
                model.pool,
                tuple(Target(t.served_name, t.digest, t.weight) for t in model.targets),
                model.fallback,
            )
            for model in route.models
        }
        if route
        else {},
    )


def _key(key: ApiKey) -> Key:
    expires = None
    if key.expires_at is not None:
        moment = datetime.fromisoformat(key.expires_at)
        expires = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return Key(key.name, key.sha256, expires)


def _pool(pool: Any) -> Pool:
    return Pool(
        pool.name,
        pool.uid,
        pool.namespace,
        {
            str(lane.name): Lane(
                str(lane.name), lane.service, lane.slots, lane.max_input_tokens, tuple(lane.replicas)
            )
            for lane in pool.lanes
        },
        pool.tls,
    )


def parse_slice(item: dict[str, Any]) -> Slice:
    """Trim an EndpointSlice; endpoints that name no pod are left out."""
    metadata = item["metadata"]
    endpoints = []
    for found in item.get("endpoints") or []:
        pod = (found.get("targetRef") or {}).get("name")
        conditions = found.get("conditions") or {}
        if pod and found.get("addresses"):
            ready = conditions.get("ready") is not False and not conditions.get("terminating")
            endpoints.append(Endpoint(pod, found["addresses"][0], ready))
    service = (metadata.get("labels") or {})["kubernetes.io/service-name"]
    return Slice(metadata["namespace"], service, tuple(endpoints))


@dataclass
class State:
    """Tenants by name, endpoints by lane. `ready` once both kinds were listed: before that everything is refused."""

    tenants: dict[str, Tenant] = field(default_factory=dict)
    slices: dict[str, Slice] = field(default_factory=dict)
    synced: set[str] = field(default_factory=set)
    audiences: dict[tuple[str, str], str] = field(default_factory=dict)
    secured: set[str] = field(default_factory=set)
    """Audiences that are reached by mutual TLS."""
    listeners: list[Callable[[], None]] = field(default_factory=list)
    rejected: int = 0
    only: str | None = None
    """The one tenant of this gateway; None: it serves all that have no gateway of their own."""

    @property
    def ready(self) -> bool:
        return {"tenants", "slices"} <= self.synced

    def put_tenant(self, item: dict[str, Any]) -> None:
        """Take a Tenant as Kubernetes sends it. A broken one is dropped."""
        self._take_tenant(item)
        self.changed()

    def _take_tenant(self, item: dict[str, Any]) -> None:
        name = str(item.get("metadata", {}).get("name", ""))
        try:
            if not self._is_ours(name, item):
                self.tenants.pop(name, None)
                return
            tenant = parse_tenant(item)
        except (ValidationError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.rejected += 1
            self.tenants.pop(name, None)
            log.error(
                "tenant is not served: its object cannot be read", extra={"tenant": name, "why": _why(error)}
            )
        else:
            self.tenants[name] = tenant
            for pool in tenant.pools.values():
                (self.secured.add if pool.tls else self.secured.discard)(pool.uid)
                for lane in pool.lanes.values():
                    self.audiences[(pool.namespace, lane.service)] = pool.uid

    def _is_ours(self, name: str, item: dict[str, Any]) -> bool:
        """Exactly one gateway knows a tenant."""
        route = (item.get("status") or {}).get("route") or {}
        own = route.get("gateway") == GatewayPlace.DEDICATED.value
        return own and name == self.only if self.only is not None else not own

    def drop_tenant(self, name: str) -> None:
        self.tenants.pop(name, None)
        self.changed()

    def replace_tenants(self, items: list[dict[str, Any]]) -> None:
        """The whole list, after a (re)list."""
        gone = set(self.tenants) - {str(item.get("metadata", {}).get("name", "")) for item in items}
        for name in gone:
            del self.tenants[name]
        for item in items:
            self._take_tenant(item)
        self.synced.add("tenants")
        self.changed()

    def put_slice(self, item: dict[str, Any]) -> None:
        """Take an EndpointSlice as Kubernetes sends it. A broken one is dropped."""
        self._take_slice(item)
        self.changed()

    def _take_slice(self, item: dict[str, Any]) -> None:
        key = _slice_key(item)
        try:
            self.slices[key] = parse_slice(item)
        except (KeyError, TypeError, AttributeError) as error:
            self.rejected += 1
            self.slices.pop(key, None)
            log.error("endpoint slice ignored", extra={"slice": key, "why": _why(error)})

    def drop_slice(self, item: dict[str, Any]) -> None:
        self.slices.pop(_slice_key(item), None)
        self.changed()

    def replace_slices(self, items: list[dict[str, Any]]) -> None:
        self.slices.clear()
        for item in items:
            self._take_slice(item)
        self.synced.add("slices")
        self.changed()

    def changed(self) -> None:
        for listener in self.listeners:
            listener()


def _slice_key(item: dict[str, Any]) -> str:
    metadata = item.get("metadata", {})
    return f"{metadata.get('namespace')}/{metadata.get('name')}"


def _why(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"`{'.'.join(str(part) for part in first['loc'])}`: {first['msg']}"
    return f"{type(error).__name__}: {error}"[:200]
