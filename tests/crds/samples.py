"""A good object of each kind, to be spoilt by one change in each test, and full ones with every field set."""

from __future__ import annotations

import copy
from typing import Any

from tenantry.api.common import API_VERSION

HEX = "0123456789abcdef" * 4
DIGEST = f"sha256:{HEX}"
OTHER_DIGEST = f"sha256:{HEX[::-1]}"
TIME = "2026-01-02T03:04:05Z"


def tenant(name: str, tier: str = "Smb", **spec: Any) -> dict[str, Any]:
    """A Tenant; dedicated tiers name a pool template."""
    body: dict[str, Any] = {"tier": tier, "models": [{"name": "chat", "baseModel": "smollm2"}]}
    if tier in ("Enterprise", "Regulated"):
        body["dedicated"] = {"poolTemplateRef": "standard"}
    return _object("Tenant", name, {**body, **spec})


def pool(name: str, **spec: Any) -> dict[str, Any]:
    """An AdapterPool whose model lies in the image."""
    body: dict[str, Any] = {
        "baseModel": {"name": "smollm2", "source": {"image": {"path": "/models/smollm2"}}},
        "tiers": ["Free", "Smb"],
        "lanes": [{"name": "fast"}],
    }
    return _object("AdapterPool", name, {**body, **spec})


def adapter(name: str, **spec: Any) -> dict[str, Any]:
    """An Adapter with one version, which is served."""
    body: dict[str, Any] = {
        "tenantRef": "acme",
        "versions": [version("1.0.0")],
        "channels": [{"name": "stable", "version": "1.0.0"}],
    }
    document = _object("Adapter", name, {**body, **spec})
    document["metadata"]["namespace"] = "crd-tests"
    return document


def version(number: str, **fields: Any) -> dict[str, Any]:
    """An entry of `versions`."""
    source = f"oci://registry.example.com:5000/acme/tone:{number}"
    return {"version": number, "digest": DIGEST, "source": source, "rank": 8, **fields}


def changed(document: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """The same object with other fields in its spec."""
    copied = copy.deepcopy(document)
    copied["spec"].update(spec)
    return copied


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
