"""Where a request goes: alias to served name, shape to lane, lane to replica. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from tenantry.api.tenant import LanePreference

from .body import Request
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


def session_of(conversation: str, request: Request, request_id: str) -> str:
    """What a conversation is known by over all of its requests: the client's word for it, else how it began.

    A later turn repeats the first message, and instructions are often the same in all conversations: so the first
    message of the user counts, of a plain prompt its first line.
    """
    if conversation:
        return f"conversation/{conversation}"
    if request.user:
        return f"user/{request.user}"
    for message in request.messages:
        if message["role"] == "user":
            return f"message/{_text(message.get('content'))}"
    for prompt in request.prompts:
        line = prompt.lstrip().partition("\n")[0]
        if line:
            return f"message/{line}"
    return f"request/{request_id}"


def _text(content: Any) -> str:
    """A message's content, in one of its two forms."""
    if isinstance(content, str):
        return content
    return "".join(str(part["text"]) for part in content or [])


def choose_target(model: Model, canary: bool, tenant_uid: str, session: str) -> Target:
    """The served name: by weight, and the same for a session as long as the canary's weight does not fall.

    The canary's own name is part of the draw, so that not always the same sessions try what is new.
    """
    if len(model.targets) < 2:
        return model.targets[0]
    stable, second = model.targets[0], model.targets[1]
    if canary:
        return second
    drawn = hashlib.sha256(f"{tenant_uid}/{second.served_name}/{session}".encode()).digest()
    return second if int.from_bytes(drawn[:8], "big") % 100 < second.weight else stable


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
