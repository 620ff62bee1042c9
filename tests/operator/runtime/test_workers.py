"""Workers: deadlines, crashes, retries; one broken key stops no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from tenantry.cluster import Conflict, Key
from tenantry.runtime import metrics
from tenantry.runtime.controller import DONE, Context, Controller, Result, Setup
from tenantry.runtime.hub import Hub
from tenantry.runtime.logs import JsonFormatter
from tenantry.runtime.store import Store
from tenantry.runtime.workers import Workers


class Scripted:
    """Does what the script of a key says at its n-th call; DONE afterwards."""

    def __init__(self, scripts: dict[str, list[Callable[[], Awaitable[Result]]]]) -> None:
        self.scripts = scripts
        self.calls: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.together = 0
        self.changed = asyncio.Condition()

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        self.running[key.name] += 1
        self.together = max(self.together, self.running[key.name])
        call = self.calls[key.name]
        self.calls[key.name] += 1
        try:
            script = self.scripts.get(key.name, [])
            return await script[call]() if call < len(script) else DONE
        finally:
            self.running[key.name] -= 1
            async with self.changed:
                self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)


@contextlib.asynccontextmanager
async def running(name: str, reconciler: Scripted, deadline: float = 5.0) -> AsyncIterator[Hub]:
    hub = Hub(Store(), [Controller(name, reconciler, workers=3, deadline_seconds=deadline)])
    setup = SimpleNamespace(
        client=None, store=hub.store, config=SimpleNamespace(workers=2, resync_seconds=600), first=[]
    )
    task = asyncio.create_task(Workers(hub, cast(Setup, setup)).run())
    try:
        yield hub
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def raising(error: Exception) -> Callable[[], Awaitable[Result]]:
    async def fail() -> Result:
        raise error

    return fail


def counted(metric: Any, *labels: str) -> float:
    return float(metric.labels(*labels)._value.get())


async def test_a_poisoned_object_stops_no_other_and_is_tried_again() -> None:
    reconciler = Scripted({"poison": [raising(RuntimeError("boom"))] * 3})
    async with running("poisoned", reconciler) as hub:
        for name in ("poison", "a", "b", "c"):
            hub.enqueue("poisoned", Key("", name))
        await reconciler.until(lambda: all(reconciler.calls[name] for name in "abc"))
        await reconciler.until(lambda: reconciler.calls["poison"] == 4)
    assert counted(metrics.RECONCILE_ERRORS, "poisoned") == 3
    assert counted(metrics.RECONCILES, "poisoned", "success") == 4


async def test_a_reconcile_that_hangs_is_cut_at_its_deadline() -> None:
    async def hang() -> Result:
        await asyncio.Event().wait()
        raise AssertionError

    reconciler = Scripted({"hung": [hang]})
    async with running("hanging", reconciler, deadline=0.05) as hub:
        hub.enqueue("hanging", Key("", "hung"))
        await reconciler.until(lambda: reconciler.calls["hung"] == 2)
    assert counted(metrics.RECONCILE_TIMEOUTS, "hanging") == 1


async def test_a_world_that_moved_on_is_no_error() -> None:
    reconciler = Scripted({"moved": [raising(Conflict(409, "Conflict", "changed"))]})
    async with running("moving", reconciler) as hub:
        hub.enqueue("moving", Key("", "moved"))
        await reconciler.until(lambda: reconciler.calls["moved"] == 2)
    assert counted(metrics.RECONCILE_ERRORS, "moving") == 0
    assert counted(metrics.RECONCILES, "moving", "requeue") == 1


async def test_a_result_may_ask_to_look_again() -> None:
    async def later() -> Result:
        return Result(requeue_after=0.01)

    reconciler = Scripted({"again": [later, later]})
    async with running("again", reconciler) as hub:
        hub.enqueue("again", Key("", "again"))
        await reconciler.until(lambda: reconciler.calls["again"] == 3)


async def test_a_change_during_a_reconcile_is_seen_by_another_one_after_it() -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def slow() -> Result:
        started.set()
        await go.wait()
        return DONE

    reconciler = Scripted({"busy": [slow]})
    async with running("busy", reconciler) as hub:
        hub.enqueue("busy", Key("", "busy"))
        await started.wait()
        for _ in range(5):
            hub.enqueue("busy", Key("", "busy"))
        await asyncio.sleep(0)
        assert reconciler.calls["busy"] == 1
        go.set()
        await reconciler.until(lambda: reconciler.calls["busy"] == 2)
    assert reconciler.together == 1
    assert reconciler.calls["busy"] == 2


async def test_what_is_to_be_done_first_is_done_before_any_reconcile() -> None:
    order: list[str] = []

    async def call() -> Result:
        order.append("reconcile")
        return DONE

    reconciler = Scripted({"a": [call]})
    hub = Hub(Store(), [Controller("late", reconciler)])
    config = SimpleNamespace(workers=2, resync_seconds=600)
    setup = SimpleNamespace(
        client=None, store=hub.store, config=config, first=[lambda: order.append("first")]
    )
    hub.enqueue("late", Key("", "a"))
    task = asyncio.create_task(Workers(hub, cast(Setup, setup)).run())
    try:
        await reconciler.until(lambda: reconciler.calls["a"] == 1)
        assert order == ["first", "reconcile"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_nothing_is_begun_while_the_lease_may_be_anothers() -> None:
    reconciler, leads = Scripted({}), asyncio.Event()
    hub = Hub(Store(), [Controller("doubt", reconciler)])
    config = SimpleNamespace(workers=2, resync_seconds=600)
    setup = SimpleNamespace(client=None, store=hub.store, config=config, first=[])
    task = asyncio.create_task(Workers(hub, cast(Setup, setup), leads.is_set).run())
    try:
        hub.enqueue("doubt", Key("", "a"))
        await asyncio.sleep(0.5)  # longer than two looks at who leads
        assert reconciler.calls == Counter()
        leads.set()
        await reconciler.until(lambda: reconciler.calls["a"] == 1)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_all_that_a_reconcile_logs_bears_its_id_and_its_object(capsys: Any) -> None:
    """Also what a library logs on the way; two reconciles of one object are told apart."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("some.library")
    logger.addHandler(handler)
    logging.getLogger("tenantry.runtime.workers").addHandler(handler)

    async def talks() -> Result:
        logger.warning("on the way")
        raise RuntimeError("boom")

    try:
        async with running("told", Scripted({"a": [talks, talks]})) as hub:
            reconciler = cast(Scripted, hub.controllers["told"].reconciler)
            hub.enqueue("told", Key("", "a"))
            await reconciler.until(lambda: reconciler.calls["a"] == 3)
    finally:
        logger.removeHandler(handler)
        logging.getLogger("tenantry.runtime.workers").removeHandler(handler)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    first, crash, second, _ = lines
    assert (first["message"], crash["message"]) == ("on the way", "reconcile crashed")
    assert {(line["controller"], line["object"]) for line in lines} == {("told", "a")}
    assert first["reconcileID"] == crash["reconcileID"] != second["reconcileID"]
    assert counted(metrics.RECONCILE_PANICS, "told") == 2
    assert counted(metrics.RECONCILES, "told", "requeue") == 0, "shown from the start"


class Tireless:
    """Never waits for anything, and is never done before it was called a thousand times."""

    def __init__(self) -> None:
        self.calls = 0

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        self.calls += 1
        return Result(0.0) if self.calls < 1000 else DONE


async def test_a_reconcile_that_never_waits_leaves_time_for_others() -> None:
    """A worker that does not suspend would hold the loop: no watch, no other controller would go on."""
    tireless = Tireless()
    async with running("tireless", cast(Scripted, tireless)) as hub:
        hub.enqueue("tireless", Key("", "one"))
        async with asyncio.timeout(10):
            while tireless.calls == 0:  # noqa: ASYNC110 - the loop's turns are what is counted
                await asyncio.sleep(0)
        assert tireless.calls < 10
