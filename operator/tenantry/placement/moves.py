"""Moving a tenant from one place to another, pure: what serves meanwhile, and when the old place may be emptied.

A place is a pool with the replicas that serve the tenant there. A move has two halves. Until the new place can serve
everything that the old one serves, nothing changes for anybody (`Preparing`). Then one write of the Tenant's status
flips route, limits and tier in force, and notes the old place as left. A place that was left goes through

    Switching   some gateway's route still names it
    Draining    requests that began before are not over
    Emptying    what the tenant had there is taken away, until nothing is left

Each step is bounded but the last, which is never given up: a place that cannot be emptied is said, and tried on. All
that a step needs stands in the status, so whoever takes over goes on where another stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

SWITCH_SECONDS: Final = 60.0
"""A gateway that has not told by then that it follows the new route holds nobody up any longer."""
SETTLE_SECONDS: Final = 2.0
"""Draining lasts at least this long: no gateway counts a request between its arrival and its body's end."""
DRAIN_SECONDS: Final = 900.0
"""The longest that a gateway lets a request run; what is not over by then never will be."""
EMPTY_SECONDS: Final = 600.0
PREPARE_SECONDS: Final = 900.0
"""From then on the condition is `Stalled` instead of `Reconciling`; both are tried on."""


class Phase(StrEnum):
    """Where a move stands. `PREPARING` is of the new place, the others are of an old one."""

    PREPARING = "Preparing"
    SWITCHING = "Switching"
    DRAINING = "Draining"
    EMPTYING = "Emptying"


@dataclass(frozen=True)
class Place:
    """A pool as it served the tenant. `uid` tells it from a later pool of that name."""

    pool: str
    uid: str
    namespace: str
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True)
class Left:
    """A place that the tenant has left. `since`: when this phase began, as it stands in the status."""

    place: Place
    phase: Phase = Phase.SWITCHING
    since: str = ""


@dataclass(frozen=True)
class GatewayView:
    """What one gateway says of the tenant, by uid of a pool. `silent`: it did not answer."""

    name: str
    silent: bool = False
    routes: frozenset[str] = frozenset()
    requests: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """The place in its phase now, with a sentence. `overdue`: a person should look. `left` None: it is empty."""

    left: Left | None
    message: str
    overdue: bool = False


def leaving(
    stored: Sequence[Left], before: Iterable[Place], staying: Iterable[str], now: str
) -> tuple[Left, ...]:
    """The places that the tenant has left: those known as left, and those of `before`, which its route named.

    `staying` are the pools (by name) that its route or its placement names now: whoever comes back to a place has not
    left it.
    """
    kept = set(staying)
    found = {left.place.pool: left for left in stored if left.place.pool not in kept}
    for place in before:
        if place.pool not in kept:
            found.setdefault(place.pool, Left(place, Phase.SWITCHING, now))
    return tuple(found[pool] for pool in sorted(found))


def step(left: Left, elapsed: float, gateways: Sequence[GatewayView], remains: str | None, now: str) -> Step:
    """One step of a place that was left; called again with what was seen since.

    `elapsed`: seconds in the present phase. `remains`: what of the tenant is still there, None for nothing; it counts
    only in the last phase.
    """
    uid = left.place.uid
    silent = [view.name for view in gateways if view.silent]
    if left.phase is Phase.SWITCHING:
        unaware = [view.name for view in gateways if uid in view.routes]
        waiting = _names("still routes there", unaware) or _names("does not answer", silent)
        if waiting and elapsed < SWITCH_SECONDS:
            return Step(left, f"gateway {waiting}")
        return Step(_next(left, Phase.DRAINING, now), "every gateway follows the new route")
    if left.phase is Phase.DRAINING:
        running = sum(view.requests.get(uid, 0) for view in gateways)
        if elapsed < SETTLE_SECONDS or (running and elapsed < DRAIN_SECONDS):
            return Step(left, f"{running} requests are not over")
        if silent and elapsed < SWITCH_SECONDS:
            return Step(left, f"gateway {_names('does not answer', silent)}")
        return Step(_next(left, Phase.EMPTYING, now), "no request runs there")
    if remains is None:
        return Step(None, "nothing is left there")
    return Step(left, remains, overdue=elapsed >= EMPTY_SECONDS)


def _next(left: Left, phase: Phase, now: str) -> Left:
    return replace(left, phase=phase, since=now)


def _names(what: str, gateways: Sequence[str]) -> str:
    if not gateways:
        return ""
    more = f" and {len(gateways) - 3} more" if len(gateways) > 3 else ""
    return f"{', '.join(f'`{name}`' for name in gateways[:3])}{more} {what}"
