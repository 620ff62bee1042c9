"""Moves between places, step by step and by any sequence of events."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tenantry.placement import moves
from tenantry.placement.moves import GatewayView, Left, Phase, Place, Step, leaving, step

OLD = Place("old", "uid-old", "ns", ("old-fast-0",))
NEW = Place("new", "uid-new", "ns", ("new-fast-0",))


def left(phase: Phase) -> Left:
    return Left(OLD, phase, "then")


def follows(name: str = "g", **requests: int) -> GatewayView:
    return GatewayView(
        name, routes=frozenset({"uid-new"}), requests={f"uid-{k}": n for k, n in requests.items()}
    )


def behind(name: str = "g") -> GatewayView:
    return GatewayView(name, routes=frozenset({"uid-old"}))


SILENT = GatewayView("s", silent=True)


@pytest.mark.parametrize(
    ("phase", "elapsed", "gateways", "remains", "then", "says"),
    [
        (Phase.SWITCHING, 0, [follows(), behind("b")], None, Phase.SWITCHING, "gateway `b` still routes there"),
        (Phase.SWITCHING, 0, [follows(), SILENT], None, Phase.SWITCHING, "gateway `s` does not answer"),
        (Phase.SWITCHING, 0, [follows()], None, Phase.DRAINING, "every gateway follows"),
        (Phase.SWITCHING, 0, [], None, Phase.DRAINING, "every gateway follows"),
        (Phase.SWITCHING, moves.SWITCH_SECONDS, [behind(), SILENT], None, Phase.DRAINING, ""),
        (Phase.DRAINING, 0, [follows()], None, Phase.DRAINING, "0 requests are not over"),
        (Phase.DRAINING, 5, [follows(old=2), follows(old=1, new=7)], None, Phase.DRAINING, "3 requests"),
        (Phase.DRAINING, 5, [follows(new=7), SILENT], None, Phase.DRAINING, "`s` does not answer"),
        (Phase.DRAINING, 5, [follows(new=7)], None, Phase.EMPTYING, "no request runs there"),
        (Phase.DRAINING, moves.DRAIN_SECONDS, [follows(old=2), SILENT], None, Phase.EMPTYING, ""),
        (Phase.EMPTYING, 0, [], "two pods", Phase.EMPTYING, "two pods"),
        (Phase.EMPTYING, 0, [], None, None, "nothing is left there"),
    ],
)  # fmt: skip
def test_each_step(
    phase: Phase,
    elapsed: float,
    gateways: list[GatewayView],
    remains: str | None,
    then: Phase | None,
    says: str,
) -> None:
    found = step(left(phase), elapsed, gateways, remains, "now")
    assert (found.left.phase if found.left is not None else None) is then
    assert says in found.message
    assert not found.overdue
    if found.left is not None:
        assert found.left.since == ("then" if then is phase else "now")


def test_what_cannot_be_emptied_is_said_and_tried_on() -> None:
    late = step(left(Phase.EMPTYING), moves.EMPTY_SECONDS, [], "two pods", "now")
    assert late == Step(left(Phase.EMPTYING), "two pods", overdue=True)
    assert step(left(Phase.EMPTYING), moves.EMPTY_SECONDS, [], None, "now").left is None


def test_whoever_comes_back_has_not_left() -> None:
    gone = (left(Phase.DRAINING),)
    assert leaving(gone, [], ["new"], "now") == gone
    assert leaving(gone, [NEW], ["old"], "now") == (Left(NEW, Phase.SWITCHING, "now"),)
    assert leaving(gone, [OLD], ["new"], "now") == gone, "a place that is left already starts no second time"


@dataclass
class Simulation:
    """A tenant with one place for each tier, gateways that learn late, requests that take their time."""

    tiers: int = 3
    wanted: int = 0
    in_force: int = 0
    left: tuple[Left, ...] = ()
    now: int = 0
    ready: set[int] = field(default_factory=lambda: {0})
    holds: set[int] = field(default_factory=lambda: {0})
    sees: list[int] = field(default_factory=lambda: [0, 0])
    silent: set[int] = field(default_factory=set)
    requests: list[dict[int, int]] = field(default_factory=lambda: [{}, {}])
    stuck: bool = False

    def place(self, tier: int) -> Place:
        return Place(f"p{tier}", f"u{tier}", "ns")

    def views(self) -> list[GatewayView]:
        return [
            GatewayView(
                f"g{g}",
                g in self.silent,
                frozenset() if g in self.silent else frozenset({f"u{self.sees[g]}"}),
                {} if g in self.silent else {f"u{p}": n for p, n in self.requests[g].items()},
            )
            for g in range(2)
        ]

    def reconcile(self) -> None:
        """What the controller does, with nothing in memory: every call is one of a fresh process."""
        stored = self.left
        flips = self.wanted != self.in_force and self.wanted in self.ready
        self.holds.add(self.wanted)
        before = [self.place(self.in_force)] if flips else []
        if flips:
            self.in_force = self.wanted
        abandoned = [self.place(t) for t in self.holds - {self.in_force, self.wanted}]
        found = leaving(
            stored, [*before, *abandoned], [f"p{self.in_force}", f"p{self.wanted}"], str(self.now)
        )
        known = {(entry.place.pool, entry.phase) for entry in stored}
        result = []
        for entry in found:
            if (entry.place.pool, entry.phase) not in known:
                result.append(entry)
                continue
            tier = int(entry.place.pool[1:])
            elapsed = self.now - int(entry.since)
            if entry.phase is Phase.EMPTYING and not self.stuck:
                self.check_nobody_is_there(tier)
                self.holds.discard(tier)
            remains = "something" if tier in self.holds else None
            after = step(entry, elapsed, self.views(), remains, str(self.now)).left
            if after is not None:
                self.check_bounds(entry, after, elapsed, tier)
                result.append(after)
        self.left = tuple(result)

    def check_bounds(self, before: Left, after: Left, elapsed: float, tier: int) -> None:
        """A phase ends early only by what was seen."""
        if (before.phase, after.phase) == (
            Phase.SWITCHING,
            Phase.DRAINING,
        ) and elapsed < moves.SWITCH_SECONDS:
            assert not self.silent
            assert tier not in self.sees
        if (before.phase, after.phase) == (Phase.DRAINING, Phase.EMPTYING) and elapsed < moves.DRAIN_SECONDS:
            assert all(self.requests[g].get(tier, 0) == 0 for g in range(2) if g not in self.silent)

    def check_nobody_is_there(self, tier: int) -> None:
        assert tier not in (self.in_force, self.wanted)


OPS = st.one_of(
    st.tuples(st.just("edit"), st.integers(0, 2)),
    st.tuples(st.just("ready"), st.integers(0, 2)),
    st.tuples(st.just("broken"), st.integers(0, 2)),
    st.tuples(st.just("sync"), st.integers(0, 1)),
    st.tuples(st.just("silence"), st.integers(0, 1)),
    st.tuples(st.just("answer"), st.integers(0, 1)),
    st.tuples(st.just("begin"), st.integers(0, 1)),
    st.tuples(st.just("end"), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.sampled_from([1, 3, 61, 901])),
    st.tuples(st.just("stuck"), st.booleans()),
)


def play(simulation: Simulation, op: str, value: int) -> None:
    if op == "edit":
        simulation.wanted = value
    elif op == "ready":
        simulation.ready.add(value)
    elif op == "broken" and value != simulation.in_force:
        simulation.ready.discard(value)
    elif op == "sync":
        simulation.sees[value] = simulation.in_force
    elif op == "silence":
        simulation.silent.add(value)
    elif op == "answer":
        simulation.silent.discard(value)
    elif op == "begin":
        there = simulation.requests[value]
        there[simulation.sees[value]] = there.get(simulation.sees[value], 0) + 1
    elif op == "end":
        simulation.requests[value].clear()
    elif op == "wait":
        simulation.now += value
    elif op == "stuck":
        simulation.stuck = bool(value)


@given(st.lists(OPS, max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_sequence_ends_where_the_spec_says_and_empties_the_rest(ops: list[tuple[str, int]]) -> None:
    simulation = Simulation()
    for op, value in ops:
        play(simulation, op, value)
        before = replace(simulation)
        simulation.reconcile()
        serving = {f"p{simulation.in_force}"}
        assert not serving & {entry.place.pool for entry in simulation.left}, "what serves is not being left"
        assert simulation.in_force in (before.in_force, simulation.wanted)
        if simulation.in_force != before.in_force:
            assert simulation.in_force in simulation.ready, "only to a place that is ready"
    simulation.stuck = False
    simulation.silent.clear()
    simulation.ready = set(range(3))
    for _ in range(12):
        for gateway in range(2):
            simulation.sees[gateway] = simulation.in_force
            simulation.requests[gateway].clear()
        simulation.now += 3
        simulation.reconcile()
    assert simulation.in_force == simulation.wanted
    assert simulation.left == ()
    assert simulation.holds == {simulation.wanted}, "nothing of the tenant is anywhere else"
