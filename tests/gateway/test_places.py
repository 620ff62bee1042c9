"""Where a tenant's requests are: what the operator asks before it empties a place that the tenant has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
from gateway_fakes import Behaviour
from gateway_world import chat, until

if TYPE_CHECKING:
    from gateway_world import World


async def places(world: World, tenant: str = "acme") -> dict[str, Any]:
    transport = httpx.ASGITransport(app=world.gateway.health)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.get(f"/tenants/{tenant}")
    assert answer.status_code == 200
    return dict(answer.json())


def moved(world: World, uid: str) -> None:
    """The tenant's route names another pool, with replicas of its own, from now on."""
    item = json.loads(json.dumps(world.items["acme"]))
    [pool] = item["status"]["route"]["pools"]
    pool["uid"] = uid
    pool["lanes"][0] |= {"service": "next-fast", "replicas": ["next-fast-0"]}
    world.state.put_tenant(item)


async def test_requests_count_at_the_place_they_were_sent_to_until_they_are_over(world: World) -> None:
    assert await places(world) == {"routes": ["pool-uid"], "requests": {}}
    assert await places(world, "nobody") == {"routes": [], "requests": {}}
    go = asyncio.Event()
    for engine in world.engines:
        engine.behaviour = Behaviour(before=go.wait)
    world.put("acme", limits={"maxInFlight": 1})
    running, waiting = (
        asyncio.create_task(world.http("acme").post("/v1/chat/completions", json=chat())) for _ in range(2)
    )
    await until(lambda: world.gateway.dispatcher.queued() == 1)
    assert await places(world) == {"routes": ["pool-uid"], "requests": {"pool-uid": 2}}
    moved(world, "next-uid")
    assert await places(world) == {"routes": ["next-uid"], "requests": {"pool-uid": 2}}
    go.set()
    assert [(await task).status_code for task in (running, waiting)] == [200, 200]
    await world.settled()
    assert await places(world) == {"routes": ["next-uid"], "requests": {}}


async def test_a_body_that_takes_its_time_goes_where_the_route_leads_when_it_is_here(world: World) -> None:
    """The tenant moves while the body comes in; the engine proves by which route it was sent."""
    half, rest = asyncio.Event(), asyncio.Event()
    body = json.dumps(chat()).encode()

    async def content() -> AsyncIterator[bytes]:
        yield body[:10]
        half.set()
        await rest.wait()
        yield body[10:]

    headers = {"content-type": "application/json", "content-length": str(len(body))}
    client = world.http("acme")
    asked = asyncio.create_task(client.post("/v1/chat/completions", content=content(), headers=headers))
    await half.wait()
    assert (await places(world))["requests"] == {}, "who has not asked yet holds no place"
    world.put("acme", weight=7)
    rest.set()
    assert (await asked).status_code == 200
    [call] = world.engines[0].calls + world.engines[1].calls
    assert call.claims["weight"] == 7
