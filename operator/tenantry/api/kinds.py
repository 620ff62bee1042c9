"""The three kinds as the API server knows them: names, scope, table columns, rules on metadata."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from . import adapter, pool, tenant
from .common import Model, Rule, Status


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`; `wide` shows it with `-o wide` only."""

    name: str
    path: str
    description: str
    type: Literal["string", "integer", "date"] = "string"
    wide: bool = False


@dataclass(frozen=True)
class Kind:
    """One kind of `tenantry.dev/v1alpha1`."""

    name: str
    plural: str
    singular: str
    short: str
    scope: Literal["Cluster", "Namespaced"]
    description: str
    spec: type[Model]
    status: type[Status]
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...]
    selectable: tuple[str, ...] = ()


def _condition(kind: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


def _of_names(rules: tuple[Rule, ...], holds: Callable[[str], bool]) -> tuple[Rule, ...]:
    """A name never changes: where an older release let one through, the operator says what is wrong with it."""
    return tuple(replace(rule, once=True, holds=holds) for rule in rules)


_READY = Column("Ready", _condition("Ready", "status"), "Whether it serves now")
_REASON = Column("Reason", _condition("Ready", "reason"), "Why it is ready or not, in one word")
_MESSAGE = Column("Message", _condition("Ready", "message"), "Why it is ready or not", wide=True)
_AGE = Column("Age", ".metadata.creationTimestamp", "Time since its creation", "date")

TENANT: Final = Kind(
    name="Tenant",
    plural="tenants",
    singular="tenant",
    short="ten",
    scope="Cluster",
    description="A customer: its tier, models, limits, keys and isolation.",
    spec=tenant.TenantSpec,
    status=tenant.TenantStatus,
    columns=(
        Column("Tier", ".spec.tier", "The tier that is asked for"),
        _READY,
        _REASON,
        Column("Pool", ".status.placement[0].pool", "The pool that serves the first model"),
        Column("Endpoint", ".status.endpoint.url", "What clients use as base URL"),
        _AGE,
        Column(
            "In-Flight", ".status.route.limits.maxInFlight", "Most sequences at once", "integer", wide=True
        ),
        Column("Key", ".spec.auth.apiKeys[0].name", "The first API key", wide=True),
        _MESSAGE,
    ),
    rules=_of_names(tenant.NAME_RULES, lambda name: len(name) <= 40 and "." not in name),
    selectable=(".spec.tier",),
)

ADAPTER_POOL: Final = Kind(
    name="AdapterPool",
    plural="adapterpools",
    singular="adapterpool",
    short="apool",
    scope="Cluster",
    description="An engine fleet for one base model: capacity, adapter limits, lanes, admitted tiers.",
    spec=pool.AdapterPoolSpec,
    status=pool.AdapterPoolStatus,
    columns=(
        Column("Model", ".spec.baseModel.name", "The base model"),
        _READY,
        _REASON,
        Column("Tenants", ".status.tenants", "Tenants placed on the pool", "integer"),
        Column("Adapters", ".status.adapters.registered", "Adapters registered where needed", "integer"),
        _AGE,
        Column(
            "Declared", ".status.adapters.declared", "Adapters declared to replicas", "integer", wide=True
        ),
        Column("Replicas", ".status.lanes[0].readyReplicas", "Ready in the first lane", "integer", wide=True),
        Column("Namespace", ".status.namespace", "Where the pods run", wide=True),
        _MESSAGE,
    ),
    rules=_of_names(pool.NAME_RULES, lambda name: re.fullmatch("[a-z][a-z0-9-]{0,46}", name) is not None),
)

ADAPTER: Final = Kind(
    name="Adapter",
    plural="adapters",
    singular="adapter",
    short="adp",
    scope="Namespaced",
    description="LoRA versions of one tenant, immutable by digest, and the one that is served.",
    spec=adapter.AdapterSpec,
    status=adapter.AdapterStatus,
    columns=(
        Column("Tenant", ".spec.tenantRef", "The tenant that it belongs to"),
        _READY,
        _REASON,
        Column("Desired", '.spec.channels[?(@.name=="stable")].version', "The version that is asked for"),
        Column("Active", ".status.channels[0].activeVersion", "The version that is served"),
        Column("Rollout", ".status.rollout.phase", "Where the last rollout stands"),
        _AGE,
        Column(
            "Weight", ".status.rollout.weight", "Percent that the new version answers", "integer", wide=True
        ),
        Column("Loaded", ".status.channels[0].replicasLoaded", "Replicas that have it", "integer", wide=True),
        Column("Replicas", ".status.channels[0].replicas", "Replicas that need it", "integer", wide=True),
        Column("Digest", ".status.channels[0].activeDigest", "What is served", wide=True),
        _MESSAGE,
    ),
    rules=_of_names(
        adapter.NAME_RULES, lambda name: len(name) <= 63 and "." not in name and "--" not in name
    ),
    selectable=(".spec.tenantRef",),
)

KINDS: Final = (TENANT, ADAPTER_POOL, ADAPTER)
