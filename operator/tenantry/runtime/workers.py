"""Workers take keys from a queue and reconcile them, each with a deadline; a failing key stops no other."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable

from opentelemetry import trace

from tenantry.api import OperatorConfig
from tenantry.api.identity import Signer
from tenantry.cluster import (
    ApiError,
    Client,
    Conflict,
    Key,
    Obj,
    OwnerChanged,
    Recorder,
    Resource,
    StillTerminating,
    uid_of,
)
from tenantry.cluster.keeper import Keeper, Memory

from . import logs, metrics
from .controller import Controller, Enqueue, Fence, Result, Setup
from .hub import Hub, writing
from .queue import Queue
from .store import Store

log = logging.getLogger(__name__)
_tracer = trace.get_tracer("tenantry.operator")

DOUBT_SECONDS = 0.2
"""How often a worker looks whether this process leads, while that is in doubt: soon the Lease is renewed, or its loss
ends the process."""


class Session:
    """One reconcile's Context (see `controller.Context`)."""

    def __init__(self, setup: Setup, memory: Memory) -> None:
        self._setup = setup
        self._keeper = Keeper(setup.client, setup.store, memory)

    @property
    def recheck_after(self) -> float | None:
        """Seconds until objects of kinds that are not watched are to be looked at again; None without such."""
        return self._keeper.recheck_after

    @property
    def client(self) -> Client:
        return self._setup.client

    @property
    def store(self) -> Store:
        return self._setup.store

    @property
    def config(self) -> OperatorConfig:
        return self._setup.config

    @property
    def recorder(self) -> Recorder:
        return self._setup.recorder

    @property
    def signer(self) -> Signer | None:
        return self._setup.signer

    @property
    def enqueue(self) -> Enqueue:
        return self._setup.enqueue

    def fence(self) -> Fence:
        return self._setup.fence()

    async def live(self, resource: Resource, key: Key) -> Obj | None:
        known = self.store.get(resource, key)
        live = await self.client.get(resource, key)
        if live is None and known is not None:
            self.client.on_gone(resource, key, uid_of(known))
        return live

    async def ensure(self, owner: Obj, desired: Iterable[Obj]) -> list[Obj]:
        return await self._keeper.ensure(owner, desired)

    async def prune(self, owner: Obj, resources: Iterable[Resource], keep: Iterable[Obj]) -> list[Obj]:
        return await self._keeper.prune(owner, resources, keep)

    async def set_status(self, root: Obj, status: Obj) -> bool:
        return await self._keeper.set_status(root, status)

    async def add_finalizer(self, root: Obj) -> Obj:
        return await self._keeper.add_finalizer(root)

    async def remove_finalizer(self, root: Obj) -> None:
        await self._keeper.remove_finalizer(root)


class Workers:
    """All workers of all controllers."""

    def __init__(self, hub: Hub, setup: Setup, leads: Callable[[], bool] = lambda: True) -> None:
        self._hub = hub
        self._setup = setup
        self._leads = leads
        self._memory = Memory(setup.config.resync_seconds)
        self.progress = time.monotonic()

    async def run(self) -> None:
        """Reconcile until cancelled. To be started only by the leader, and only once the store is complete."""
        for call in self._setup.first:
            call()
        async with asyncio.TaskGroup() as group:
            for controller in self._hub.controllers.values():
                count = controller.workers or self._setup.config.workers
                metrics.MAX_WORKERS.labels(controller.name).set(count)
                metrics.begin(controller.name)
                for number in range(count):
                    group.create_task(self._work(controller), name=f"{controller.name}-{number}")

    async def _work(self, controller: Controller) -> None:
        queue = self._hub.queues[controller.name]
        while True:
            # Neither a full queue nor a reconcile that asks nobody suspends: one worker could hold the loop.
            await asyncio.sleep(0)
            key = await queue.get()
            while not self._leads():  # noqa: ASYNC110 - time decides it, nothing that could wake us
                await asyncio.sleep(DOUBT_SECONDS)
            active = metrics.ACTIVE_WORKERS.labels(controller.name)
            active.inc()
            try:
                await self._reconcile(controller, queue, key)
            finally:
                active.dec()
                queue.done(key)
                self.progress = time.monotonic()

    async def _reconcile(self, controller: Controller, queue: Queue, key: Key) -> None:
        about = {"controller": controller.name, "object": str(key), "reconcileID": str(uuid.uuid4())}
        with (
            logs.about(**about),
            _tracer.start_as_current_span(f"reconcile {controller.name}", attributes=about) as span,
        ):
            span.set_attribute("outcome", await self._attempt(controller, queue, key))

    async def _attempt(self, controller: Controller, queue: Queue, key: Key) -> str:
        """How it ended, as `controller_runtime_reconcile_total` calls it."""
        started = time.monotonic()
        outcome = "error"
        try:
            with writing(controller.name, key):
                async with asyncio.timeout(controller.deadline_seconds):
                    session = Session(self._setup, self._memory)
                    result = await controller.reconciler.reconcile(key, session)
            outcome = self._settle(queue, key, result, session.recheck_after)
        except (Conflict, OwnerChanged, StillTerminating) as error:
            # the world moved on meanwhile: not a failure, the next try sees the new state
            queue.retry(key)
            outcome = "requeue"
            log.info("reconcile again: %s", error)
        except TimeoutError:
            queue.retry(key)
            metrics.RECONCILE_TIMEOUTS.labels(controller.name).inc()
            metrics.RECONCILE_ERRORS.labels(controller.name).inc()
            log.error("reconcile took longer than %g s", controller.deadline_seconds)
        except ApiError as error:
            queue.retry(key)
            metrics.RECONCILE_ERRORS.labels(controller.name).inc()
            log.error("reconcile failed: %s", error)
        except Exception:
            queue.retry(key)
            metrics.RECONCILE_ERRORS.labels(controller.name).inc()
            metrics.RECONCILE_PANICS.labels(controller.name).inc()
            log.exception("reconcile crashed")
        finally:
            metrics.RECONCILES.labels(controller.name, outcome).inc()
            metrics.RECONCILE_SECONDS.labels(controller.name).observe(time.monotonic() - started)
        return outcome

    @staticmethod
    def _settle(queue: Queue, key: Key, result: Result, recheck_after: float | None) -> str:
        queue.forget(key)
        if recheck_after is not None:
            queue.add_after(key, recheck_after)
        if result.requeue_after is None:
            return "success"
        queue.add_after(key, result.requeue_after)
        return "requeue_after"
