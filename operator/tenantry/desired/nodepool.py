"""A Karpenter NodePool of one tenant, from an admin's template: nodes that are the tenant's from their first moment.

Karpenter puts labels, annotations and taints of the template on every node before anything can run there, and takes
the nodes away with the NodePool. So these nodes are never claimed, and never given back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from tenantry.api import TenantSpec, names
from tenantry.api.config import OperatorConfig

from .nodes import EFFECTS, UID_ANNOTATION
from .objects import Obj, metadata
from .problems import Problem, join

POOL_LABEL: Final = "karpenter.sh/nodepool"
"""Karpenter's own, on each of its nodes."""

UNREGISTERED: Final = "karpenter.sh/unregistered"
"""Karpenter's own taint, on a node from its first moment until it is ready to be used."""


def problems(spec: TenantSpec, config: OperatorConfig) -> list[Problem]:
    """A template that the tier is not offered."""
    wanted, allowed = spec.isolation.node_pool_template_ref, config.tiers[spec.tier].node_pool_templates
    if wanted is None or (wanted in allowed and wanted in config.node_pool_templates):
        return []
    offered = join(sorted(allowed)) or "none is"
    text = f"must be one that tier {spec.tier.value} is offered ({offered}): see the chart's `tiers`"
    return [Problem("isolation.nodePoolTemplateRef", text)]


def render(
    tenant: str,
    uid: str,
    template: Mapping[str, Any],
    region: tuple[str, str] | None,
    selector: Mapping[str, str],
) -> Obj:
    """The NodePool. `template` is the admin's `spec`; `region` (label, value) and `selector` narrow it."""
    spec = copy.deepcopy(dict(template))
    node = spec.setdefault("template", {})
    meta, body = node.setdefault("metadata", {}), node.setdefault("spec", {})
    meta["labels"] = {**(meta.get("labels") or {}), names.NODE_TENANT_LABEL: tenant}
    meta["annotations"] = {**(meta.get("annotations") or {}), UID_ANNOTATION: uid}
    others = [taint for taint in body.get("taints") or [] if taint.get("key") != names.NODE_TAINT]
    ours = [{"key": names.NODE_TAINT, "value": tenant, "effect": effect} for effect in EFFECTS]
    body["taints"] = [*others, *ours]
    narrowed = [*([region] if region is not None else []), *sorted(selector.items())]
    body["requirements"] = [
        *(body.get("requirements") or []),
        *({"key": key, "operator": "In", "values": [value]} for key, value in narrowed),
    ]
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": metadata(names.dedicated_pool(tenant), labels={names.TENANT_LABEL: tenant}),
        "spec": spec,
    }


def is_karpenters(node: Obj) -> bool:
    """Whether Karpenter made the node, and takes it away again."""
    return POOL_LABEL in node["metadata"].get("labels", {})


def is_joining(node: Obj) -> bool:
    """Whether Karpenter still keeps everything off the node: in one write it lets go and sets the NodePool's taints."""
    taints = node.get("spec", {}).get("taints") or []
    return any(taint.get("key") == UNREGISTERED and taint.get("effect") == "NoExecute" for taint in taints)
