"""However a request ends: the slot is free, the lease is gone, and the ledger says what the engine made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from gateway_fakes import Behaviour, Call
from gateway_world import FAST, chat, error_of, until
from tenantry_gateway.settings import Timeouts

if TYPE_CHECKING:
    from gateway_world import World


@pytest.fixture
def timeouts() -> Timeouts:
    """Short where a test waits for one to pass."""
    return Timeouts(body=0.5, queue=FAST.queue, first_byte=0.7, idle=0.7, total=20, lease=60, header=0.5)


def behave(world: World, **how: object) -> None:
    for engine in world.engines:
        engine.behaviour = Behaviour(**how)  # type: ignore[arg-type]


def calls(world: World) -> list[Call]:
    return world.engines[0].calls + world.engines[1].calls


async def lines(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line:
            yield line.removeprefix("data: ")


def stall(at: int, event: asyncio.Event) -> dict[str, object]:
    async def each(index: int) -> None:
        if index == at:
            await event.wait()

    return {"each": each, "tokens": 10}


async def test_client_gone_in_the_queue(world: World) -> None:
    never = asyncio.Event()
    world.put("acme", limits={"maxInFlight": 1})
    behave(world, **stall(0, never))
    first = asyncio.create_task(world.http("acme").post("/v1/chat/completions", json=chat()))
    await until(lambda: len(calls(world)) == 1)
    second = asyncio.create_task(world.http("acme").post("/v1/chat/completions", json=chat()))
    await until(lambda: world.gateway.dispatcher.queued() == 1)
    second.cancel()
    await until(lambda: world.gateway.dispatcher.queued() == 0)
    never.set()
    assert (await first).status_code == 200
    await world.settled()
    assert len(calls(world)) == 1
    assert len(await world.rows()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_client_gone_before_the_first_token(world: World, stream: bool) -> None:
    behave(world, **stall(0, asyncio.Event()))
    request = asyncio.create_task(
        world.http("acme").post("/v1/chat/completions", json=chat(stream=stream, max_tokens=9))
    )
    await until(lambda: len(calls(world)) == 1)
    request.cancel()
    await asyncio.wait_for(calls(world)[0].ended.wait(), 2)
    assert calls(world)[0].cancelled, "the engine was told to stop"
    await world.settled()
    (row,) = await world.rows()
    assert (row["outcome"], row["estimated"], row["delivered_tokens"]) == ("client_gone", 1, 0)
    assert row["output_tokens"] == (0 if stream else 9)
    assert row["input_tokens"] >= calls(world)[0].input


async def test_client_gone_in_mid_stream_pays_for_what_was_made(world: World) -> None:
    behave(world, **stall(4, asyncio.Event()))
    async with world.http("acme").stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        seen = lines(response)
        for _ in range(4):
            await anext(seen)
    await asyncio.wait_for(calls(world)[0].ended.wait(), 2)
    await world.settled()
    (row,) = await world.rows()
    assert (row["outcome"], row["output_tokens"], row["input_tokens"], row["estimated"]) == (
        "client_gone",
        4,
        3,
        0,
    )
    usage = world.gateway.limiter.usage("uid-acme", "")
    assert usage.month_used == 7


@pytest.mark.parametrize(("status", "code"), [(500, 502), (401, 502), (502, 502)])
async def test_engine_fails(world: World, status: int, code: int) -> None:
    behave(world, status=status, error={"message": "secret internals"})
    answer = await world.http("acme").post("/v1/chat/completions", json=chat())
    assert (answer.status_code, error_of(answer)["code"]) == (code, "upstream_error")
    assert "secret" not in answer.text
    await world.settled()
    (row,) = await world.rows()
    assert (row["outcome"], row["input_tokens"], row["output_tokens"]) == ("upstream_error", 0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_connection_is_tried_once_elsewhere(world: World, stream: bool) -> None:
    world.engines[0].behaviour = Behaviour(close_before_head=True)
    world.engines[1].outstanding = 1000
    await until(lambda: any(r.load.outstanding == 1000 for r in world.gateway.replicas.all()))
    answer = await world.http("acme").post("/v1/chat/completions", json=chat(stream=stream))
    assert answer.status_code == 200
    assert "w2" in answer.text
    assert [len(engine.calls) for engine in world.engines] == [1, 1]
    await world.settled()
    (row,) = await world.rows()
    assert (row["attempts"], row["replica"], row["output_tokens"]) == (2, "system/base-fast-1", 3)


async def test_all_replicas_dead(world: World) -> None:
    behave(world, close_before_head=True)
    answer = await world.http("acme").post("/v1/chat/completions", json=chat())
    assert (answer.status_code, error_of(answer)["code"]) == (503, "no_endpoint")
    assert answer.headers["retry-after"]
    await world.settled()
    (row,) = await world.rows()
    assert (row["outcome"], row["attempts"], row["output_tokens"]) == ("unreachable", 2, 0)


async def test_a_killed_replica_is_passed_over(world: World) -> None:
    await world.engines[0].stop()
    answers = [await world.http("acme").post("/v1/chat/completions", json=chat()) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 6
    await until(lambda: sum(replica.serves_any for replica in world.gateway.replicas.all()) == 1)
    await world.engines[0].start(*world.ports)
    await until(lambda: sum(replica.serves_any for replica in world.gateway.replicas.all()) == 2)


async def test_a_draining_replica_gets_nothing(world: World) -> None:
    world.engines[0].draining = True
    await until(lambda: any(r.load.draining for r in world.gateway.replicas.all()))
    for _ in range(4):
        assert (await world.http("acme").post("/v1/chat/completions", json=chat())).status_code == 200
    assert world.engines[0].calls == []


async def test_an_answer_cut_in_mid_stream_never_ends_cleanly(world: World) -> None:
    behave(world, tokens=10, cut_after=4)
    async with world.http("acme").stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        seen = [line async for line in lines(response)]
    assert json.loads(seen[-1])["error"]["code"] == "upstream_cut"
    assert "[DONE]" not in seen
    with pytest.raises(openai.APIError):
        async for _ in await world.client("acme").chat.completions.create(**chat(), stream=True):
            pass
    await world.settled()
    rows = await world.rows()
    assert [(r["outcome"], r["output_tokens"], r["attempts"]) for r in rows] == [("cut", 4, 1)] * 2


async def test_a_stream_without_its_end_is_cut_too(world: World) -> None:
    text = b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'
    behave(world, raw=[text, b"data: {"])
    async with world.http("acme").stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        seen = [line async for line in lines(response)]
    assert json.loads(seen[-1])["error"]["code"] == "upstream_cut"
    await world.settled()
    (row,) = await world.rows()
    assert (row["outcome"], row["estimated"], row["output_tokens"]) == ("cut", 1, 1)


async def test_a_whole_answer_cut_is_tried_elsewhere(world: World) -> None:
    world.engines[0].behaviour = Behaviour(tokens=5, cut_after=3)
    world.engines[1].outstanding = 1000
    await until(lambda: any(r.load.outstanding == 1000 for r in world.gateway.replicas.all()))
    answer = await world.http("acme").post("/v1/chat/completions", json=chat())
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert [len(engine.calls) for engine in world.engines] == [1, 1]
    await world.settled()


async def test_no_first_byte_in_time(world: World) -> None:
    behave(world, before=lambda: asyncio.sleep(60))
    answer = await world.http("acme").post("/v1/chat/completions", json=chat(max_tokens=5))
    assert (answer.status_code, error_of(answer)["code"]) == (504, "upstream_timeout")
    await until(lambda: all(call.cancelled for call in calls(world)))
    await world.settled()
    (row,) = await world.rows()
    assert (row["outcome"], row["estimated"], row["output_tokens"]) == ("timeout", 1, 5)


async def test_silence_in_mid_stream(world: World) -> None:
    behave(world, **stall(2, asyncio.Event()))
    async with world.http("acme").stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        seen = [line async for line in lines(response)]
    assert json.loads(seen[-1])["error"]["code"] == "upstream_timeout"
    await world.settled()
    (row,) = await world.rows()
    assert (row["outcome"], row["output_tokens"]) == ("timeout", 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("served", ["other", ""])
async def test_another_models_answer_is_never_delivered(world: World, served: str, stream: bool) -> None:
    behave(world, served=served)
    answer = await world.http("acme").post("/v1/chat/completions", json=chat(stream=stream))
    assert (answer.status_code, error_of(answer)["code"]) == (502, "served_mismatch")
    assert "w0" not in answer.text
    await world.settled()
    assert (await world.rows())[0]["outcome"] == "mismatch"


async def test_a_slow_reader_slows_the_engine_down(world: World) -> None:
    big = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 60_000 + b'"}}]}\n\n'
    behave(world, raw=[big] * 800)  # 48 MB
    async with world.http("acme").stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        reader = response.aiter_raw()
        await anext(reader)
        # The engine cannot finish: what nobody reads stays with it.
        done, _ = await asyncio.wait([asyncio.create_task(calls(world)[0].ended.wait())], timeout=0.5)
        assert not done
    await until(calls(world)[0].ended.is_set)
    await world.settled()


async def test_without_a_ledger_nothing_is_served(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    def broken(*_: object) -> None:
        raise sqlite3.OperationalError("disk full")

    real = world.gateway.ledger._insert_opened
    monkeypatch.setattr(world.gateway.ledger, "_insert_opened", broken)
    answer = await world.http("acme").post("/v1/chat/completions", json=chat())
    assert (answer.status_code, error_of(answer)["code"]) == (503, "ledger_unavailable")
    assert calls(world) == []
    monkeypatch.setattr(world.gateway.ledger, "_insert_opened", real)
    assert (await world.http("acme").post("/v1/chat/completions", json=chat())).status_code == 200
    await world.settled()


async def test_any_mix_of_ends_leaves_nothing_and_the_ledger_is_the_truth(world: World) -> None:
    world.put("acme", limits={"maxInFlight": 8, "maxQueued": 1000})

    async def each(_index: int) -> None:
        await asyncio.sleep(0.003)

    ends = [{}, {"cut_after": 2}, {"status": 500}, {"close_before_head": True}, {}]

    async def one(index: int) -> None:
        async with world.http("acme").stream(
            "POST", "/v1/chat/completions", json=chat(stream=index % 2 == 0)
        ) as answer:
            count = 0
            async for _ in answer.aiter_raw():
                count += 1
                if index % 5 == 4 and count > 1:
                    return  # leaves in mid-stream

    for round_ in range(5):
        behave(world, tokens=4, each=each, **ends[round_])
        await asyncio.gather(*(one(round_ * 20 + index) for index in range(20)))
        await world.settled()
        await asyncio.sleep(0.12)  # replicas that failed are asked again
    await until(lambda: all(call.ended.is_set() for call in calls(world)))
    rows = {row["id"]: row for row in await world.rows()}
    assert all(row["outcome"] for row in rows.values())
    by_id: dict[str, list[Call]] = {}
    for call in calls(world):
        by_id.setdefault(call.claims["jti"], []).append(call)
    assert set(by_id) <= set(rows)
    for row in rows.values():
        made = by_id.get(row["id"], [])
        if row["outcome"] == "done":
            assert (row["input_tokens"], row["output_tokens"]) == (made[-1].input, made[-1].generated)
        elif row["outcome"] == "client_gone" and not row["estimated"]:
            # Between the last chunk that was seen and the end of the connection the engine may make a little more.
            assert 0 <= made[-1].generated - row["output_tokens"] <= 2
        elif row["outcome"] == "cut":
            assert row["output_tokens"] == made[-1].generated
    usage = world.gateway.limiter.usage("uid-acme", "")
    assert usage.month_used == sum(r["input_tokens"] + r["output_tokens"] for r in rows.values())
