"""What is known of one pod's gate, and what follows from it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FAILED_REASON: Final = "AttestationFailed"
STALE_REASON: Final = "AttestationStale"
RETRY_SECONDS: Final = 5.0
WAIT_SECONDS: Final = 2.0
DAMNING: Final = frozenset({"OtherMeasurements", "VerifierRefused"})
"""Answers that speak of the node itself: a lease that still lasts is not waited for."""


class GateState(StrEnum):
    WAITING = "Waiting"
    """Never opened: the engine has not started."""
    OPEN = "Open"
    STALE = "Stale"
    """The last proof is too old and nobody gives another; the engine has ended by itself."""
    FAILED = "Failed"
    """Proof was given and it is not what the policy asks."""


@dataclass(frozen=True)
class Proof:
    """The gate of one pod as it was last heard. Times in Unix seconds.

    `until`: when the engine ends unless it is proven anew (None: no proof is asked, or none was ever given).
    `certified_until`: when the engine's certificate ends. `due`: when to ask again.
    """

    pod_uid: str
    node: str
    state: GateState
    code: str = ""
    message: str = ""
    until: float | None = None
    certified_until: float | None = None
    due: float = 0.0

    @property
    def closed(self) -> bool:
        """Whether the node must be left."""
        return self.state in (GateState.STALE, GateState.FAILED)


def opened(pod_uid: str, node: str, until: float | None, certified_until: float, now: float) -> Proof:
    """After an exchange that went well: to be repeated at half of what it holds for."""
    ends = min(certified_until, until) if until is not None else certified_until
    due = now + max(1.0, (ends - now) / 2)
    return Proof(pod_uid, node, GateState.OPEN, "", "", until, certified_until, due)


def missed(before: Proof, code: str, message: str, *, judged: bool, now: float) -> Proof:
    """After one that did not. `judged`: somebody said no; otherwise nobody said anything.

    A lease that lasts is used to its end, so that a verifier's outage ends nobody early; only word that the node runs
    something else closes the gate at once.
    """
    lasting = before.until is not None and before.until > now
    if code in DAMNING or (judged and not lasting):
        state = GateState.FAILED
    elif before.until is not None and not lasting:
        state = GateState.STALE
    else:
        state = GateState.OPEN if lasting or before.state is GateState.OPEN else GateState.WAITING
    return Proof(
        before.pod_uid,
        before.node,
        state,
        code,
        message,
        before.until,
        before.certified_until,
        now + (WAIT_SECONDS if state is GateState.WAITING else RETRY_SECONDS),
    )
