"""The guarantees of a tenant's tier and what may be said of each: `Enforced` only after an observation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tenantry.api.common import Tier
from tenantry.api.tenant import GuaranteeState

from .conditions import Verdict, no, shorten, unknown, yes
from .objects import Obj

_ALL = frozenset(Tier)
_ADAPTERS = frozenset({Tier.MID_MARKET, Tier.ENTERPRISE, Tier.REGULATED})
_DEDICATED = frozenset({Tier.ENTERPRISE, Tier.REGULATED})
_REGULATED = frozenset({Tier.REGULATED})


@dataclass(frozen=True)
class Promise:
    """Which tiers include a guarantee, and what it never says, however well it holds."""

    tiers: frozenset[Tier]
    never: str = ""


PROMISES: Final[Mapping[str, Promise]] = {
    "AdapterAccess": Promise(_ADAPTERS),
    "AdapterIntegrity": Promise(_ADAPTERS),
    "AttestedNodes": Promise(_REGULATED, "anything that a node's labels say of it"),
    "DedicatedNodes": Promise(_DEDICATED, "safety from the shared control plane and privileged DaemonSets"),
    "DedicatedProcess": Promise(_DEDICATED),
    "EncryptionAtRest": Promise(frozenset(), "anything: it cannot be seen from inside"),
    "EncryptionInTransit": Promise(_REGULATED),
    "FairShare": Promise(_ALL, "shares of memory bus, PCIe or disk"),
    "KernelIsolation": Promise(_REGULATED),
    "NetworkIsolation": Promise(
        _DEDICATED, "names of hosts, traffic to the node itself, a pod's first moments"
    ),
    "NoEgress": Promise(_REGULATED, "traffic to the node itself, a pod's first moments"),
    "PodHardening": Promise(_DEDICATED, "that pods from before comply"),
    "PromptSeparation": Promise(
        _ALL, "that the time an answer takes tells nothing of others on the same pod"
    ),
    "QuotaEnforced": Promise(_DEDICATED, "shares of disk and network"),
}

GUARANTEES: Final[Mapping[str, frozenset[Tier]]] = {name: promise.tiers for name, promise in PROMISES.items()}

UNSEEN: Final[Mapping[str, str]] = {
    "AdapterAccess": "not observed: no key is set aside to try others' models with (`evidence.accessKeySecret`)",
    "FairShare": "not observed: engines do not report what each tenant was served",
}
"""What is not looked at by default, or by this release, and why."""


@dataclass(frozen=True)
class Observation:
    """What was seen in the running system. `holds` None: it could not be seen, or too long ago.

    `idle`: there is nothing of which it could be seen, such as the digests of no adapters.
    """

    holds: bool | None
    reason: str
    idle: bool = False


def guarantees(tier: Tier, rendered: bool, seen: Mapping[str, Observation]) -> list[Obj]:
    """One entry per guarantee, sorted, for `status.isolation`; `since` is added when it is written.

    `rendered`: what the spec intends has been written. Without an observation a guarantee is at most `Configured`.
    """
    entries = []
    for name, tiers in sorted(GUARANTEES.items()):
        state, reason = _judge(name, tier, tiers, rendered, seen.get(name))
        entries.append({"guarantee": name, "state": state.value, "reason": shorten(reason, 256)})
    return entries


def _judge(
    name: str, tier: Tier, tiers: frozenset[Tier], rendered: bool, observation: Observation | None
) -> tuple[GuaranteeState, str]:
    if tier not in tiers:
        where = f"tier {tier.value} does not include it" if tiers else "no tier includes it"
        return GuaranteeState.NOT_PROVIDED, where
    if not rendered:
        return GuaranteeState.NOT_PROVIDED, "not set up yet"
    if observation is None or observation.holds is None:
        reason = UNSEEN.get(name, "not observed") if observation is None else observation.reason
        return GuaranteeState.CONFIGURED, reason
    if observation.holds:
        return GuaranteeState.ENFORCED, observation.reason
    return GuaranteeState.NOT_PROVIDED, f"broken: {observation.reason}"


def verified(tier: Tier, seen: Mapping[str, Observation]) -> Verdict:
    """Condition `IsolationVerified`: whether everything of the tier that can be looked at was seen to hold."""
    wanted = [
        name
        for name, tiers in sorted(GUARANTEES.items())
        if tier in tiers and (name in seen or name not in UNSEEN)
    ]
    broken = [name for name in wanted if (found := seen.get(name)) is not None and found.holds is False]
    if broken:
        return no("IsolationVerified", "Broken", f"seen broken: {', '.join(broken)}; see `status.isolation`")
    missing = [
        name
        for name in wanted
        if (found := seen.get(name)) is None or (found.holds is None and not found.idle)
    ]
    if missing:
        return unknown("IsolationVerified", "NotObserved", f"not seen: {', '.join(missing)}")
    return yes("IsolationVerified", "Observed", "everything that the tier guarantees was seen to hold")


def network(observation: Observation | None) -> Verdict:
    """Condition `NetworkIsolated` of a dedicated tenant whose policies are written."""
    if observation is None or observation.holds is None:
        why = "no probe has shown that the policies hold" if observation is None else observation.reason
        return unknown("NetworkIsolated", "NotProbed", why)
    if observation.holds:
        return yes("NetworkIsolated", "Probed", observation.reason)
    return no("NetworkIsolated", "Reached", observation.reason)
