"""What no event told of: ghosts after a watch had to start anew, missed changes, and the gate at the start."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

import pytest
from tenantry.cluster import CONFIG_MAP, Client, Key, Obj, key_of, uid_of
from tenantry.runtime.controller import Controller, Watch, label_key
from tenantry.runtime.hub import Hub
from tenantry.runtime.resync import BLIND_AFTER, Resync
from tenantry.runtime.store import Store

pytestmark = pytest.mark.apiserver


class Blind:
    """A hub whose watch tells nothing: the state after a 410 and a relist that hid a deletion."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self.hub = Hub(Store(), [Controller("c", cast(Any, None), [Watch(CONFIG_MAP, label_key("root"))])])
        self.resync = Resync(client, self.hub, 600, grace_seconds=0.2)

    async def make(self, name: str) -> Obj:
        labels = {"app.kubernetes.io/managed-by": "tenantry", "root": name}
        metadata = {"name": name, "namespace": self.namespace, "labels": labels}
        return await self.client.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})

    def dirty(self) -> list[str]:
        found = []
        workset = self.hub.queues["c"]._set
        while (taken := workset.take(0.0)) is not None:
            found.append(taken[0].name)
            workset.done(taken[0], 0.0)
        return found


@pytest.fixture
async def blind(client: Client, namespace: str) -> Blind:
    blind = Blind(client, namespace)
    # what other tests of the session left is known from the start
    async for obj in client.list(CONFIG_MAP, labels="app.kubernetes.io/managed-by=tenantry"):
        blind.hub.arrived(CONFIG_MAP, obj)
    blind.dirty()
    return blind


async def test_a_ghost_is_evicted_and_its_root_is_woken(blind: Blind) -> None:
    ghost, kept = await blind.make(f"g-{uuid.uuid4().hex[:8]}"), await blind.make(f"k-{uuid.uuid4().hex[:8]}")
    for obj in (ghost, kept):
        blind.hub.arrived(CONFIG_MAP, obj)
    blind.dirty()
    await blind.client.delete(CONFIG_MAP, key_of(ghost), uid=uid_of(ghost))
    assert blind.hub.store.get(CONFIG_MAP, key_of(ghost)) is not None
    assert await blind.resync.once(CONFIG_MAP) == 1
    assert blind.hub.store.get(CONFIG_MAP, key_of(ghost)) is None
    assert blind.hub.store.get(CONFIG_MAP, key_of(kept)) is not None
    assert blind.dirty() == [ghost["metadata"]["name"]]
    assert await blind.resync.once(CONFIG_MAP) == 0
    assert blind.dirty() == []


async def test_a_missed_change_and_a_missed_object_are_found(blind: Blind) -> None:
    name = f"m-{uuid.uuid4().hex[:8]}"
    obj = await blind.make(name)
    assert await blind.resync.once(CONFIG_MAP) == 1
    assert blind.dirty() == [name]
    await blind.client.merge_patch(CONFIG_MAP, key_of(obj), {"data": {"a": "b"}})
    assert await blind.resync.once(CONFIG_MAP) == 1
    assert blind.dirty() == [name]
    held = blind.hub.store.get(CONFIG_MAP, key_of(obj))
    assert held is not None
    assert held["data"] == {"a": "b"}


async def test_an_event_that_is_on_its_way_is_no_drift(blind: Blind) -> None:
    obj = await blind.make(f"e-{uuid.uuid4().hex[:8]}")
    asyncio.get_running_loop().call_later(0.1, blind.hub.arrived, CONFIG_MAP, obj)
    assert await blind.resync.once(CONFIG_MAP) == 0


async def test_an_object_younger_than_the_list_is_no_ghost(
    blind: Blind, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = await blind.client.versions(CONFIG_MAP, labels="app.kubernetes.io/managed-by=tenantry")

    async def stale(*_: Any, **__: Any) -> Any:
        return versions

    obj = await blind.make(f"y-{uuid.uuid4().hex[:8]}")
    blind.hub.arrived(CONFIG_MAP, obj)
    monkeypatch.setattr(blind.client, "versions", stale)
    monkeypatch.setattr(blind.client, "get", None)  # settled without a question
    assert await blind.resync.once(CONFIG_MAP) == 0
    assert blind.hub.store.get(CONFIG_MAP, key_of(obj)) is not None


async def test_a_watch_that_keeps_missing_changes_counts_as_blind(blind: Blind) -> None:
    for _ in range(BLIND_AFTER):
        assert blind.resync.blind == []
        await blind.make(f"b-{uuid.uuid4().hex[:8]}")
        await blind.resync.once(CONFIG_MAP)
    assert blind.resync.blind == ["configmaps"]
    await blind.resync.once(CONFIG_MAP)
    assert blind.resync.blind == []


async def test_the_gate_opens_only_when_the_store_holds_all_that_exists(blind: Blind) -> None:
    obj = await blind.make(f"first-{uuid.uuid4().hex[:8]}")
    blind.resync = Resync(blind.client, blind.hub, 600, grace_seconds=30)
    gate = asyncio.create_task(blind.resync.complete())
    done, _ = await asyncio.wait([gate], timeout=0.3)
    assert not done
    assert not blind.hub.synced.is_set()
    blind.hub.arrived(CONFIG_MAP, obj)
    async with asyncio.timeout(10):
        await gate
    assert blind.hub.synced.is_set()


async def test_the_gate_does_not_wait_for_what_is_gone_meanwhile(blind: Blind) -> None:
    obj = await blind.make(f"gone-{uuid.uuid4().hex[:8]}")
    gate = asyncio.create_task(blind.resync.complete())
    await blind.client.delete(CONFIG_MAP, key_of(obj), uid=uid_of(obj))
    async with asyncio.timeout(10):
        await gate
    assert blind.hub.store.get(CONFIG_MAP, Key(blind.namespace, obj["metadata"]["name"])) is None
