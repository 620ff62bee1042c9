"""Our own copy of the watched objects, trimmed, by kind and key.

Watches, live reads and our own writes all feed it. What is older than what it holds never replaces it: events of one
name may arrive out of order (delete and create are handled apart), and our own write is known before its echo.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tenantry.cluster.objects import content_digest, controller_of, is_older, uid_of, version_of
from tenantry.cluster.resources import Key, Obj, Resource, key_of

from .compact import Compactor

Keys = list[Key]
Trim = Callable[[Obj], Obj]
"""Keeps of an object only what the pure code reads. Must keep apiVersion, kind and metadata."""

_TOMBSTONES = 20_000
"""Deletions that are remembered, so that an answer which was on its way does not bring the object back."""


def trim_default(obj: Obj) -> Obj:
    """All but managedFields and the annotation in which kubectl keeps a second copy of the object."""
    metadata = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    annotations = metadata.get("annotations")
    if annotations and "kubectl.kubernetes.io/last-applied-configuration" in annotations:
        metadata["annotations"] = {
            name: value
            for name, value in annotations.items()
            if name != "kubectl.kubernetes.io/last-applied-configuration"
        }
    return {**obj, "metadata": metadata}


class Change(NamedTuple):
    """What an object's arrival changed in the store."""

    old: Obj | None
    new: Obj | None

    @property
    def differs(self) -> bool:
        """Whether anything but the resourceVersion changed."""
        if self.old is None or self.new is None:
            return self.old is not self.new
        return _comparable(self.old) != _comparable(self.new)


def _comparable(obj: Obj) -> Obj:
    return {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}}


@dataclass(slots=True)
class _Entry:
    obj: Obj
    content: str


class Store:
    """Plain dicts by kind and key. Objects in it are shared: read them, never change them."""

    def __init__(self) -> None:
        self._kinds: dict[Resource, dict[Key, _Entry]] = {}
        self._trims: dict[Resource, Trim] = {}
        self._compactor = Compactor()
        self._owned: dict[tuple[Resource, str], set[Key]] = {}
        self._tombstones: OrderedDict[str, None] = OrderedDict()
        self._watched: frozenset[Resource] | None = None

    def watch(self, resources: Iterable[Resource]) -> None:
        """Say of which kinds events arrive; without a word, of all."""
        self._watched = frozenset(resources)

    def watches(self, resource: Resource) -> bool:
        """Whether what the store holds of a kind follows the cluster."""
        return self._watched is None or resource in self._watched

    def set_trim(self, resource: Resource, trim: Trim) -> None:
        """Choose what is kept of a kind; to be called before the first object arrives."""
        self._trims[resource] = trim

    def get(self, resource: Resource, key: Key) -> Obj | None:
        entry = self._kinds.get(resource, {}).get(key)
        return entry.obj if entry else None

    def list(self, resource: Resource, namespace: str | None = None) -> Iterator[Obj]:
        """All objects of a kind, or those of one namespace, in the order of their keys."""
        kind = self._kinds.get(resource, {})
        for key in sorted(kind):
            if namespace is None or key.namespace == namespace:
                yield kind[key].obj

    def keys(self, resource: Resource) -> Keys:
        """Keys of all objects of a kind, sorted."""
        return sorted(self._kinds.get(resource, {}))

    def count(self, resource: Resource) -> int:
        return len(self._kinds.get(resource, {}))

    def content(self, resource: Resource, key: Key) -> str | None:
        """Hash of the whole object as it arrived, without status and bookkeeping: tells drift from status noise."""
        entry = self._kinds.get(resource, {}).get(key)
        return entry.content if entry else None

    def owned(self, resource: Resource, owner_uid: str) -> Iterator[Obj]:
        """Objects of a kind whose controller has that uid, in the order of their keys."""
        for key in sorted(self._owned.get((resource, owner_uid), ())):
            yield self._kinds[resource][key].obj

    def put(self, resource: Resource, obj: Obj) -> Change | None:
        """Take in an object; None when the store already holds this version or a newer one, or saw its deletion."""
        if uid_of(obj) in self._tombstones:
            return None
        kind = self._kinds.setdefault(resource, {})
        key = key_of(obj)
        entry = kind.get(key)
        if entry is not None:
            known = version_of(entry.obj)
            if version_of(obj) == known or is_older(version_of(obj), known):
                return None
        trim = self._trims.get(resource, trim_default)
        trimmed = trim({"apiVersion": resource.api_version, "kind": resource.kind, **obj})
        new = self._compactor.value(trimmed)
        kind[key] = _Entry(new, content_digest(obj))
        if entry is not None:
            self._disown(resource, key, entry.obj)
        if reference := controller_of(new):
            self._owned.setdefault((resource, reference["uid"]), set()).add(key)
        return Change(entry.obj if entry else None, new)

    def drop(self, resource: Resource, key: Key, uid: str | None = None) -> Change | None:
        """Forget an object; with `uid`, only that incarnation of the name. None when there was nothing to forget."""
        if uid:
            self._tombstones[uid] = None
            while len(self._tombstones) > _TOMBSTONES:
                self._tombstones.popitem(last=False)
        kind = self._kinds.get(resource, {})
        entry = kind.get(key)
        if entry is None or (uid is not None and uid_of(entry.obj) != uid):
            return None
        del kind[key]
        self._disown(resource, key, entry.obj)
        return Change(entry.obj, None)

    def _disown(self, resource: Resource, key: Key, obj: Obj) -> None:
        if reference := controller_of(obj):
            keys = self._owned[resource, reference["uid"]]
            keys.discard(key)
            if not keys:
                del self._owned[resource, reference["uid"]]
