"""What a controller is to the runtime, and what the runtime gives to a controller. Imports neither kopf nor a server.

A controller is level-triggered: `reconcile(key, ctx)` brings the world to what the object with that key asks for now,
whatever happened before, and may be called at any time, twice, or late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tenantry.api import OperatorConfig
from tenantry.api.identity import Signer
from tenantry.attestation.trust import Trust
from tenantry.cluster import Client, Key, Obj, Recorder, Resource

from .store import Store


class Result(NamedTuple):
    """How a reconcile ended: look again after `requeue_after` seconds, or (None) when something changes."""

    requeue_after: float | None = None


DONE = Result()


class Fence(NamedTuple):
    """Orders declarations to replicas: changes of leadership, then a counter under one leader."""

    epoch: int
    counter: int


class Enqueue(Protocol):
    def __call__(self, controller: str, key: Key, *, after: float = 0.0) -> None:
        """Mark the key of a controller dirty, now or `after` seconds from now."""


@dataclass(frozen=True)
class Setup:
    """What controllers are built from; also reachable from every reconcile as attributes of `Context`."""

    client: Client
    store: Store
    config: OperatorConfig
    recorder: Recorder
    signer: Signer | None
    enqueue: Enqueue
    fence: Callable[[], Fence]
    trust: Trust | None = None
    first: list[Callable[[], None]] = field(default_factory=list)
    """What is to be done before the first reconcile: the store is complete then, and this process leads."""


class Context(Protocol):
    """One reconcile's view of the world. Made anew for each call, so nothing in it outlives the reconcile."""

    @property
    def client(self) -> Client: ...
    @property
    def store(self) -> Store: ...
    @property
    def config(self) -> OperatorConfig: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def signer(self) -> Signer | None: ...
    @property
    def enqueue(self) -> Enqueue: ...

    def fence(self) -> Fence:
        """A pair higher than any given before, by this process or by an earlier leader."""

    async def live(self, resource: Resource, key: Key) -> Obj | None:
        """The object as the API server has it now (also put into the store); None when it is gone."""

    async def ensure(self, owner: Obj, desired: Iterable[Obj]) -> list[Obj]:
        """Make the desired objects exist as described, controlled by `owner`; their live state in the same order.

        Sends nothing for an object whose desired and live state are those of the last call. Raises NameTaken,
        StillTerminating, OwnerChanged or ApiError.
        """

    async def prune(self, owner: Obj, resources: Iterable[Resource], keep: Iterable[Obj]) -> list[Obj]:
        """Delete what `owner` controls of those kinds, bears our label, and is not in `keep`; what was deleted."""

    async def set_status(self, root: Obj, status: Obj) -> bool:
        """Write the status (without times and observedGeneration) if it says something new; whether it was written."""

    async def add_finalizer(self, root: Obj) -> Obj:
        """Put our finalizer on a root that is not being deleted; the live object."""

    async def remove_finalizer(self, root: Obj) -> None:
        """Take our finalizer off; fine when the object is gone."""


class Reconciler(Protocol):
    async def reconcile(self, key: Key, ctx: Context) -> Result:
        """Bring the world to what `key` asks for. Exceptions are logged, counted and retried with back-off."""


Mapper = Callable[[Obj | None, Obj | None, Store], Iterable[Key]]
"""(old, new, store) -> keys of the controller that the change concerns; old None = new object, new None = deleted."""


@dataclass(frozen=True)
class Watch:
    """Objects of `resource` wake the keys that `mapper` names."""

    resource: Resource
    mapper: Mapper


@dataclass(frozen=True)
class Controller:
    """A reconciler with its queue: `name` labels its metrics and addresses it in `ctx.enqueue`."""

    name: str
    reconciler: Reconciler
    watches: list[Watch] = field(default_factory=list)
    workers: int | None = None
    deadline_seconds: float = 60.0


def own_key(old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
    """Mapper for the root kind itself. Own statuses do not wake it: they are known before their event arrives.

    Another hand's do, e.g. that of a leader that led no more: a status is what gateways route by, and is put right.
    """
    obj = new or old
    assert obj is not None
    if old is not None and new is not None and not _differs(old, new):
        return ()
    metadata = obj["metadata"]
    return (Key(metadata.get("namespace", ""), metadata["name"]),)


def _differs(old: Obj, new: Obj) -> bool:
    if old.get("status") != new.get("status"):
        return True
    before, after = old["metadata"], new["metadata"]
    return any(
        before.get(name) != after.get(name)
        for name in ("uid", "generation", "deletionTimestamp", "labels", "annotations", "finalizers")
    )


def owner_key(kind: str) -> Mapper:
    """Mapper for owned objects: the name of the controller owner of that (cluster-scoped) kind, old and new."""

    def mapper(old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        found = []
        for obj in (old, new):
            for reference in (obj or {}).get("metadata", {}).get("ownerReferences", []):
                if reference.get("controller") and reference.get("kind") == kind:
                    found.append(Key("", reference["name"]))
        return dict.fromkeys(found)

    return mapper


def label_key(label: str) -> Mapper:
    """Mapper for objects that name a cluster-scoped root in a label, old and new."""

    def mapper(old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        names = [(obj or {}).get("metadata", {}).get("labels", {}).get(label) for obj in (old, new)]
        return dict.fromkeys(Key("", name) for name in names if name)

    return mapper
