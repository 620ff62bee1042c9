"""Who is admitted, who may overtake whom and how often, and who gives way to whom."""

from __future__ import annotations

from schedule_world import World
from tenantry_engine.admission import LOADS, OVERTAKERS, PATIENCE
from tenantry_engine.preemption import LIMIT, victim
from tenantry_engine.sequence import Phase


def test_bulk_gives_its_slot_and_its_pages_to_fast() -> None:
    for pages in (100, 9):
        world = World(pages=pages, slots=2)
        bulk = [world.add("b", prompt=20, output=40, bulk=True) for _ in range(2)]
        while not all(s.phase is Phase.DECODE for s in bulk):
            world.step()
        fast = world.add("f", prompt=40, output=8)
        world.step()
        assert fast.phase is not Phase.WAITING
        assert [s.phase for s in bulk] == [Phase.DECODE, Phase.WAITING], "the youngest gives way"
        world.run()
        assert set(world.reasons.values()) == {"length"}


def test_bulk_does_not_give_way_for_ever() -> None:
    world = World(slots=1)
    bulk = world.add("b", output=30, bulk=True)
    for _ in range(200):
        world.add("f", output=2)
        world.step()
        if world.ended[bulk.id]:
            break
    assert world.ended[bulk.id]
    assert bulk.preempted == LIMIT


def test_nobody_gives_way_while_a_step_computes_its_prompt() -> None:
    world = World(slots=1)
    bulk = world.add("a", prompt=40, bulk=True)
    world.step()
    fast = world.add("b")
    world.step()  # the rest of bulk's prompt comes first
    assert (world.tokens[bulk.id], fast.phase) == (1, Phase.WAITING)
    world.step()
    assert (world.tokens[fast.id], bulk.phase) == (1, Phase.WAITING)


def test_a_tenant_above_its_share_gives_pages_to_one_within_its_own() -> None:
    world = World(pages=24, slots=12)
    flood = [world.add("flood", prompt=30, output=60) for _ in range(8)]
    for _ in range(12):
        world.step()
    assert world.pool.available < 4
    quiet = world.add("quiet", prompt=50, output=10)
    world.step()
    assert quiet.phase is not Phase.WAITING
    assert any(s.preempted for s in flood)
    assert not flood[0].preempted, "the youngest gives way"
    before = world.scheduler.preemptions
    while not world.ended[quiet.id]:
        world.step()
    assert world.scheduler.preemptions <= before + 1, "the two do not take turns at it"


def test_a_tenant_above_its_share_takes_no_more_while_another_lacks_pages() -> None:
    world = World(pages=12)
    world.add("above", prompt=100, output=60)  # one request, which nobody may take pages from
    for _ in range(5):
        world.step()
    lacks = world.add("lacks", prompt=70, output=10)
    world.step()
    more = world.add("above", prompt=8, output=4)
    small = world.add("small", prompt=8, output=4)
    for _ in range(6):
        world.step()
        assert lacks.phase is more.phase is Phase.WAITING
    assert world.ended[small.id], "who holds nothing may overtake"
    world.run()
    world.check_empty()
    assert set(world.reasons.values()) == {"length"}


def test_requests_for_other_adapters_pass_by_while_as_many_as_may_be_are_loaded() -> None:
    names = {f"a{i}": 1 for i in range(LOADS + 1)}
    world = World(slots=LOADS + 4, pages=200, **names)
    cold = [world.add(adapter=name, output=3) for name in names]
    others = [world.add(output=2) for _ in range(3 * OVERTAKERS)]
    for _ in range(40):
        world.step()
    assert len(world.adapters.loading) == LOADS
    last = cold[-1]
    assert last.phase is Phase.WAITING
    assert sum(world.ended[s.id] for s in others) == OVERTAKERS, "then the line waits"
    world.finish_load("a0")
    world.step()
    assert last.phase is Phase.LOADING, "what comes free is its own"
    world.run()
    world.check_empty()


def test_a_tenants_line_does_not_wait_for_the_loads_of_another() -> None:
    names = {f"a{i}": 1 for i in range(LOADS + 1)}
    world = World(slots=16, pages=200, **names)
    for name in names:
        world.add("cold", adapter=name)
    for _ in range(3 * OVERTAKERS):
        world.add("warm", output=2)
    for _ in range(40):
        world.step()
    assert sum(world.ended[s.id] for s in world.sequences if s.tenant == "warm") == 3 * OVERTAKERS


def test_patience_ends_with_time_too() -> None:
    world = World(pages=40)
    holder = world.add("holder", prompt=300, output=150)
    while holder.phase is not Phase.DECODE:
        world.step()
    large = world.add("large", prompt=400, output=1)
    early = world.add("small")
    for _ in range(PATIENCE + 1):
        world.step()
    assert world.ended[early.id]
    late = world.add("small")
    for _ in range(5):
        world.step()
    assert large.phase is late.phase is Phase.WAITING
    world.run()
    world.check_empty()


def test_a_request_that_often_gave_way_is_spared_as_long_as_there_is_another() -> None:
    world = World()
    first, last = (world.add(output=60) for _ in range(2))
    world.step()
    lines = world.scheduler._lines.values()
    assert victim(lines, world.pool) is last
    last.preempted = LIMIT
    assert victim(lines, world.pool) is first
    first.preempted = LIMIT
    assert victim(lines, world.pool) is last, "somebody has to"


def test_pages_are_weighed_by_the_weight_of_their_tenant() -> None:
    world = World()
    light = world.add("light", prompt=20, output=60)
    heavy = world.add("heavy", prompt=60, output=60, weight=4)
    for _ in range(5):
        world.step()
    assert len(light.pages) < len(heavy.pages) < 4 * len(light.pages)
    assert victim(world.scheduler._lines.values(), world.pool) is light


def test_a_load_that_fails_makes_room_for_another() -> None:
    names = {f"a{i}": 1 for i in range(2 * LOADS)}
    world = World(slots=16, pages=200, **names)
    for name in names:
        world.add(adapter=name)
    world.step()
    failing = list(world.adapters.loading)
    for name in failing:
        world.fail_load(name)
    world.step()
    assert len(failing) == LOADS
    assert set(world.adapters.loading) == set(names) - set(failing)


def test_a_request_for_an_adapter_that_is_being_loaded_waits_for_that_load() -> None:
    """It takes none of the loads that may be under way, and runs no sooner than the pages are filled."""
    names = {f"a{i}": 1 for i in range(LOADS)}
    world = World(slots=LOADS + 2, pages=200, **names)
    for name in names:
        world.add(adapter=name)
    world.step()
    second = world.add(adapter="a0")
    for _ in range(2):
        world.step()
        assert second.phase is Phase.LOADING
    world.finish_load("a0")
    world.step()
    assert world.tokens[second.id] == 1
