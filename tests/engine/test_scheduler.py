"""The scheduler on a simulated clock: pages add up, nobody starves, tenants share, every way out releases."""

from __future__ import annotations

from collections import Counter

import pytest
from schedule_world import World
from tenantry_engine.chunk import Load, StepSize
from tenantry_engine.sequence import Phase


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    world = World()
    short = world.add(output=20)
    world.step()
    long = world.add(prompt=100, output=2)
    rows = [world.step() for _ in range(4)]
    assert rows == [32, 32, 32, 8]  # 31 of the prompt beside one decode, three times, then the rest
    assert world.tokens[short.id] == 5
    assert world.tokens[long.id] == 1


def test_a_chunk_beside_a_running_request_is_as_large_as_the_time_allows() -> None:
    size = StepSize(target=0.1, ceiling=64)
    world = World(step_tokens=64, size=size)
    world.add(output=20)
    world.step(seconds=1.0)  # a slow machine
    running = Load.of(8, 1)
    room = size.room(running, decoding=running, start=0)
    world.add(prompt=100, output=2)
    assert world.step(seconds=1.0) == 1 + room < 20


@pytest.mark.parametrize(
    "crowd", [("flood",), ("flood", "another flood"), tuple(f"calm-{i}" for i in range(15))]
)
def test_a_flood_does_not_make_the_tokens_of_a_small_tenant_rare(crowd: tuple[str, ...]) -> None:
    """Beside tenants that ask for little, or for as much each as it does, steps are filled up to the target."""
    world = World(pages=200, slots=16, step_tokens=256, size=StepSize(target=0.2, ceiling=256), strict=False)
    victim = world.add("victim", prompt=16, output=4)
    beside: list[float] = []  # steps with a token of the victim and prompts, over a full one without any
    others: list[int] = []  # rows in these
    for _ in range(600):
        for tenant in crowd:
            line = world.scheduler._lines.get(tenant)
            more = (16 if "flood" in tenant else 1) - (len(line.waiting) + len(line.admitted) if line else 0)
            for _ in range(more):
                world.add(tenant, prompt=64, output=24, cap=15 // min(len(crowd), 2))
        if world.ended[victim.id]:
            victim = world.add("victim", prompt=64, output=48, cap=15)
        works = world.plan()
        decoding = [w for w in works if w.sequence.phase is Phase.DECODE]
        seconds = 0.05 + 0.001 * sum(w.count for w in works)
        if len(works) > len(decoding) and victim in {w.sequence for w in decoding}:
            beside.append(seconds / 0.066)
            others.append(len(decoding) - 1)
        world.complete(works, seconds=seconds)
    assert len(beside) > 50
    typical, beside_it = (sorted(some)[len(some) // 2] for some in (beside, others))
    assert typical <= 1.16 if "flood" in crowd[0] else typical >= 1.8
    assert beside_it >= 6, "who floods keeps most of what it has"


def test_a_request_waits_for_its_adapter_without_holding_up_others() -> None:
    world = World(a=4)
    first = world.add(adapter="a")
    second = world.add()
    world.step()
    assert first.phase is Phase.LOADING
    assert world.tokens[second.id] == 1
    world.finish_load("a")
    world.step()
    assert world.tokens[first.id] == 1


def test_nothing_is_held_half() -> None:
    """Two requests that each need most of the pool: one runs, the other holds nothing."""
    world = World(pages=10, a=4, b=4)
    one, two = world.add(prompt=64, adapter="a"), world.add(prompt=64, adapter="b")
    world.step()
    assert one.pages
    assert two.phase is Phase.WAITING
    assert not two.pages
    assert not world.pool.holds("b")
    world.run()
    assert world.ended == {one.id: 1, two.id: 1}


def test_a_request_takes_no_page_that_it_cannot_fill() -> None:
    world = World(pages=2)
    one = world.add(prompt=20, output=12)
    world.run()
    assert world.ended[one.id] == 1


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    world = World(pages=12, slots=8)
    for _ in range(8):
        world.add(prompt=10, output=6)
    world.step()
    large = world.add("other", prompt=150, output=2)
    for _ in range(60):
        world.add(prompt=10, output=6)
        world.step()
        if world.ended[large.id]:
            break
    assert world.ended[large.id] == 1


def test_cap_of_a_tenant() -> None:
    world = World(slots=8)
    for _ in range(6):
        world.add("a", cap=2, output=50)
    other = world.add("b", output=50)
    world.step()
    assert world.scheduler.running == 3
    assert other.phase is not Phase.WAITING


def test_first_in_first_out_inside_a_tenant() -> None:
    world = World(slots=1)
    ids = [world.add(output=2).id for _ in range(5)]
    order = []
    while len(order) < 5:
        world.step()
        order += [i for i in ids if world.ended[i] and i not in order]
    assert order == ids


def test_a_flood_does_not_delay_a_neighbour() -> None:
    world = World(slots=4)
    for _ in range(50):
        world.add("flood", prompt=60, output=30, cap=2)
    for _ in range(20):
        world.step()
    quiet = world.add("quiet", prompt=30, output=5)
    steps = 0
    while not world.tokens[quiet.id]:
        world.step()
        steps += 1
    assert steps <= 2


def test_service_follows_weights() -> None:
    world = World(slots=12, pages=2000)
    weights = {"one": 1, "two": 2, "four": 4}
    for tenant, weight in weights.items():
        for _ in range(400):
            world.add(tenant, prompt=200, output=1, weight=weight)
    for _ in range(600):
        world.step()
    share = {t: world.served[t] / w for t, w in weights.items()}
    assert max(share.values()) <= 1.05 * min(share.values()), world.served


def test_idling_earns_no_credit() -> None:
    world = World(slots=2, pages=500)
    for _ in range(100):
        world.add("busy", prompt=100, output=1)
    world.add("idle", prompt=10, output=1)
    for _ in range(100):
        world.step()
    for _ in range(100):
        world.add("idle", prompt=100, output=1)
    before = Counter(world.served)
    for _ in range(60):
        world.step()
    gained = {t: world.served[t] - before[t] for t in ("busy", "idle")}
    assert gained["idle"] <= 1.2 * gained["busy"], gained


def test_a_newcomer_stands_with_the_least_of_those_that_want_prompt_tokens() -> None:
    world = World(step_tokens=32)
    for tenant in "ab":
        world.add(tenant, prompt=320, output=1)
    for _ in range(3):
        world.step()
    assert (world.scheduler.service("a"), world.scheduler.service("b")) == (64, 32), "a was served last"
    world.add("c")
    assert world.scheduler.service("c") == 32


def test_where_nobody_wants_prompt_tokens_a_newcomer_stands_with_the_last_that_was_given_some() -> None:
    world = World(step_tokens=128)
    world.add("decodes", prompt=8, output=50)
    world.step()
    world.add("last", prompt=100, output=1)
    given = world.scheduler.service("last") + 100 + 2
    for _ in range(4):
        world.step()
    assert world.scheduler.service("decodes") < 50
    world.add("new")
    assert world.scheduler.service("new") == given


def test_an_empty_queue_has_no_memory() -> None:
    world = World()
    for number in range(500):
        world.add(f"t{number}", output=1)
        world.run()
    assert len(world.scheduler._fair._accounts) <= 2
    assert not world.scheduler._lines


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.LOADING, Phase.PREFILL, Phase.DECODE])
def test_abort_in_every_phase_releases_everything_once(phase: Phase) -> None:
    world = World(a=4, slots=1)
    if phase is Phase.WAITING:
        world.add(output=100)
        world.step()
    sequence = world.add("x", prompt=100, output=10, adapter="a")
    for _ in range(30):
        if sequence.phase is phase:
            break
        world.step()
        if world.adapters.loading and phase is not Phase.LOADING:
            world.finish_load("a")
    assert sequence.phase is phase
    event = world.scheduler.abort(sequence.id)
    assert event is not None
    assert event.finish == "abort"
    assert world.scheduler.abort(sequence.id) is None
    if world.adapters.loading:
        world.finish_load("a")
    world.scheduler.abort_all("abort")
    world.pool.check()
    counts = world.pool.counts()
    assert counts.kv == 0
    assert counts.adapter == 0
    assert world.scheduler.running == world.scheduler.waiting == 0


def test_outstanding_tokens_are_what_is_left_to_do() -> None:
    world = World(slots=1)
    world.add(prompt=40, output=10)
    world.add(prompt=20, output=5)
    left = [world.scheduler.outstanding_tokens]
    for _ in range(3):  # 32 tokens of the first prompt; the rest of it; one token of output
        world.step()
        left.append(world.scheduler.outstanding_tokens)
    assert left == [75, 43, 35, 34]
    world.run()
    assert world.scheduler.outstanding_tokens == 0


def test_a_request_ends_when_its_deadline_has_come() -> None:
    world = World()
    late, other = world.add(output=50, deadline=5.0), world.add(output=50)
    world.step()
    assert world.scheduler.expire(4.9) == []
    [event] = world.scheduler.expire(5.0)
    assert (event.sequence, event.finish, event.token) == (late, "deadline", None)
    assert list(world.scheduler.sequences()) == [other]
    world.check()


def test_preemption_keeps_seniority_and_charges_once() -> None:
    world = World(pages=10, slots=4)
    sequences = [world.add(prompt=20, output=40) for _ in range(3)]
    order: list[str] = []
    for _ in range(2000):
        world.step()
        order += [s.id for s in sequences if world.ended[s.id] and s.id not in order]
        if len(order) == 3:
            break
    assert world.scheduler.preemptions > 0
    assert order == [s.id for s in sequences]
    assert all(world.tokens[s.id] == 40 for s in sequences)


def test_charges_are_for_uncached_input_and_output_once() -> None:
    world = World(pages=10, slots=4)
    for _ in range(3):
        world.add("t", prompt=20, output=40)
    charged = Counter[str]()
    charge = world.scheduler._fair.charge

    def count(tenant: str, inputs: int, outputs: int, *, prompt: bool = False) -> None:
        charged["in"] += inputs
        charged["out"] += outputs
        charge(tenant, inputs, outputs, prompt=prompt)

    world.scheduler._fair.charge = count  # type: ignore[method-assign]
    world.run()
    assert world.scheduler.preemptions > 0
    assert charged == {"in": 60, "out": 120}
