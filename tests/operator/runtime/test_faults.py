"""Faults at every single request of a small reconcile, in turn, against a real API server: the end state is the same.

The controllers' own reconciles are put through the same, and more, in the controllers' tests.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tenantry.cluster import CONFIG_MAP, TENANT, ApiError, Client, Key, Obj, condition, key_of, uid_of
from tenantry.cluster.keeper import Memory
from tenantry.cluster.transport import Transport, load_configuration
from tenantry.runtime.controller import Controller, Setup, Watch, own_key, owner_key
from tenantry.runtime.hub import Hub
from tenantry.runtime.store import Store
from tenantry.runtime.workers import Session

if TYPE_CHECKING:
    from tests.conftest import ApiServer

pytestmark = pytest.mark.apiserver

Answer = tuple[int, Mapping[str, str], str]


def refused(status: int, reason: str, **headers: str) -> Callable[[], Answer]:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": "injected", "code": status}
    return lambda: (status, headers, json.dumps(body))


def cut() -> Answer:
    raise ConnectionResetError("injected")


# name -> (what the caller gets, whether the request reached the server before)
FAULTS: dict[str, tuple[Callable[[], Answer], bool]] = {
    "429": (refused(429, "TooManyRequests", **{"Retry-After": "0"}), False),
    "500": (refused(500, "InternalError"), False),
    "no status object": (lambda: (502, {}, "<html>bad gateway</html>"), False),
    "cut before": (cut, False),
    "cut after it was done": (cut, True),
    "conflict": (refused(409, "Conflict"), False),
}


class Faulty(Transport):
    """Answers the n-th request with a fault."""

    fault: tuple[Callable[[], Answer], bool] | None = None
    at = -1
    sent = 0

    async def _send(self, method: str, path: str, **options: Any) -> Answer:
        number = self.sent
        self.sent += 1
        if self.fault is None or number != self.at:
            return await super()._send(method, path, **options)
        answer, reaches = self.fault
        if reaches:
            await super()._send(method, path, **options)
        return answer()


class World:
    """One tenant, a store that sees every event at once, and a reconcile that uses every kind of write."""

    def __init__(self, transport: Faulty, truth: Client, namespace: str) -> None:
        self.transport = transport
        self.truth = truth
        self.namespace = namespace
        self.name = f"t-{uuid.uuid4().hex[:10]}"
        self.memory = Memory()
        watches = [Watch(TENANT, own_key), Watch(CONFIG_MAP, owner_key("Tenant"))]
        self.hub = Hub(Store(), [Controller("tenant", cast(Any, None), watches)])
        client = Client(transport)
        client.on_object, client.on_gone = self.hub.answered, self.hub.left
        self.setup = cast(Setup, SimpleNamespace(client=client, store=self.hub.store))

    def config(self, name: str, value: str) -> Obj:
        metadata = {"name": f"{self.name}-{name}", "namespace": self.namespace}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {value: value}}

    async def reconcile(self, stage: int) -> None:
        """Stage 1 makes `a` and `b`; stage 2 changes `a`, drops `b`; both report."""
        ctx = Session(self.setup, self.memory)
        root = await ctx.live(TENANT, Key("", self.name))
        assert root is not None
        wanted = [self.config("a", f"v{stage}"), *([self.config("b", "v")] if stage == 1 else [])]
        root = await ctx.add_finalizer(root)
        await ctx.ensure(root, wanted)
        await ctx.prune(root, [CONFIG_MAP], wanted)
        await ctx.set_status(
            root, {"tier": "Free", "conditions": [condition("Ready", True, f"Stage{stage}")]}
        )

    async def events(self) -> None:
        """What the watches tell: the truth."""
        for resource in (TENANT, CONFIG_MAP):
            live = {key_of(obj): obj async for obj in self.truth.list(resource)}
            for key in self.hub.store.keys(resource):
                if key not in live:
                    self.hub.store.drop(resource, key)
            for obj in live.values():
                self.hub.arrived(resource, obj)

    async def converge(self, stage: int) -> int:
        """Reconcile until it succeeds; how many tries that took."""
        for attempt in range(1, 6):
            try:
                await self.reconcile(stage)
            except ApiError:
                await self.events()
            else:
                return attempt
        raise AssertionError("did not converge")

    async def state(self) -> Any:
        """All that matters of the end state, without names, uids and times."""
        root = await self.truth.get(TENANT, Key("", self.name))
        assert root is not None
        configs = {
            obj["metadata"]["name"].removeprefix(self.name): (
                obj["data"],
                [reference["uid"] == uid_of(root) for reference in obj["metadata"]["ownerReferences"]],
                sorted((e["manager"], e["operation"]) for e in obj["metadata"]["managedFields"]),
            )
            async for obj in self.truth.list(CONFIG_MAP, namespace=self.namespace)
            if obj["metadata"]["name"].startswith(self.name)
        }
        ready = {k: v for k, v in root["status"]["conditions"][0].items() if k != "lastTransitionTime"}
        return configs, ready, root["metadata"]["finalizers"]

    async def clean(self) -> None:
        live = await self.truth.get(TENANT, Key("", self.name))
        assert live is not None
        await self.truth.delete(TENANT, key_of(live), uid=uid_of(live))
        live = await self.truth.get(TENANT, key_of(live))
        if live is not None:
            await self.truth.set_finalizer(live, "tenantry.dev/release", present=False)


@pytest.fixture
async def make(apiserver: ApiServer, client: Client, namespace: str, crds: None) -> AsyncIterator[Any]:
    made: list[World] = []

    async def make_world(attempts: int = 1) -> World:
        configuration = await load_configuration(Path(apiserver.kubeconfig))
        transport = Faulty(configuration, attempts=attempts, backoff_seconds=0.001)
        world = World(transport, client, namespace)
        made.append(world)
        spec = {"tier": "Free", "models": [{"name": "chat", "baseModel": "m"}]}
        root = {
            "apiVersion": "tenantry.dev/v1alpha1",
            "kind": "Tenant",
            "metadata": {"name": world.name},
            "spec": spec,
        }
        world.hub.arrived(TENANT, await client.create(root))
        return world

    yield make_world
    for world in made:
        await world.clean()
        await world.transport.close()


async def expected(make: Any) -> tuple[Any, int, int]:
    """The end state without faults, and how many requests each stage took."""
    world = await make()
    assert await world.converge(1) == 1
    first = world.transport.sent
    assert await world.converge(2) == 1
    return await world.state(), first, world.transport.sent - first


@pytest.mark.parametrize("fault", ["cut after it was done"])
async def test_a_fault_at_any_request_leads_to_the_same_end_state(make: Any, fault: str) -> None:
    wanted, first, second = await expected(make)
    assert first >= 5
    assert second >= 5
    for stage, at in [(1, at) for at in range(first)] + [(2, at) for at in range(second)]:
        world = await make()
        for step in (1, 2):
            world.transport.fault = FAULTS[fault] if step == stage else None
            world.transport.at, world.transport.sent = at, 0
            await world.converge(step)
        assert await world.state() == wanted, f"{fault} at request {at} of stage {stage}"


async def test_the_transport_rides_out_faults_that_say_later(make: Any) -> None:
    for fault in ("429", "500", "no status object", "cut before"):
        world = await make(attempts=3)
        for stage in (1, 2):
            world.transport.fault, world.transport.at, world.transport.sent = FAULTS[fault], stage, 0
            assert await world.converge(stage) == 1, fault


async def test_a_refusal_is_not_repeated(make: Any) -> None:
    world = await make(attempts=5)
    for status, reason in ((403, "Forbidden"), (422, "Invalid")):
        world.transport.fault = (refused(status, reason), False)
        world.transport.at, world.transport.sent = 0, 0
        with pytest.raises(ApiError, match=reason):
            await world.reconcile(1)
        assert world.transport.sent == 1
