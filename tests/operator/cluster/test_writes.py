"""Events in series, preconditions, and rights: on the real API server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from tenantry.cluster import (
    CONFIG_MAP,
    EVENT,
    POD,
    Client,
    Conflict,
    Forbidden,
    Key,
    Obj,
    Recorder,
    key_of,
    uid_of,
    version_of,
)
from tenantry.cluster.events import SERIES_SECONDS

if TYPE_CHECKING:
    from tests.conftest import ApiServer

pytestmark = pytest.mark.apiserver


async def make(client: Client, namespace: str, name: str = "thing") -> Obj:
    metadata = {"name": name, "namespace": namespace}
    return await client.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "1"}}
    )


async def events_of(client: Client, obj: Obj) -> list[Obj]:
    namespace = obj["metadata"]["namespace"]
    found = [event async for event in client.list(EVENT, namespace=namespace)]
    return [event for event in found if event["regarding"]["uid"] == uid_of(obj)]


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


async def test_a_repeated_event_becomes_a_series_and_costs_no_request_each_time(
    client: Client, namespace: str
) -> None:
    obj, clock = await make(client, namespace), Clock()
    recorder = Recorder(client, now=clock)
    running = asyncio.create_task(recorder.run())

    async def record(times: int) -> None:
        for _ in range(times):
            recorder.event(obj, "Placed", "on pool `shared`", action="Place")
        async with asyncio.timeout(10):
            while not recorder.idle():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    await record(1)
    [event] = await events_of(client, obj)
    assert event["reason"] == "Placed"
    assert event["note"] == "on pool `shared`"
    assert "series" not in event

    await record(20)
    [event] = await events_of(client, obj)
    assert event["series"]["count"] == 2  # the start of the series; later counts are written once in a while
    clock.now += timedelta(seconds=SERIES_SECONDS)
    await record(1)
    [event] = await events_of(client, obj)
    assert event["series"]["count"] == 22

    recorder.event(obj, "Refused", "x" * 5000 + "é", action="Place", type="Warning")
    await record(0)
    [other] = [event for event in await events_of(client, obj) if event["reason"] == "Refused"]
    assert len(other["note"].encode()) <= 1024
    running.cancel()


async def test_an_event_that_is_refused_harms_nobody(client: Client, namespace: str) -> None:
    recorder = Recorder(client)
    running = asyncio.create_task(recorder.run())
    nowhere = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "x", "namespace": "no-such-namespace"},
    }
    recorder.event(nowhere, "Lost", "", action="Try")
    obj = await make(client, namespace)
    recorder.event(obj, "Placed", "", action="Try")
    async with asyncio.timeout(10):
        while not await events_of(client, obj):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert not running.done()
    running.cancel()


async def test_deletes_and_patches_hold_their_preconditions(client: Client, namespace: str) -> None:
    obj = await make(client, namespace)
    newer = await client.merge_patch(CONFIG_MAP, key_of(obj), {"data": {"b": "2"}})
    with pytest.raises(Conflict):
        await client.merge_patch(CONFIG_MAP, key_of(obj), {"data": {"c": "3"}}, version=version_of(obj))
    with pytest.raises(Conflict):
        await client.merge_patch(CONFIG_MAP, key_of(obj), {"data": {"c": "3"}}, uid="another")
    with pytest.raises(Conflict):
        await client.delete(CONFIG_MAP, key_of(obj), uid=uid_of(obj), version=version_of(obj))
    with pytest.raises(Conflict):
        await client.delete(CONFIG_MAP, key_of(obj), uid="another")
    assert await client.delete(CONFIG_MAP, key_of(obj), uid=uid_of(obj), version=version_of(newer))
    assert not await client.delete(CONFIG_MAP, key_of(obj), uid=uid_of(obj))


async def test_what_is_not_allowed_is_told_apart(apiserver: ApiServer, namespace: str) -> None:
    client = await Client.connect(apiserver.client("stranger", "stranger"))
    with pytest.raises(Forbidden, match='User "stranger" cannot get resource "pods"'):
        await client.get(POD, Key(namespace, "any"))
    await client.close()
