"""Which adapters of a tenant stay in memory while nobody uses them."""

from __future__ import annotations

from tenantry.api.config import TierPolicy
from tenantry.api.tenant import AdapterRef, TenantSpec

from .problems import Problem


def pin_problems(spec: TenantSpec, policy: TierPolicy) -> list[Problem]:
    """More pins than the tier allows, said of the first model beyond."""
    seen: set[AdapterRef] = set()
    for index, model in enumerate(spec.models):
        if not model.pinned or model.adapter_ref is None:
            continue
        seen.add(model.adapter_ref)
        if len(seen) > policy.pinned_adapters:
            text = (
                f"must be set for at most {policy.pinned_adapters} adapters (the tier's ceiling): unpin one"
            )
            return [Problem(f"models[{index}].pinned", text)]
    return []


def pinned(spec: TenantSpec, policy: TierPolicy | None) -> frozenset[AdapterRef]:
    """The adapters. None where the tier allows fewer: a spec that is refused must not take others' memory."""
    if policy is None or pin_problems(spec, policy):
        return frozenset()
    return frozenset(
        model.adapter_ref for model in spec.models if model.pinned and model.adapter_ref is not None
    )
