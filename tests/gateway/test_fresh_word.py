"""A request is not refused by what replicas said before it came: a route may be quicker than the next word of them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from gateway_fakes import endpoint_slice
from gateway_world import ADAPTER, TONED, chat, error_of, until

if TYPE_CHECKING:
    from gateway_world import World


async def here(world: World, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
    """A request whose body the gateway has."""
    asked = asyncio.create_task(world.http("acme").post("/v1/chat/completions", json=body))
    await until(lambda: world.gateway.completions.places("acme"))
    return asked


def hosts(world: World) -> dict[str, str]:
    return {f"base-fast-{index}": engine.host for index, engine in enumerate(world.engines)}


def polls(world: World) -> list[int]:
    return [engine.polls for engine in world.engines]


async def test_a_replica_that_the_route_names_first_is_waited_for(world: World) -> None:
    world.state.replace_slices([])
    asked = await here(world, chat())
    world.state.replace_slices([endpoint_slice(hosts(world))])
    assert (await asked).status_code == 200


async def test_an_adapter_that_came_since_the_last_poll_is_found(world: World) -> None:
    world.put("acme", models=TONED)
    held = asyncio.Event()
    for engine in world.engines:
        engine.hold = held
    began = polls(world)
    await until(lambda: all(map(int.__gt__, polls(world), began)))
    asked = await here(world, {**chat(), "model": "toned"})
    world.engines[1].registered = {ADAPTER}
    held.set()
    assert (await asked).status_code == 200


async def test_what_no_replica_has_is_refused_as_soon_as_all_said_so(world: World) -> None:
    world.put("acme", models=TONED)
    before = polls(world)
    refused = await world.http("acme").post("/v1/chat/completions", json={**chat(), "model": "toned"})
    assert (refused.status_code, error_of(refused)["code"]) == (503, "adapter_unavailable")
    assert all(map(int.__gt__, polls(world), before))
    assert all(now < then + 20 for now, then in zip(polls(world), before, strict=True)), "far from the bound"


@pytest.mark.parametrize("words", [1, 300])
async def test_it_waits_before_it_counts_too(world: World, words: int) -> None:
    """Nobody to count a long text would else make it a longer one: its bytes."""
    lane = {
        "name": "fast",
        "service": "base-fast",
        "slots": 16,
        "replicas": ["base-fast-0"],
        "maxInputTokens": 400,
    }
    world.put("acme", lanes=[lane])
    world.state.replace_slices([])
    asked = await here(world, chat("manyletters " * words))
    world.state.replace_slices([endpoint_slice(hosts(world))])
    assert (await asked).status_code == 200


async def test_the_wait_is_bounded(world: World) -> None:
    world.state.replace_slices([])
    began = time.monotonic()
    refused = await world.http("acme").post("/v1/chat/completions", json=chat())
    assert (refused.status_code, error_of(refused)["code"]) == (503, "no_endpoint")
    assert 2.0 <= time.monotonic() - began < 10.0


async def test_whoever_leaves_while_it_waits_leaves_nothing(world: World) -> None:
    world.state.replace_slices([])
    asked = await here(world, chat())
    asked.cancel()
    await until(lambda: not world.gateway.completions.places("acme"))
    await world.settled()
