"""Conditions as verdicts: what a reconcile found out, without clock or history."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .objects import Obj

State = Literal["True", "False", "Unknown"]

_MESSAGE_LIMIT = 4096


@dataclass(frozen=True)
class Verdict:
    """What a reconcile found out about one aspect."""

    type: str
    status: State
    reason: str
    message: str = ""


def yes(kind: str, reason: str, message: str = "") -> Verdict:
    return Verdict(kind, "True", reason, message)


def no(kind: str, reason: str, message: str = "") -> Verdict:
    return Verdict(kind, "False", reason, message)


def unknown(kind: str, reason: str, message: str = "") -> Verdict:
    return Verdict(kind, "Unknown", reason, message)


def not_ready(status: Obj, reason: str, message: str, *, provisioning: bool) -> Verdict:
    """Not ready: Unknown while it was never ready and is still on its way, False in every other case.

    `status` is the one that is stored now. An Unknown that was a False before would hide a failure.
    """
    conditions = status.get("conditions") or []
    before = next((entry for entry in conditions if entry.get("type") == "Ready"), None)
    first = before is None or before.get("status") == "Unknown"
    return unknown("Ready", reason, message) if provisioning and first else no("Ready", reason, message)


def progress(reason: str, message: str) -> tuple[Verdict, Verdict]:
    """(Reconciling, Stalled) of something that is on its way."""
    return yes("Reconciling", reason, message), no("Stalled", "Progressing")


def stall(reason: str, message: str) -> tuple[Verdict, Verdict]:
    """(Reconciling, Stalled) of something that waits for an edit or a repair."""
    return no("Reconciling", "Stalled"), yes("Stalled", reason, message)


def settled() -> tuple[Verdict, Verdict]:
    """(Reconciling, Stalled) of something that is as it should be."""
    return no("Reconciling", "Settled"), no("Stalled", "Settled")


def wire(verdicts: Iterable[Verdict]) -> list[Obj]:
    """Conditions for a status, sorted by type. Times and observedGeneration are added when it is written."""
    return [
        {
            "type": verdict.type,
            "status": verdict.status,
            "reason": verdict.reason,
            "message": shorten(verdict.message, _MESSAGE_LIMIT),
        }
        for verdict in sorted(verdicts, key=lambda verdict: verdict.type)
    ]


def shorten(text: str, limit: int) -> str:
    """Status fields are bounded; the head of a message says the most."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
