"""Where a request goes: alias to served name, shape to lane, lane to replica. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol, TypeVar

from tenantry.api.tenant import LanePreference

from .errors import ApiError, invalid, model_not_found
from .state import Lane, Model, Pool, Target, Tenant

CANARY = ":canary"


class Choice(Protocol):
    """What routing asks of a replica."""

    @property
    def outstanding(self) -> int: ...
    def resident(self, served_name: str) -> bool: ...


ChoiceT = TypeVar("ChoiceT", bound=Choice)


def find_model(tenant: Tenant, alias: str) -> tuple[Model, bool]:
    """The tenant's model of that alias, and whether the canary was asked for by name. Raises the one 404."""
    name, canary = (alias.removesuffix(CANARY), True) if alias.endswith(CANARY) else (alias, False)
    model = tenant.models.get(name)
    if model is None or model.pool not in tenant.pools or (canary and len(model.targets) < 2):
        raise model_not_found(alias)
    return model, canary


def choose_target(model: Model, canary: bool, tenant_uid: str, session: str) -> Target:
    """The served name: by weight, and always the same for the same session (the client's `user`, else the request)."""
    if canary:
        return model.targets[1]
    point = int.from_bytes(hashlib.sha256(f"{tenant_uid}/{session}".encode()).digest()[:8], "big") % 100
    for target in reversed(model.targets):
        if point < target.weight:
            return target
        point -= target.weight
    return model.targets[0]


def choose_lane(preference: LanePreference, pool: Pool, input_tokens: int, content: str) -> Lane:
    """Fast for what is small enough for it, else bulk, unless the tenant prefers bulk.

    `content` names the field that holds the input. Raises ApiError 400, 503.
    """
    if not pool.lanes:
        raise ApiError(503, "no_endpoint", "the model has no replicas yet", retry_after=5)
    order = ("bulk", "fast") if preference is LanePreference.BULK else ("fast", "bulk")
    for name in order:
        lane = pool.lanes.get(name)
        if lane is not None and (lane.max_input_tokens is None or input_tokens <= lane.max_input_tokens):
            return lane
    most = max(lane.max_input_tokens or 0 for lane in pool.lanes.values())
    raise invalid(
        content, f"must have at most {most} tokens; it has {input_tokens}", "context_length_exceeded"
    )


def choose_replica(candidates: Iterable[ChoiceT], target: Target) -> ChoiceT | None:
    """The one with least outstanding tokens, among those that hold the adapter in memory if there are any."""
    found = list(candidates)
    if target.digest:
        found = [replica for replica in found if replica.resident(target.served_name)] or found
    return min(found, key=lambda replica: replica.outstanding, default=None)
