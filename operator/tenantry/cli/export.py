"""`tenantry export`: a cluster's tenants as YAML that can be applied elsewhere. Reads only.

What people wrote goes along, what a cluster made does not: no uids, no statuses, no pools that the operator derived.
Keys stay valid since a Tenant holds their hashes. A status is never carried over, for it is a claim about one cluster:
the other one proves everything anew. Only what was promoted is kept, as what the stable channel asks for, so that the
other cluster serves the same bytes even where a newer version was on its way or had failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from tenantry.api.common import API_VERSION
from tenantry.api.names import tenant_namespace

Obj = dict[str, Any]

_ENTRY = ("version", "digest", "source", "rank", "secretRef")
_DROPPED_ANNOTATIONS = ("kubectl.kubernetes.io/last-applied-configuration",)
_HEADER = (
    "# Tenants, pools and adapters of one cluster. Apply it to another one that has Tenantry's CRDs and chart,\n"
    "# then let Git take over again: `kubectl apply --server-side -f FILE`.\n"
)


class Source(Protocol):
    """Lists whole kinds of a cluster."""

    def all(self, plural: str) -> list[Obj]:
        """Every object of a kind of ours. Raises CliError."""


@dataclass(frozen=True)
class Export:
    """The YAML text, and what its reader must know or do besides."""

    text: str
    notes: tuple[str, ...]


def export(source: Source) -> Export:
    """Everything that people wrote, in the order in which it can be applied. Raises CliError."""
    return build(source.all("adapterpools"), source.all("tenants"), source.all("adapters"))


def build(pools: Iterable[Obj], tenants: Iterable[Obj], adapters: Iterable[Obj]) -> Export:
    """The same from objects that were read."""
    notes: list[str] = []
    kept_pools = [_plain("AdapterPool", pool) for pool in pools if not _derived(pool)]
    kept_tenants = [_plain("Tenant", tenant) for tenant in tenants if not _leaving("Tenant", tenant, notes)]
    kept_adapters = []
    for adapter in adapters:
        if not _leaving("Adapter", adapter, notes):
            kept_adapters.append(_promoted(_plain("Adapter", adapter), adapter.get("status") or {}, notes))
    owned = {tenant_namespace(tenant["metadata"]["name"]) for tenant in kept_tenants}
    spaces = sorted({adapter["metadata"]["namespace"] for adapter in kept_adapters} - owned)
    namespaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in spaces]
    documents = [*namespaces, *_sorted(kept_pools), *_sorted(kept_tenants), *_sorted(kept_adapters)]
    notes += _secrets(kept_adapters)
    text = _HEADER + "".join(
        "---\n" + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)
        for document in documents
    )
    return Export(text, tuple(notes))


def _plain(kind: str, obj: Obj) -> Obj:
    """The object as its owner would write it."""
    source = obj["metadata"]
    metadata: Obj = {"name": source["name"]}
    if source.get("namespace"):
        metadata["namespace"] = source["namespace"]
    if source.get("labels"):
        metadata["labels"] = dict(source["labels"])
    annotations = {
        name: text
        for name, text in (source.get("annotations") or {}).items()
        if name not in _DROPPED_ANNOTATIONS
    }
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": obj["spec"]}


def _derived(pool: Obj) -> bool:
    """Whether the operator made the pool for a dedicated tenant: it makes it again."""
    owners = pool["metadata"].get("ownerReferences") or []
    return any(owner.get("controller") and owner.get("kind") == "Tenant" for owner in owners)


def _leaving(kind: str, obj: Obj, notes: list[str]) -> bool:
    if not obj["metadata"].get("deletionTimestamp"):
        return False
    notes.append(f"{kind} {_name(obj)} is being deleted and was left out")
    return True


def _promoted(adapter: Obj, status: Obj, notes: list[str]) -> Obj:
    """The Adapter with the stable channel at what is served, which is listed even where Git has dropped it."""
    last = _last_promoted(status)
    spec = adapter["spec"]
    wanted = next((c["version"] for c in spec["channels"] if c["name"] == "stable"), None)
    if last is None or wanted is None:
        return adapter
    listed = {entry["version"]: entry for entry in spec["versions"]}
    known = listed.get(last["version"])
    if wanted == last["version"] and known is not None and known["digest"] == last["digest"]:
        return adapter
    versions = [entry for entry in spec["versions"] if entry["version"] != last["version"]]
    kept = known if known is not None and known["digest"] == last["digest"] else last
    channels = [
        {**channel, "version": last["version"]} if channel["name"] == "stable" else channel
        for channel in spec["channels"]
    ]
    notes.append(
        f"Adapter {_name(adapter)} serves {last['version']}, which the export asks for, and not {wanted}, which was "
        "on its way: apply Git afterwards to go on with it"
    )
    return {**adapter, "spec": {**spec, "versions": [*versions, kept], "channels": channels}}


def _last_promoted(status: Obj) -> Obj | None:
    """The version that was promoted last, as an entry of `versions`; None before the first promotion."""
    last = status.get("lastPromoted") or {}
    if last.get("source"):
        return {name: last[name] for name in _ENTRY if name in last}
    for channel in status.get("channels") or []:
        if channel.get("name") == "stable" and channel.get("activeVersion") and channel.get("activeSource"):
            active = {name: channel.get(f"active{name[0].upper()}{name[1:]}") for name in _ENTRY}
            return {"rank": 1} | {name: value for name, value in active.items() if value}
    return None


def _secrets(adapters: Iterable[Obj]) -> list[str]:
    """Credentials are not exported: which ones the other cluster must have."""
    needed = sorted(
        {
            f"{adapter['metadata']['namespace']}/{entry['secretRef']}"
            for adapter in adapters
            for entry in adapter["spec"]["versions"]
            if entry.get("secretRef")
        }
    )
    return [f"Secret {name} is not exported: create it before you apply" for name in needed]


def _sorted(objects: list[Obj]) -> list[Obj]:
    return sorted(objects, key=_name)


def _name(obj: Obj) -> str:
    metadata = obj["metadata"]
    return (
        f"{metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else str(metadata["name"])
    )
