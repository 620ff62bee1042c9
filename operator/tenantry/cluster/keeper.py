"""Keeps what a root owns as it should be: create, then apply; prune by owner; status only when changed.

The first write of an object is a POST, so that a name which somebody else holds is never taken over. Later writes are
server-side applies to that very uid and resourceVersion, and only when the desired or the live object changed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from tenantry.api.names import FINALIZER, MANAGED_BY, MANAGED_BY_LABEL

from .client import Client
from .errors import AlreadyExists, Conflict, NameTaken, OwnerChanged, StillTerminating
from .objects import (
    content_digest,
    controller_of,
    digest_of,
    is_deleting,
    is_managed,
    owned_by,
    owner_reference,
    uid_of,
    version_of,
)
from .resources import NAMESPACE, Key, Obj, Resource, key_of, resource_of
from .status import complete, same, timestamp

_ATTEMPTS = 3


class Cache(Protocol):
    """What is known of the cluster without asking: the runtime's store."""

    def get(self, resource: Resource, key: Key) -> Obj | None: ...

    def content(self, resource: Resource, key: Key) -> str | None:
        """`content_digest` of the object as it is known."""

    def owned(self, resource: Resource, owner_uid: str) -> Iterable[Obj]:
        """Objects of a kind whose controller has that uid."""

    def watches(self, resource: Resource) -> bool:
        """Whether what is known of a kind follows the cluster."""


@dataclass(frozen=True)
class _Applied:
    """What was sent and what came back, for one owner and one incarnation of the object."""

    owner: str
    uid: str
    desired: str
    content: str


@dataclass(frozen=True)
class _Seen:
    """An object of a kind that is not watched, as it was at a time of our own clock."""

    live: Obj
    at: float


class Memory:
    """What was applied last, so that nothing is sent twice. Lost at a restart, which costs one apply per object.

    Objects of kinds that are not watched are believed to be as they were for `recheck_seconds`.
    """

    def __init__(self, recheck_seconds: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.recheck_seconds = recheck_seconds
        self._clock = clock
        self._unwatched: OrderedDict[tuple[Resource, Key], _Seen] = OrderedDict()
        self._applied: dict[tuple[Resource, Key], _Applied] = {}

    def is_current(
        self, resource: Resource, live: Obj, owner: Obj, desired: str, content: str | None
    ) -> bool:
        known = self._applied.get((resource, key_of(live)))
        return known == _Applied(uid_of(owner), uid_of(live), desired, content or "")

    def note(self, resource: Resource, live: Obj, owner: Obj, desired: str) -> None:
        self._applied[resource, key_of(live)] = _Applied(
            uid_of(owner), uid_of(live), desired, content_digest(live)
        )

    def saw(self, resource: Resource, live: Obj) -> None:
        """Keep an object of a kind that is not watched."""
        now = self._clock()
        self._unwatched[resource, key_of(live)] = _Seen(live, now)
        self._unwatched.move_to_end((resource, key_of(live)))
        while next(iter(self._unwatched.values())).at < now - 4 * self.recheck_seconds:
            self._unwatched.popitem(last=False)  # its root is gone: nobody looks at it any more

    def seen(self, resource: Resource, key: Key) -> tuple[Obj | None, bool]:
        """(The object as it was seen last, whether that was lately enough.)"""
        seen = self._unwatched.get((resource, key))
        if seen is None:
            return None, False
        return seen.live, self._clock() - seen.at < self.recheck_seconds

    def forget_within(self, namespace: str) -> None:
        """The namespace was made anew: what is not watched there went with the one before."""
        for resource, key in [entry for entry in self._unwatched if entry[1].namespace == namespace]:
            self.forget(resource, key)

    def forget(self, resource: Resource, key: Key) -> None:
        self._applied.pop((resource, key), None)
        self._unwatched.pop((resource, key), None)


class Keeper:
    """One reconcile's writes for one root. Verifies the root by a live read before its first write."""

    def __init__(self, client: Client, cache: Cache, memory: Memory) -> None:
        self._client = client
        self._cache = cache
        self._memory = memory
        self._verified: dict[str, Obj] = {}
        self.recheck_after: float | None = None
        """Seconds until this root's objects of kinds that are not watched are to be looked at again."""

    async def live_root(self, root: Obj) -> Obj:
        """The root as it is now, read once per reconcile. Raises OwnerChanged when it was replaced or is gone."""
        uid = uid_of(root)
        if uid not in self._verified:
            live = await self._client.get(resource_of(root), key_of(root))
            if live is None:
                self._client.on_gone(resource_of(root), key_of(root), uid)
            if live is None or uid_of(live) != uid:
                raise OwnerChanged(f"{root['kind']} `{key_of(root)}` is gone or was made anew")
            self._verified[uid] = live
        return self._verified[uid]

    async def ensure(self, owner: Obj, desired: Iterable[Obj]) -> list[Obj]:
        """Make the desired objects exist as described, controlled by `owner`; their live state in the same order.

        Raises NameTaken, StillTerminating, OwnerChanged, ApiError.
        """
        return [await self._ensure_one(owner, _labelled(obj, owner)) for obj in desired]

    async def _ensure_one(self, owner: Obj, obj: Obj) -> Obj:
        resource, key = resource_of(obj), key_of(obj)
        namespace = owner["metadata"].get("namespace")
        if namespace and namespace != key.namespace:
            raise ValueError(f"{obj['kind']} `{key}` must lie in the namespace of its owner, `{namespace}`")
        wanted = digest_of(obj)
        if not self._cache.watches(resource):
            return await self._ensure_unwatched(owner, obj, wanted)
        known = self._cache.get(resource, key)
        if known is not None and not is_deleting(known):
            content = self._cache.content(resource, key)
            if self._memory.is_current(resource, known, owner, wanted, content):
                return known
        root = await self.live_root(owner)
        if is_deleting(root):
            raise OwnerChanged(f"{owner['kind']} `{key_of(owner)}` is being deleted: nothing is made for it")
        live = await self._made(obj) if known is None else None
        live = live or await self._apply(owner, obj)
        if resource == NAMESPACE and (known is None or uid_of(known) != uid_of(live)):
            self._memory.forget_within(key.name)
        self._memory.note(resource, live, owner, wanted)
        return live

    async def _ensure_unwatched(self, owner: Obj, obj: Obj, wanted: str) -> Obj:
        """The same without events: a change by hand is found at the next look, `recheck_after` from now."""
        resource, key = resource_of(obj), key_of(obj)
        self.recheck_after = self._memory.recheck_seconds
        seen, lately = self._memory.seen(resource, key)
        if seen is not None and lately and self._is_current(owner, seen, wanted):
            return seen
        root = await self.live_root(owner)
        if is_deleting(root):
            raise OwnerChanged(f"{owner['kind']} `{key_of(owner)}` is being deleted: nothing is made for it")
        live = await self._client.get(resource, key) if seen is not None else None
        if live is None or not self._is_current(owner, live, wanted):
            live = (await self._made(obj) if live is None else None) or await self._apply(owner, obj)
            self._memory.note(resource, live, owner, wanted)
        self._memory.saw(resource, live)
        return live

    def _is_current(self, owner: Obj, live: Obj, wanted: str) -> bool:
        return self._memory.is_current(resource_of(live), live, owner, wanted, content_digest(live))

    async def _made(self, obj: Obj) -> Obj | None:
        """The object if it could be created, None where the name is taken."""
        try:
            return await self._client.create(obj)
        except AlreadyExists:
            return None

    async def _apply(self, owner: Obj, obj: Obj) -> Obj:
        resource, key = resource_of(obj), key_of(obj)
        conflict: Conflict | None = None
        for _ in range(_ATTEMPTS):
            live = await self._client.get(resource, key)
            if live is None:
                return await self._client.create(obj)
            if not owned_by(live, owner):
                raise NameTaken(resource, key, _holder(live))
            if is_deleting(live):
                raise StillTerminating(resource, key)
            try:
                live = await self._client.adopt_fields(live)
                return await self._client.apply(obj, uid=uid_of(live), version=version_of(live))
            except Conflict as error:
                conflict = error
        assert conflict is not None
        raise conflict

    async def prune(self, owner: Obj, resources: Iterable[Resource], keep: Iterable[Obj]) -> list[Obj]:
        """Delete what `owner` controls of those kinds, bears our label, and is not in `keep`; what was deleted."""
        kept = {(resource_of(obj), key_of(obj)) for obj in keep}
        deleted = []
        for resource in resources:
            for obj in list(self._cache.owned(resource, uid_of(owner))):
                key = key_of(obj)
                if (
                    (resource, key) in kept
                    or is_deleting(obj)
                    or not is_managed(obj)
                    or not owned_by(obj, owner)
                ):
                    continue
                await self.live_root(owner)
                await self._client.delete(resource, key, uid=uid_of(obj), version=version_of(obj))
                self._memory.forget(resource, key)
                deleted.append(obj)
        return deleted

    async def set_status(self, root: Obj, status: Obj) -> bool:
        """Write the status if it says something new; whether it was written.

        `root` is the object whose spec was read: its generation becomes observedGeneration.
        """
        generation = int(root["metadata"].get("generation", 0))
        resource, key = resource_of(root), key_of(root)
        cached = self._cache.get(resource, key)
        known = cached or root
        if same(
            complete(status, generation, known.get("status") or {}, timestamp()), known.get("status") or {}
        ):
            return False
        # What is known may be written to without a look: the write is refused unless it is that very version still.
        fresh = cached is not None and uid_of(cached) == uid_of(root) and uid_of(root) not in self._verified
        live = cached if cached is not None and fresh else await self.live_root(root)
        conflict: Conflict | None = None
        for _ in range(_ATTEMPTS):
            current = live.get("status") or {}
            wanted = complete(status, generation, current, timestamp())
            if same(wanted, current):
                return False
            try:
                await self._client.apply_status(live, wanted)
            except Conflict as error:
                conflict = error
                self._verified.pop(uid_of(root), None)
                live = await self.live_root(root)
            else:
                return True
        assert conflict is not None
        raise conflict

    async def add_finalizer(self, root: Obj) -> Obj:
        """Put our finalizer on a root that is not being deleted; the live object."""
        if FINALIZER in root["metadata"].get("finalizers", []):
            return root
        live = await self.live_root(root)
        if is_deleting(live):
            raise OwnerChanged(f"{root['kind']} `{key_of(root)}` is being deleted: no finalizer is added")
        if FINALIZER in live["metadata"].get("finalizers", []):
            return live
        live = await self._client.set_finalizer(live, FINALIZER, present=True)
        self._verified[uid_of(root)] = live
        return live

    async def remove_finalizer(self, root: Obj) -> None:
        """Take our finalizer off; fine when the object is gone."""
        live = await self._client.get(resource_of(root), key_of(root))
        if live is None or uid_of(live) != uid_of(root):
            return
        if FINALIZER in live["metadata"].get("finalizers", []):
            await self._client.set_finalizer(live, FINALIZER, present=False)


def _labelled(obj: Obj, owner: Obj) -> Obj:
    """The object as it is sent: with our label and its controller."""
    metadata = obj["metadata"]
    labels = {**metadata.get("labels", {}), MANAGED_BY_LABEL: MANAGED_BY}
    return {**obj, "metadata": {**metadata, "labels": labels, "ownerReferences": [owner_reference(owner)]}}


def _holder(obj: Obj) -> str:
    reference = controller_of(obj)
    if reference is None:
        return "nobody that we know"
    return f"{reference.get('kind')} `{reference.get('name')}` ({reference.get('uid')})"
