"""Status semantics, pure: what counts as a change, and which times are kept.

A status is written only when something other than a time changed. `lastTransitionTime` moves only when a condition's
status flips, `since` of a guarantee only when its state does; there are no heartbeats.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from .resources import Obj

# lists in a status whose entries carry a time: list -> (identity, state, time)
_TIMED = {
    "conditions": ("type", "status", "lastTransitionTime"),
    "isolation": ("guarantee", "state", "since"),
}


def timestamp(now: datetime | None = None) -> str:
    """A metav1.Time: UTC, whole seconds."""
    return (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(now: datetime | None = None) -> str:
    """A metav1.MicroTime: UTC, six digits."""
    return (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def without_times(status: Obj) -> Obj:
    """The status as it is compared: no times, timed lists in the order of their identities."""
    result = dict(status)
    for name, (identity, _, time) in _TIMED.items():
        if isinstance(status.get(name), list):
            entries = [{k: v for k, v in entry.items() if k != time} for entry in status[name]]
            result[name] = sorted(entries, key=lambda entry: str(entry.get(identity)))
    return result


def _without_empty(value: Any) -> Any:
    """Absent, null and empty are the same thing in a status."""
    if isinstance(value, dict):
        cleaned = {name: _without_empty(item) for name, item in value.items()}
        return {name: item for name, item in cleaned.items() if item not in (None, {}, [], "")}
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value


def same(left: Obj, right: Obj) -> bool:
    """Whether two statuses say the same, whatever their times."""
    return bool(_without_empty(without_times(left)) == _without_empty(without_times(right)))


def complete(status: Obj, generation: int, current: Obj, now: str) -> Obj:
    """The status to write: `status` with times and observedGeneration.

    `current` is the status that is stored now; `generation` is that of the spec which the status was computed from.
    """
    result = dict(status)
    for name, (identity, state, time) in _TIMED.items():
        if name not in status:
            continue
        before = {entry.get(identity): entry for entry in current.get(name) or []}
        entries = []
        for entry in status[name]:
            old = before.get(entry[identity])
            kept = old.get(time) if old is not None and old.get(state) == entry[state] else None
            extra = {"observedGeneration": generation} if name == "conditions" else {}
            entries.append({**entry, **extra, time: kept or now})
        result[name] = sorted(entries, key=lambda entry: str(entry[identity]))
    result["observedGeneration"] = generation
    return result
