"""Findings: what an observer saw of one aspect of a guarantee, when, and what a guarantee's findings say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from tenantry.desired.isolation import Observation

ASPECTS: Final[Mapping[str, tuple[str, ...]]] = {
    "AdapterAccess": ("door",),
    "AdapterIntegrity": ("pages",),
    "AttestedNodes": ("verifier",),
    "DedicatedNodes": ("neighbours", "taints", "admission"),
    "DedicatedProcess": ("engines",),
    "EncryptionInTransit": ("handshake",),
    "FairShare": ("service",),
    "KernelIsolation": ("probe",),
    "NetworkIsolation": ("probe", "policies", "admission"),
    "NoEgress": ("probe", "policies", "admission"),
    "PodHardening": ("refusal", "admission"),
    "PromptSeparation": ("counters",),
    "QuotaEnforced": ("quota", "admission"),
}
"""What must have been seen of each guarantee before it can be `Enforced`; the first one speaks for it."""


@dataclass(frozen=True)
class Finding:
    """`holds` None: nothing shows that it holds. `at` in seconds since 1970.

    `blind`: it could not be looked at this time; what was seen before counts on, as long as that counts.
    `idle`: there is nothing of which it could be seen, such as the digests of no adapters.
    `reason` stands in a status: it must not change while the finding is the same. What does change (addresses,
    counts, times) belongs into `facts`, which the report shows.
    """

    holds: bool | None
    reason: str
    at: float
    facts: tuple[str, ...] = ()
    blind: bool = False
    idle: bool = False

    def says_the_same(self, other: Finding | None) -> bool:
        """Whether the other finding differs in time and facts only."""
        return other is not None and (self.holds, self.reason) == (other.holds, other.reason)


def blind(reason: str, at: float, facts: tuple[str, ...] = ()) -> Finding:
    """It could not be looked at."""
    return Finding(None, reason, at, facts, blind=True)


def idle(reason: str, at: float) -> Finding:
    """There is nothing of which it could be seen."""
    return Finding(None, reason, at, idle=True)


def current(guarantee: str, seen: Mapping[str, Finding], now: float, max_age: float) -> Observation | None:
    """What the aspects of one guarantee say together at `now` (seconds since 1970); None when nothing was looked at.

    What was seen to be broken stays broken until it is seen whole. All else counts for `max_age` seconds.
    """
    aspects = ASPECTS[guarantee]
    found = {aspect: seen[aspect] for aspect in aspects if aspect in seen}
    if not found:
        return None
    broken = [finding for finding in found.values() if finding.holds is False]
    if broken:
        return Observation(False, "; ".join(finding.reason for finding in broken))
    missing = [aspect for aspect in aspects if aspect not in found]
    if missing:
        return Observation(None, f"not looked at yet: {', '.join(missing)}")
    unseen = [finding for finding in found.values() if finding.holds is None]
    if unseen:
        idle = all(finding.idle for finding in unseen)
        return Observation(None, "; ".join(finding.reason for finding in unseen), idle)
    oldest = min(finding.at for finding in found.values())
    if is_stale(oldest, now, max_age):
        return Observation(None, f"stale: last seen to hold at {clock(oldest)}")
    return Observation(True, found[aspects[0]].reason)


def is_stale(at: float, now: float, max_age: float) -> bool:
    """Too old to count; so is what claims to come from the future, beyond what clocks differ."""
    return now - at > max_age or at - now > max_age


def together(observations: Iterable[Observation | None]) -> Observation | None:
    """What holds in several places only if it holds in each: a broken place decides, then one that was not seen."""
    found = list(observations)
    if not found or all(entry is None for entry in found):
        return None
    for holds in (False, None):
        for entry in found:
            if entry is None:
                if holds is None:
                    return Observation(None, "not looked at everywhere yet")
            elif entry.holds is holds:
                return entry
    return found[0]


def clock(at: float) -> str:
    """RFC 3339 in UTC, whole seconds."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Seconds since 1970 of an RFC 3339 time. Raises ValueError."""
    then = datetime.fromisoformat(text)
    return (then if then.tzinfo is not None else then.replace(tzinfo=UTC)).timestamp()
