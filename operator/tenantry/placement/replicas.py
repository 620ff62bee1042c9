"""Bounded-load rendezvous hashing of tenants onto the replicas of a lane.

Every tenant ranks the replicas by a hash of (tenant, replica) and takes the first `count` of them (Thaler and
Ravishankar, 1998), in as many zones as it can. No replica takes more than `ENTER` times the mean load while another has
room (Mirrokni, Thorup, Zadimoghaddam, 2018), and none keeps more than `BOUND` times. What a tenant has, it keeps: it
moves only when its replica is gone or lost, above the bound or full, or when a replica of its own ranking or of another
zone stands clearly emptier, so that a joining replica draws its fair share and nothing flaps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from . import reasons
from .load import NO_LOAD, Limits, Load, Wish, count, load_of
from .standing import PATIENCE_SECONDS, Standing

BOUND: Final = 1.25
"""Above so many times the mean load, tenants leave."""
ENTER: Final = 1.15
"""Up to so many times the mean load, tenants come. Lower than BOUND, so that who came does not leave at once."""
PULL: Final = 0.8
"""A tenant that could stay moves only where the load, it included, is at most so much of the load that it leaves."""

_LOST = f"not ready for {PATIENCE_SECONDS / 60:.0f} minutes"
_FULL, _LOAD, _ZONES, _AWAY, _DRAWN, _GONE = "full", "load", "zones", "not ready", "emptier ones came", "gone"


@dataclass(frozen=True)
class Replica:
    """A replica as placement sees it. `zone` empty: unknown. `pages` bounds what is pinned there; None: unknown."""

    name: str
    zone: str = ""
    standing: Standing = Standing.READY
    pages: int | None = None


@dataclass(frozen=True)
class Assignment:
    """`replicas` sorted by name; empty when nothing takes the tenant. `too_large`: not even an empty replica would.

    A tenant that grew too large where it is stays on what it has: what is served goes on.
    """

    replicas: tuple[str, ...]
    reason: str
    too_large: bool = False


def ranking(tenant: str, replicas: Iterable[str]) -> list[str]:
    """The replicas in the tenant's own order."""
    return sorted(replicas, key=lambda replica: (-_score(tenant, replica), replica))


def place(
    wish: Wish,
    replicas: Sequence[Replica],
    loads: Mapping[str, Load],
    previous: Sequence[str],
    limits: Limits,
) -> Assignment:
    """Replicas for one tenant, given what all *other* tenants put on each replica."""
    objection = reasons.too_large(wish, limits, [replica.pages for replica in replicas])
    seating = _Seating(wish, replicas, loads, previous, limits)
    if objection:
        return Assignment(tuple(sorted(seating.seats)), objection, too_large=True)
    return seating.decide()


def place_all(
    wishes: Iterable[Wish],
    replicas: Sequence[Replica],
    previous: Mapping[str, Sequence[str]],
    limits: Limits,
) -> dict[str, Assignment]:
    """Every tenant in turn, by name: what the controllers do one key at a time."""
    present = {replica.name for replica in replicas}
    ordered = sorted(wishes, key=lambda wish: wish.tenant)
    kept = {wish.tenant: [r for r in previous.get(wish.tenant, ()) if r in present] for wish in ordered}
    loads = load_of((wish.load, kept[wish.tenant]) for wish in ordered)
    result = {}
    for wish in ordered:
        count(loads, wish.load, kept[wish.tenant], -1)
        found = result[wish.tenant] = place(wish, replicas, loads, previous.get(wish.tenant, ()), limits)
        count(loads, wish.load, found.replicas)
    return result


def _score(tenant: str, replica: str) -> int:
    key = f"{len(tenant)}:{tenant}{replica}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


class _Seating:
    """One decision. `seats` are what the tenant has so far; each step changes them and notes what it left and why."""

    def __init__(
        self,
        wish: Wish,
        replicas: Sequence[Replica],
        loads: Mapping[str, Load],
        previous: Sequence[str],
        limits: Limits,
    ) -> None:
        self.wish = wish
        self.limits = limits
        self.known = {replica.name: replica for replica in replicas}
        self.order = ranking(wish.tenant, self.known)
        self.rank = {name: place for place, name in enumerate(self.order)}
        self.others = {name: loads.get(name, NO_LOAD) for name in self.order}
        self.usable = [
            name for name in self.order if self.known[name].standing is not Standing.LOST
        ] or self.order
        self.count = min(wish.count, len(self.usable))
        total = sum(load.weight for load in self.others.values()) + wish.weight * self.count
        self.mean = total / max(1, len(self.usable))
        self.had = frozenset(previous)
        self.seats = [name for name in self.usable if name in self.had][: self.count]
        self.left = {name: self._absence(name) for name in previous if name not in self.seats}

    def decide(self) -> Assignment:
        self._leave()
        self._draw()
        self._fill()
        self._spread()
        if not self.seats:
            return Assignment((), reasons.no_room(self.wish, self.limits, list(self.others.values())))
        return Assignment(tuple(sorted(self.seats)), reasons.why(self._story()))

    # the steps

    def _leave(self) -> None:
        """Seats on a replica that is above the bound or full, where another takes the tenant."""
        for seat in list(self.seats):
            full = not self._has_room(seat)
            if not full and self._load(seat) <= max(BOUND * self.mean, self.wish.weight):
                continue
            better = [name for name in self._candidates() if full or self._is_clearly_emptier(name, seat)]
            fitting = [name for name in better if self._fits(name)] or (better if full else [])
            if fitting:
                self._move(
                    seat,
                    min(fitting, key=lambda name: self._preference(name, seat)),
                    _FULL if full else _LOAD,
                )

    def _draw(self) -> None:
        """Replicas that rank high but came later, or were loaded when the tenant came."""
        if len(self.seats) < self.count:
            return
        natural = self._natural(self.usable)
        for name in natural:
            strangers = [seat for seat in self.seats if seat not in natural]
            if name in self.seats or not strangers or not self._may_enter(name):
                continue
            worst = max(strangers, key=lambda seat: (self._load(seat), self.rank[seat]))
            narrower = self._zones_with(name, worst) < self._zones(self.seats)
            if self._is_clearly_emptier(name, worst) and not narrower:
                self._move(worst, name, _DRAWN)

    def _fill(self) -> None:
        """Missing seats: where the load allows it, what is ready first, then another zone, then the hash order."""
        while len(self.seats) < self.count:
            candidates = [n for n in self.usable if n not in self.seats and self._has_room(n)]
            if not candidates:
                return
            self.seats.append(min(candidates, key=self._preference))

    def _spread(self) -> None:
        """One seat of a zone that has two, to a zone that has none. A seat whose zone is unknown may be in any."""
        if self._zones(self.seats) >= min(len(self.seats), self._zones(self.usable)):
            return
        if any(not self.known[seat].zone for seat in self.seats):
            return
        worst_first = sorted(self.seats, key=lambda seat: (-self._load(seat), -self.rank[seat]))
        for seat in worst_first:
            wider = [
                name
                for name in self._candidates()
                if self._fits(name) and self._zones_with(name, seat) > self._zones(self.seats)
            ]
            if wider:
                self._move(seat, min(wider, key=lambda name: self.rank[name]), _ZONES)
                return

    def _move(self, seat: str, to: str, cause: str) -> None:
        self.seats[self.seats.index(seat)] = to
        self.left.pop(to, None)
        if seat in self.had:
            self.left[seat] = cause

    # what is known of a replica

    def _load(self, name: str) -> int:
        """With this tenant on it."""
        return self.others[name].weight + self.wish.weight

    def _fits(self, name: str) -> bool:
        return self._load(name) <= max(ENTER * self.mean, self.wish.weight)

    def _is_clearly_emptier(self, name: str, seat: str) -> bool:
        return self._load(name) <= PULL * self._load(seat)

    def _has_room(self, name: str) -> bool:
        load, limits, wish = self.others[name], self.limits, self.wish
        budget = self.known[name].pages
        return (
            load.tenants < limits.tenants
            and (not wish.adapters or load.adapters + wish.adapters <= limits.adapters)
            and (budget is None or not wish.pages or load.pages + wish.pages <= budget)
        )

    def _may_enter(self, name: str) -> bool:
        return self.known[name].standing is Standing.READY and self._has_room(name)

    def _candidates(self) -> list[str]:
        return [name for name in self.usable if name not in self.seats and self._may_enter(name)]

    def _preference(self, name: str, seat: str | None = None) -> tuple[bool, int, int, bool, int]:
        """Smaller is better; in the place of `seat`, or beside all seats."""
        fits = self._fits(name)
        beside = [other for other in self.seats if other != seat]
        narrow = self._zones([*beside, name]) <= self._zones(beside)
        return (not fits, self.known[name].standing, 0 if fits else self._load(name), narrow, self.rank[name])

    # zones

    def _zones(self, names: Iterable[str]) -> int:
        return len({self.known[name].zone for name in names} - {""})

    def _zones_with(self, name: str, instead_of: str) -> int:
        return self._zones([name, *(seat for seat in self.seats if seat != instead_of)])

    def _natural(self, names: Sequence[str]) -> list[str]:
        """The first of the hash order, one of each zone before a second."""
        seen: set[str] = set()
        fresh: list[str] = []
        rest: list[str] = []
        for name in names:
            zone = self.known[name].zone
            (rest if zone and zone in seen else fresh).append(name)
            seen.add(zone)
        return [*fresh, *rest][: self.count]

    # words

    def _absence(self, name: str) -> str:
        if name not in self.known:
            return _GONE
        return _LOST if self.known[name].standing is Standing.LOST else f"{self.wish.count} wanted"

    def _obstacle(self, name: str) -> str:
        standing = self.known[name].standing
        if standing is Standing.LOST:
            return _LOST
        if not self._has_room(name):
            return _FULL
        if not self._fits(name):
            return _LOAD
        return _AWAY if standing is Standing.AWAY else ""

    def _story(self) -> reasons.Story:
        natural = self._natural(self.order)
        passed = {name: self._obstacle(name) for name in natural if name not in self.seats}
        bound = BOUND * self.mean
        crowd = len(self.order) > self.count and any(self.others[seat].tenants for seat in self.seats)
        return reasons.Story(
            chosen=len(self.seats),
            replicas=len(self.order),
            wanted=self.wish.count,
            zones=self._zones(self.seats),
            first=set(natural) == set(self.seats),
            passed={name: cause for name, cause in passed.items() if cause and name not in self.left},
            left=self.left,
            heavy=reasons.heavy(self.wish, self.mean) if crowd and self.wish.weight > bound else "",
        )
