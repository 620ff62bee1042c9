"""Limits, queue and fairness as clients meet them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from gateway_fakes import Behaviour
from gateway_world import chat, error_of, until

if TYPE_CHECKING:
    from gateway_world import World

URL = "/v1/chat/completions"


def slow(world: World, seconds: float, tokens: int = 1) -> None:
    async def each(_index: int) -> None:
        await asyncio.sleep(seconds)

    for engine in world.engines:
        engine.behaviour = Behaviour(tokens=tokens, each=each)


def assert_shed(answer: httpx.Response, status: int, code: str) -> None:
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)
    assert int(answer.headers["retry-after"]) >= 1
    assert "x-ratelimit-remaining-tokens" in answer.headers


async def test_parallel_requests_cannot_pass_the_token_limit_together(world: World) -> None:
    slow(world, 0.05, tokens=10)
    world.put(
        "acme", limits={"tokensPerMinute": 500, "maxInFlight": 100, "maxQueued": 100, "maxOutputTokens": 10}
    )
    client = world.http("acme")
    answers = await asyncio.gather(*(client.post(URL, json=chat(max_tokens=10)) for _ in range(80)))
    served = [answer for answer in answers if answer.status_code == 200]
    spent = sum(answer.json()["usage"]["total_tokens"] for answer in served)
    assert served
    assert spent <= 500 + 500 / 60 * 3
    for answer in answers:
        if answer.status_code != 200:
            assert_shed(answer, 429, "rate_tokens")
    await world.settled()
    assert spent == sum(row["input_tokens"] + row["output_tokens"] for row in await world.rows())


async def test_what_is_reserved_and_not_used_comes_back(world: World) -> None:
    world.put("acme", limits={"tokensPerMinute": 1000, "maxOutputTokens": 900})
    client = world.http("acme")
    answers = [await client.post(URL, json=chat()) for _ in range(10)]
    assert [a.status_code for a in answers] == [200] * 10, "each reserves 900 and uses 6"
    left = [int(a.headers["x-ratelimit-remaining-tokens"]) for a in answers]
    assert 930 <= left[-1] <= left[0] <= 995
    assert answers[0].headers["x-ratelimit-limit-tokens"] == "1000"


async def test_over_the_cap_requests_wait_and_are_served(world: World) -> None:
    slow(world, 0.02)
    world.put("acme", limits={"maxInFlight": 2, "maxQueued": 50})
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, sum(engine.running() for engine in world.engines))
            await asyncio.sleep(0.002)

    watcher = asyncio.create_task(watch())
    client = world.http("acme")
    answers = await asyncio.gather(*(client.post(URL, json=chat()) for _ in range(20)))
    watcher.cancel()
    assert [a.status_code for a in answers] == [200] * 20
    assert most == 2


async def test_the_queue_is_bounded_and_a_flood_is_shed_with_a_reason(world: World) -> None:
    slow(world, 0.3)
    world.put("acme", limits={"maxInFlight": 1, "maxQueued": 3})
    client = world.http("acme")
    answers = await asyncio.gather(*(client.post(URL, json=chat()) for _ in range(10)))
    assert sorted(a.status_code for a in answers) == [200] * 4 + [429] * 6
    for answer in answers:
        if answer.status_code == 429:
            assert_shed(answer, 429, "queue_full")
    with pytest.raises(openai.RateLimitError):
        await asyncio.gather(*(world.client("acme").chat.completions.create(**chat()) for _ in range(6)))


async def test_what_is_wrong_never_queues(world: World) -> None:
    """A model that the tenant has not, or a field that no route takes, is told while all others wait."""
    free = asyncio.Event()

    async def each(_index: int) -> None:
        await free.wait()

    for engine in world.engines:
        engine.behaviour = Behaviour(tokens=1, each=each)
    world.put("acme", limits={"maxInFlight": 1, "maxQueued": 1})
    client = world.http("acme")
    waiting = [asyncio.create_task(client.post(URL, json=chat())) for _ in range(2)]
    await until(lambda: world.gateway.dispatcher.queued() == 1)
    for body, status in (({"model": "nowhere"}, 404), ({"bogus": 1}, 400), ({"max_tokens": 0}, 400)):
        assert (await client.post(URL, json={**chat(), **body})).status_code == status
    assert (await client.post(URL, json=chat())).status_code == 429
    free.set()
    assert [(await task).status_code for task in waiting] == [200, 200]


async def test_without_a_queue_concurrency_is_the_reason(world: World) -> None:
    slow(world, 0.2)
    world.put("acme", limits={"maxInFlight": 2, "maxQueued": 0})
    client = world.http("acme")
    answers = await asyncio.gather(*(client.post(URL, json=chat()) for _ in range(5)))
    assert sorted(a.status_code for a in answers) == [200, 200, 429, 429, 429]
    assert_shed(next(a for a in answers if a.status_code == 429), 429, "concurrency")


async def test_requests_per_minute(world: World) -> None:
    world.put("acme", limits={"requestsPerMinute": 3})
    client = world.http("acme")
    answers = [await client.post(URL, json=chat()) for _ in range(4)]
    assert [a.status_code for a in answers] == [200, 200, 200, 429]
    assert_shed(answers[3], 429, "rate_requests")
    assert 15 <= int(answers[3].headers["retry-after"]) <= 20


async def test_what_can_never_fit_is_refused_and_not_shed(world: World) -> None:
    world.put("acme", limits={"tokensPerMinute": 50, "maxOutputTokens": 100, "maxInFlight": 3})
    client = world.http("acme")
    for body, param in (
        (chat(max_tokens=60), "max_tokens"),
        (chat(max_tokens=101), "max_tokens"),
        (chat(n=4), "n"),
        (chat("w " * 2100), "messages"),
    ):
        answer = await client.post(URL, json=body)
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)
        assert "retry-after" not in answer.headers
    assert not world.engines[0].calls
    assert not world.engines[1].calls


async def test_sequences_count_as_many(world: World) -> None:
    slow(world, 0.1)
    world.put("acme", limits={"maxInFlight": 4, "maxQueued": 0})
    client = world.http("acme")
    first = asyncio.create_task(client.post(URL, json=chat(n=3)))
    await until(lambda: sum(engine.running() for engine in world.engines) == 1)
    assert_shed(await client.post(URL, json=chat(n=2)), 429, "concurrency")
    assert (await client.post(URL, json=chat())).status_code == 200
    assert (await first).status_code == 200


async def test_a_used_up_month_is_refused(world: World) -> None:
    world.put("acme", limits={"monthlyTokens": 130})
    client = world.http("acme")
    assert (await client.post(URL, json=chat(max_tokens=20))).status_code == 200
    answer = await client.post(URL, json=chat(max_tokens=100))
    assert_shed(answer, 429, "budget")


async def test_a_busy_pool_is_not_the_tenants_fault(world: World) -> None:
    slow(world, 60)
    for engine in world.engines:
        engine.slots = 1
    await until(lambda: all(r.load.slots == 1 for r in world.gateway.replicas.all()))
    world.put("other", limits={"maxQueued": 0})
    holders = [asyncio.create_task(world.http("acme").post(URL, json=chat())) for _ in range(2)]
    await until(lambda: sum(engine.running() for engine in world.engines) == 2)
    assert_shed(await world.http("other").post(URL, json=chat()), 503, "no_capacity")
    for holder in holders:
        holder.cancel()
    await world.settled()


async def test_a_flood_of_one_tenant_delays_only_that_tenant(world: World) -> None:
    slow(world, 0.02)
    for engine in world.engines:
        engine.slots = 4
    await until(lambda: all(r.load.slots == 4 for r in world.gateway.replicas.all()))
    world.put("flood", limits={"maxInFlight": 100, "maxQueued": 1000})
    world.put("calm", limits={"maxInFlight": 4})

    async def calm() -> list[float]:
        client, waits = world.http("calm"), []
        for _ in range(15):
            began = time.monotonic()
            assert (await client.post(URL, json=chat())).status_code == 200
            waits.append(time.monotonic() - began)
        return sorted(waits)

    alone = await calm()
    limits = httpx.Limits(max_connections=200)
    flooder = httpx.AsyncClient(base_url=world.url, headers={"authorization": f"Bearer {world.keys['flood']}"},
                                timeout=60, limits=limits)  # fmt: skip
    world.clients.append(flooder)
    flood = [asyncio.create_task(flooder.post(URL, json=chat())) for _ in range(150)]
    await until(lambda: world.gateway.dispatcher.queued() > 80)
    queued = world.gateway.dispatcher.queued()
    flooded = await calm()
    # First come, first served would make each request wait for the whole backlog: 1 s at the start.
    assert flooded[7] < alone[7] + 0.25, (alone, flooded, queued)
    assert all(answer.status_code == 200 for answer in await asyncio.gather(*flood))
    await world.settled()


async def test_weights_share_a_backlogged_lane(world: World) -> None:
    slow(world, 0.01)
    for engine in world.engines:
        engine.slots = 2
    await until(lambda: all(r.load.slots == 2 for r in world.gateway.replicas.all()))
    for name, weight in (("one", 1), ("three", 3)):
        world.put(name, weight=weight, limits={"maxInFlight": 100, "maxQueued": 1000})
    ends: list[str] = []

    async def ask(client: httpx.AsyncClient, name: str) -> None:
        assert (await client.post(URL, json=chat("x " * 100))).status_code == 200
        ends.append(name)

    clients = {name: world.http(name) for name in ("one", "three")}
    tasks = [asyncio.create_task(ask(clients[name], name)) for _ in range(60) for name in clients]
    await asyncio.gather(*tasks)
    half = ends[10:60]
    assert 1.8 <= half.count("three") / half.count("one") <= 4.5


async def test_a_tenant_suspended_while_it_waits_is_refused(world: World) -> None:
    slow(world, 0.3)
    world.put("acme", limits={"maxInFlight": 1})
    client = world.http("acme")
    tasks = [asyncio.create_task(client.post(URL, json=chat())) for _ in range(3)]
    await until(lambda: world.gateway.dispatcher.queued() == 2)
    world.put("acme", suspend=True)
    answers = await asyncio.gather(*tasks)
    assert sorted(a.status_code for a in answers) == [200, 403, 403]
    assert (await client.post(URL, json=chat())).status_code == 403


async def test_who_makes_others_wait_keeps_to_its_share_of_each_replica(world: World) -> None:
    slow(world, 0.1)
    for engine in world.engines:
        engine.slots = 4
    await until(lambda: all(r.load.slots == 4 for r in world.gateway.replicas.all()))
    world.put("flood", limits={"maxInFlight": 100, "maxQueued": 1000})
    world.put("calm")
    flooder, calm = world.http("flood"), world.http("calm")
    flood = [asyncio.create_task(flooder.post(URL, json=chat())) for _ in range(60)]

    def held() -> list[int]:
        return [replica.by_tenant.get("uid-flood", 0) for replica in world.gateway.replicas.all()]

    await until(lambda: held() == [4, 4])
    assert (await calm.post(URL, json=chat())).status_code == 200
    await until(lambda: held() == [2, 2])
    began = time.monotonic()
    while time.monotonic() - began < 0.4:
        assert max(held()) <= 2, "slots stay free for whoever comes"
        began_one = time.monotonic()
        assert (await calm.post(URL, json=chat())).status_code == 200
        assert time.monotonic() - began_one < 2
    for task in flood:
        task.cancel()
    await world.settled()
