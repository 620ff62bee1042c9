"""What every desired object shares: metadata and labels. The runtime adds the owner reference when it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tenantry.api import names

Obj = dict[str, Any]

ENGINE_COMPONENT: Final = "engine"
GATEWAY_COMPONENT: Final = "gateway"
OPERATOR_COMPONENT: Final = "operator"
FETCHER_COMPONENT: Final = "fetcher"
OWN_GATEWAY_COMPONENT: Final = "own-gateway"


def metadata(name: str, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Obj:
    """Metadata with our managed-by label."""
    meta: Obj = {"name": name, "labels": {names.MANAGED_BY_LABEL: names.MANAGED_BY, **(labels or {})}}
    if namespace is not None:
        meta["namespace"] = namespace
    return meta
