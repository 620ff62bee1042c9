"""From an object's arrival to dirty keys: store it, see what changed, ask the mappers, fill the queues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from tenantry.cluster.resources import Key, Obj, Resource

from . import metrics
from .controller import Controller
from .queue import Queue
from .store import Change, Store
from .workset import Priority

log = logging.getLogger(__name__)


class Writer(NamedTuple):
    """The reconcile that is running: its own writes need not wake it."""

    controller: str
    key: Key


_writer: ContextVar[Writer | None] = ContextVar("writer", default=None)


class Hub:
    """Feeds the store and the queues. To be used from one event loop."""

    def __init__(self, store: Store, controllers: Iterable[Controller] = ()) -> None:
        self.store = store
        self.controllers: dict[str, Controller] = {}
        self.queues: dict[str, Queue] = {}
        self.synced = asyncio.Event()
        self.relisted = asyncio.Event()
        """A watch had to begin anew: what was deleted meanwhile gets no event."""
        self._watched: set[Resource] = set()
        for controller in controllers:
            self.register(controller)

    def register(self, controller: Controller) -> None:
        """Add a controller with its queue; before the first object arrives."""
        if controller.name in self.controllers:
            raise ValueError(
                f"`name` of a controller must be unique, but `{controller.name}` is there already"
            )
        self.controllers[controller.name] = controller
        self.queues[controller.name] = Queue(controller.name)
        self._watched |= {watch.resource for watch in controller.watches}
        self.store.watch(self._watched)

    def resources(self) -> list[Resource]:
        """Every kind that some controller watches."""
        return sorted(self._watched, key=str)

    def enqueue(self, controller: str, key: Key, *, after: float = 0.0) -> None:
        """Mark a key of a controller dirty."""
        self.queues[controller].add_after(key, after)

    def arrived(self, resource: Resource, obj: Obj, priority: Priority = Priority.HIGH) -> None:
        """An object as a watch or a live read shows it. Known versions and echoes of our own writes change nothing."""
        self._route(resource, self.store.put(resource, obj), priority)

    def listed(self, resource: Resource, obj: Obj) -> None:
        """An object as the list at the begin of a watch shows it."""
        if self.synced.is_set():
            self.relisted.set()
        self.arrived(resource, obj, Priority.LOW)

    def left(self, resource: Resource, key: Key, uid: str) -> None:
        """That incarnation of the object is gone."""
        self._route(resource, self.store.drop(resource, key, uid), Priority.HIGH)

    def answered(self, resource: Resource, obj: Obj, exclusive: bool) -> None:
        """An object as the API server answered it to us.

        After an exclusive write of the running reconcile, others are woken at once but not that reconcile itself.
        """
        if resource not in self._watched:
            return
        skip = _writer.get() if exclusive else None
        self._route(resource, self.store.put(resource, obj), Priority.HIGH, skip)

    def _route(
        self, resource: Resource, change: Change | None, priority: Priority, skip: Writer | None = None
    ) -> None:
        if change is None or not change.differs:
            return
        metrics.STORE_OBJECTS.labels(resource.kind).set(self.store.count(resource))
        for controller in self.controllers.values():
            for watch in controller.watches:
                if watch.resource != resource:
                    continue
                try:
                    keys = list(watch.mapper(change.old, change.new, self.store))
                except Exception:
                    # one object that a mapper cannot read must not stop the events of all others
                    metrics.RECONCILE_ERRORS.labels(controller.name).inc()
                    log.exception(
                        "mapper failed", extra={"controller": controller.name, "kind": resource.kind}
                    )
                    continue
                for key in keys:
                    if skip != (controller.name, key):
                        self.queues[controller.name].add(key, priority)


@contextmanager
def writing(controller: str, key: Key) -> Iterator[None]:
    """Marks the running reconcile as the writer of all that it writes."""
    token = _writer.set(Writer(controller, key))
    try:
        yield
    finally:
        _writer.reset(token)
