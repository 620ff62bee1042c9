"""The guarantees of a tenant's tier and what may be said of each: `Enforced` only after an observation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tenantry.api.common import Tier
from tenantry.api.tenant import GuaranteeState

from .conditions import shorten
from .objects import Obj

_ALL = frozenset(Tier)
_ADAPTERS = frozenset({Tier.MID_MARKET, Tier.ENTERPRISE, Tier.REGULATED})
_DEDICATED = frozenset({Tier.ENTERPRISE, Tier.REGULATED})

GUARANTEES: Final[Mapping[str, frozenset[Tier]]] = {
    "AdapterAccess": _ADAPTERS,
    "AdapterIntegrity": _ADAPTERS,
    "DedicatedNodes": _DEDICATED,
    "DedicatedProcess": _DEDICATED,
    "FairShare": _ALL,
    "NetworkIsolation": _DEDICATED,
    "PodHardening": _DEDICATED,
    "PromptSeparation": _ALL,
    "QuotaEnforced": _DEDICATED,
}


@dataclass(frozen=True)
class Observation:
    """What was seen in the running system. `holds` None: it could not be seen."""

    holds: bool | None
    reason: str


def guarantees(tier: Tier, rendered: bool, seen: Mapping[str, Observation]) -> list[Obj]:
    """One entry per guarantee, sorted, for `status.isolation`; `since` is added when it is written.

    `rendered`: what the spec intends has been written. Without an observation a guarantee is at most `Configured`.
    """
    entries = []
    for name, tiers in sorted(GUARANTEES.items()):
        state, reason = _judge(tier, tiers, rendered, seen.get(name))
        entries.append({"guarantee": name, "state": state.value, "reason": shorten(reason, 256)})
    return entries


def _judge(
    tier: Tier, tiers: frozenset[Tier], rendered: bool, observation: Observation | None
) -> tuple[GuaranteeState, str]:
    if tier not in tiers:
        return GuaranteeState.NOT_PROVIDED, f"tier {tier.value} does not include it"
    if not rendered:
        return GuaranteeState.NOT_PROVIDED, "not set up yet"
    if observation is None or observation.holds is None:
        return (
            GuaranteeState.CONFIGURED,
            "not observed" if observation is None else observation.reason,
        )
    if observation.holds:
        return GuaranteeState.ENFORCED, observation.reason
    return GuaranteeState.NOT_PROVIDED, observation.reason
