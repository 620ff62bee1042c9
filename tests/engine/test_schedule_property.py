"""Random traffic on a simulated clock: pages add up, requests end once, nobody starves, tenants share as VTC says."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from schedule_world import World
from tenantry_engine.admission import PATIENCE
from tenantry_engine.chunk import StepSize
from tenantry_engine.sequence import Sequence

PAGES, SLOTS, STEP = 40, 6, 64


def arrive(world: World, draw: random.Random, now: float) -> Sequence:
    """A request of any kind. Prompts of a tenant often begin alike."""
    tenant = f"t{draw.randrange(5)}"
    common = [7] * draw.choice((0, 40, 64))
    prompt = common + [draw.randrange(3) for _ in range(draw.randint(1, 86))]
    return world.add(
        tenant,
        prompt=prompt,
        output=draw.randint(1, 60),
        stop_ids=draw.choice((frozenset(), frozenset({9}))),
        adapter=draw.choice((None, None, None, *world.adapters.pages)),
        cap=draw.randint(1, 4),
        weight=draw.randint(1, 3),
        bulk=draw.random() < 0.3,
        deadline=now + 40 if draw.random() < 0.2 else None,
        salt=None if draw.random() < 0.1 else f"salt of {tenant}",
    )


@pytest.mark.parametrize("overlaps", [False, True], ids=["in order", "one step ahead"])
@pytest.mark.parametrize("pages", [PAGES, 3 * PAGES])
@pytest.mark.parametrize("seed", range(12))
def test_anything_may_happen(seed: int, pages: int, overlaps: bool) -> None:
    draw = random.Random(seed)
    names = {f"a{i}": draw.randint(1, 8) for i in range(6)}
    world = World(pages, SLOTS, STEP, StepSize(target=0.1, ceiling=STEP), overlaps=overlaps, **names)
    scheduler, device = world.scheduler, world.device
    device.pace = lambda rows: (0.02 + 0.001 * rows) * draw.choice((1, 1, 1, 1.3, 6))
    due: dict[str, float] = {}  # loads and when they end
    stuck = 0
    for turn in range(250):
        now = device.now
        for _ in range(draw.choice((0, 0, 1, 2)) if turn < 200 else 0):
            if scheduler.waiting < 40:
                arrive(world, draw, now)
        live = list(scheduler.sequences())
        if live and draw.random() < 0.1:
            event = scheduler.abort(draw.choice(live).id)
            assert event is not None
            world.take([event])
        if draw.random() < 0.03:  # an adapter is unloaded: its requests end, and it goes
            name = draw.choice(list(names))
            for sequence in [s for s in scheduler.sequences() if s.adapter == name]:
                event = scheduler.abort(sequence.id, "unloaded")
                world.take([event] if event else [])
            world.pool.drop(name)
        if draw.random() < 0.05:
            world.pool.pin(draw.choice(list(names)), draw.random() < 0.5 and world.pool.pinned_pages() < 8)
        for name in list(world.adapters.loading):
            if now >= due.setdefault(name, now + draw.choice((0.0, 0.2, 2.0))):
                del due[name]
                if draw.random() < 0.05:
                    world.fail_load(name)
                else:
                    world.finish_load(name)
        world.take(scheduler.expire(now))
        if draw.random() < 0.02:
            device.fail_next = draw.choice(("run", "take"))
        stepped = world.turn()
        device.now += 0.01
        loads = bool(world.adapters.loading)
        stuck = stuck + 1 if not stepped and scheduler.running + scheduler.waiting and not loads else 0
        assert stuck < 2, "work waits, nothing loads, and no step runs"
    world.fail("abort")
    for name in list(world.adapters.loading):
        world.finish_load(name)
    world.check_empty()
    world.check_answers()
    assert len(world.ended) == len(world.sequences)
    assert (device.overlapped > 40) == overlaps, "steps must overlap for this to mean anything"
    if pages == PAGES:
        assert scheduler.preemptions > 0, "pages must run short for this to mean anything"
    else:
        assert scheduler.cached_tokens > 0, "the prefix cache must be in use for this to mean anything"


def test_nobody_starves() -> None:
    """Under a flood that never ends, of small requests with many adapters, every kind of request gets its turn."""
    draw = random.Random(5)
    world = World(PAGES, SLOTS, STEP, strict=False, **{f"a{i}": 3 for i in range(12)}, large=16)
    added: dict[str, int] = {}
    worst: Counter[str] = Counter()
    for turn in range(3000):
        while world.scheduler.waiting < 24:
            tenant = draw.choice(("flood", "flood", "flood", "other"))
            adapter = draw.choice((None, *[f"a{i}" for i in range(12)]))
            world.add(tenant, prompt=draw.randint(1, 40), output=draw.randint(1, 20), adapter=adapter)
        if turn % 150 == 0:
            for kind, more in {
                "long": {"prompt": 300, "output": 20},
                "large adapter": {"prompt": 100, "output": 5, "adapter": "large"},
                "bulk": {"prompt": 100, "output": 20, "bulk": True},
            }.items():
                added[world.add(kind, **more).id] = turn  # type: ignore[arg-type]
        for name in list(world.adapters.loading):
            if draw.random() < 0.3:
                world.finish_load(name)
        world.step()
        for name in [n for n in added if world.ended[n]]:
            kind = next(s.tenant for s in world.sequences if s.id == name)
            worst[kind] = max(worst[kind], turn - added.pop(name))
    assert set(worst) == {"long", "large adapter", "bulk"}
    assert all(3000 - turn < 4 * PATIENCE for turn in added.values()), added
    assert max(worst.values()) < 4 * PATIENCE, worst
    world.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pages", [PAGES, 400])
def test_service_of_backlogged_tenants_stays_within_the_bound_of_vtc(seed: int, pages: int) -> None:
    """|W_f - W_g| <= 2 max(w_in x longest input, w_out x output of a full batch), per weight (theorem 4.4)."""
    draw = random.Random(seed)
    world = World(pages, SLOTS, STEP, strict=False)
    weights = {"one": 1, "two": 2, "four": 4, "long": 1}
    bound = 2 * max(150, 2 * SLOTS * 60)
    start: dict[str, float] = {}
    for turn in range(2500):
        for tenant, weight in weights.items():
            line = world.scheduler._lines.get(tenant)
            for _ in range(3 - len(line.waiting) if line else 3):
                prompt = 150 if tenant == "long" else draw.randint(1, 100)
                output = draw.randint(1, 60) if tenant != "two" else 1
                world.add(tenant, prompt=prompt, output=output, weight=weight)
        world.step()
        if turn == 0:
            start = {tenant: world.scheduler.service(tenant) for tenant in weights}
        service = [world.scheduler.service(tenant) - start[tenant] for tenant in weights]
        assert max(service) - min(service) <= bound, (turn, dict(zip(weights, service, strict=True)))
    assert min(service) > 5 * bound, "it must run long enough for a drift to show"


def test_a_tenant_that_returns_neither_gains_nor_loses_by_having_been_away() -> None:
    world = World(400, SLOTS, STEP, strict=False)
    bound = 2 * 2 * SLOTS * 20

    def backlog(*tenants: str) -> None:
        for tenant in tenants:
            line = world.scheduler._lines.get(tenant)
            for _ in range(3 - len(line.waiting) if line else 3):
                world.add(tenant, prompt=60, output=20)

    for _ in range(600):
        backlog("a", "b")
        world.step()
    before = {tenant: world.scheduler.service(tenant) for tenant in "ab"}
    world.add("c", prompt=60, output=20)
    arrived = world.scheduler.service("c")
    assert min(before.values()) - bound <= arrived <= max(before.values()) + bound
    assert arrived > bound, "it must have been lifted for this to mean anything"
    for _ in range(600):
        backlog("a", "b", "c")
        world.step()
        gained = [world.scheduler.service(t) - before.get(t, arrived) for t in "abc"]
        assert max(gained) - min(gained) <= bound
