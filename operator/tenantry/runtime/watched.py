"""Which objects of a kind are watched: all of our own kinds and nodes; of all others only those that bear our label."""

from __future__ import annotations

from tenantry.cluster import ADAPTER, ADAPTER_POOL, NODE, TENANT, Resource
from tenantry.cluster.client import MANAGED

_WHOLE = frozenset({TENANT, ADAPTER_POOL, ADAPTER, NODE})


def selector_of(resource: Resource) -> str:
    """The label selector for lists and watches of a kind; empty = all objects."""
    return "" if resource in _WHOLE else MANAGED
