"""Reads and writes of single objects and lists, with the preconditions that keep them safe.

Every object that comes back is reported to `on_object` and every deletion to `on_gone`, so that the store knows our own
writes before their echo arrives. A write is reported as `exclusive` when its preconditions prove that nobody else's
change lies between what was known before and what came back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from tenantry.api.names import FIELD_MANAGER, MANAGED_BY, MANAGED_BY_LABEL

from .errors import NotFound
from .objects import uid_of, version_of
from .resources import Key, Obj, Resource, key_of, resource_of
from .transport import (
    APPLY_PATCH,
    JSON,
    JSON_PATCH,
    MERGE_PATCH,
    METADATA_LIST,
    Transport,
    load_configuration,
)

MANAGED = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
PAGE = 500


def _nothing(resource: Resource, obj: Obj, exclusive: bool) -> None:
    return None


def _gone(resource: Resource, key: Key, uid: str) -> None:
    return None


class Versions(NamedTuple):
    """What a list showed: the state `at` that resourceVersion."""

    at: str
    objects: dict[Key, str]


class Client:
    """Objects are plain dicts as in the API's JSON. All methods raise ApiError (see `errors`)."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.on_object: Callable[[Resource, Obj, bool], None] = _nothing
        self.on_gone: Callable[[Resource, Key, str], None] = _gone

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None, **options: Any) -> Client:
        """A client by kubeconfig, or by the pod's service account when that is None."""
        return cls(Transport(await load_configuration(kubeconfig), **options))

    async def close(self) -> None:
        await self.transport.close()

    async def get(self, resource: Resource, key: Key) -> Obj | None:
        """The live object, None when it does not exist."""
        try:
            obj = await self.transport.request("GET", resource.path(*key))
        except NotFound:
            return None
        return self._seen(resource, obj)

    async def list(
        self, resource: Resource, *, namespace: str = "", labels: str = "", page: int = PAGE
    ) -> AsyncIterator[Obj]:
        """All objects, asked for in pages. Raises Expired when a continuation came too late: start anew."""
        async for answer in self._pages(resource, namespace, labels, page, JSON):
            for item in answer.get("items") or []:
                yield {**item, "apiVersion": resource.api_version, "kind": resource.kind}

    async def versions(self, resource: Resource, *, labels: str = "", page: int = PAGE) -> Versions:
        """The resourceVersion of every object of a kind, by metadata-only lists."""
        found: dict[Key, str] = {}
        at = ""
        async for answer in self._pages(resource, "", labels, page, METADATA_LIST):
            at = answer["metadata"].get("resourceVersion", "")
            found.update((key_of(item), version_of(item)) for item in answer.get("items") or [])
        return Versions(at, found)

    async def _pages(
        self, resource: Resource, namespace: str, labels: str, page: int, accept: str
    ) -> AsyncIterator[Obj]:
        query = {"limit": str(page)}
        if labels:
            query["labelSelector"] = labels
        while True:
            answer = await self.transport.request("GET", resource.path(namespace), query=query, accept=accept)
            yield answer
            token = answer["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def create(self, obj: Obj) -> Obj:
        """POST. Raises AlreadyExists when the name is taken."""
        resource, key = resource_of(obj), key_of(obj)
        answer = await self.transport.request(
            "POST", resource.path(key.namespace), query={"fieldManager": FIELD_MANAGER}, body=obj
        )
        return self._seen(resource, answer)

    async def apply(
        self,
        obj: Obj,
        *,
        uid: str = "",
        version: str = "",
        subresource: str = "",
        manager: str = FIELD_MANAGER,
    ) -> Obj:
        """Server-side apply, forced. With `uid` and `version`, only to that very object: Conflict otherwise."""
        resource, key = resource_of(obj), key_of(obj)
        body = {**obj, "metadata": _conditional(obj["metadata"], uid, version)}
        answer = await self.transport.request(
            "PATCH",
            resource.path(*key, subresource),
            query={"fieldManager": manager, "force": "true"},
            body=body,
            content_type=APPLY_PATCH,
        )
        return self._seen(resource, answer, exclusive=bool(version))

    async def apply_status(self, root: Obj, status: Obj) -> Obj:
        """Server-side apply of the whole status, to that very version of the root."""
        key = key_of(root)
        metadata = {"name": key.name, **({"namespace": key.namespace} if key.namespace else {})}
        body = {
            "apiVersion": root["apiVersion"],
            "kind": root["kind"],
            "metadata": metadata,
            "status": status,
        }
        return await self.apply(body, uid=uid_of(root), version=version_of(root), subresource="status")

    async def merge_patch(
        self, resource: Resource, key: Key, patch: Obj, *, uid: str = "", version: str = ""
    ) -> Obj:
        """JSON merge patch, conditional on uid and resourceVersion where given (Conflict otherwise)."""
        metadata = _conditional(patch.get("metadata", {}), uid, version)
        body = {**patch, **({"metadata": metadata} if metadata else {})}
        answer = await self.transport.request(
            "PATCH",
            resource.path(*key),
            query={"fieldManager": FIELD_MANAGER},
            body=body,
            content_type=MERGE_PATCH,
        )
        return self._seen(resource, answer, exclusive=bool(version))

    async def adopt_fields(self, live: Obj) -> Obj:
        """Turn the fields that our POST set into fields that our applies own, so that dropping one removes it.

        The same upgrade as client-go's csaupgrade: only the entry in managedFields changes, guarded by resourceVersion.
        """
        resource = resource_of(live)
        entries = live["metadata"].get("managedFields", [])
        if not any(_is_posted(entry) for entry in entries):
            return live
        kept = [entry for entry in entries if not _is_applied(entry)]
        upgraded = [{**entry, "operation": "Apply"} if _is_posted(entry) else entry for entry in kept]
        answer = await self.transport.request(
            "PATCH",
            resource.path(*key_of(live)),
            query={"fieldManager": FIELD_MANAGER},
            body=[
                {"op": "replace", "path": "/metadata/managedFields", "value": upgraded},
                {"op": "replace", "path": "/metadata/resourceVersion", "value": version_of(live)},
            ],
            content_type=JSON_PATCH,
        )
        return self._seen(resource, answer, exclusive=True)

    async def give_up(self, live: Obj, field: tuple[str, ...]) -> Obj:
        """Own one field of that very version of the object no longer, without a change of its value.

        `field` is its path in managedFields. An apply that merely stops sending a field which it owns alone removes it.
        """
        resource = resource_of(live)
        entries = [
            _without(entry, field) if entry.get("manager") == FIELD_MANAGER else entry
            for entry in live["metadata"].get("managedFields", [])
        ]
        answer = await self.transport.request(
            "PATCH",
            resource.path(*key_of(live)),
            query={"fieldManager": FIELD_MANAGER},
            body=[
                {"op": "replace", "path": "/metadata/managedFields", "value": entries},
                {"op": "replace", "path": "/metadata/resourceVersion", "value": version_of(live)},
            ],
            content_type=JSON_PATCH,
        )
        return self._seen(resource, answer, exclusive=True)

    async def delete(
        self,
        resource: Resource,
        key: Key,
        *,
        uid: str,
        version: str | None = None,
        propagation: str = "Background",
    ) -> bool:
        """Delete that very object; False when it was gone. Conflict when uid or resourceVersion differ."""
        preconditions = {"uid": uid, **({"resourceVersion": version} if version else {})}
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": preconditions,
            "propagationPolicy": propagation,
        }
        try:
            answer = await self.transport.request("DELETE", resource.path(*key), body=body)
        except NotFound:
            self.on_gone(resource, key, uid)
            return False
        if isinstance(answer, dict) and answer.get("kind") == resource.kind:
            self._seen(resource, answer)  # finalizers or a grace period keep it for now
        else:
            self.on_gone(resource, key, uid)
        return True

    async def replace(self, obj: Obj) -> Obj:
        """PUT, conditional on the resourceVersion that the object carries."""
        resource = resource_of(obj)
        if not version_of(obj):
            raise ValueError(
                "`metadata.resourceVersion` must be set: a replace without it overwrites others' work"
            )
        answer = await self.transport.request(
            "PUT", resource.path(*key_of(obj)), query={"fieldManager": FIELD_MANAGER}, body=obj
        )
        return self._seen(resource, answer, exclusive=True)

    async def set_finalizer(self, live: Obj, finalizer: str, present: bool) -> Obj:
        """Add or remove one finalizer of that very version of the object."""
        finalizers = [name for name in live["metadata"].get("finalizers", []) if name != finalizer]
        if present:
            finalizers.append(finalizer)
        return await self.merge_patch(
            resource_of(live),
            key_of(live),
            {"metadata": {"finalizers": finalizers}},
            uid=uid_of(live),
            version=version_of(live),
        )

    def _seen(self, resource: Resource, obj: Obj, *, exclusive: bool = False) -> Obj:
        obj.setdefault("apiVersion", resource.api_version)
        obj.setdefault("kind", resource.kind)
        self.on_object(resource, obj, exclusive)
        return obj


def _conditional(metadata: Obj, uid: str, version: str) -> Obj:
    return {
        **metadata,
        **({"uid": uid} if uid else {}),
        **({"resourceVersion": version} if version else {}),
    }


def _without(entry: Obj, field: tuple[str, ...]) -> Obj:
    """The entry of managedFields without one field."""

    def cut(fields: Obj, path: tuple[str, ...]) -> Obj:
        head, *rest = path
        if head not in fields:
            return fields
        if rest:
            return {**fields, head: cut(fields[head], tuple(rest))}
        return {name: value for name, value in fields.items() if name != head}

    return {**entry, "fieldsV1": cut(entry.get("fieldsV1") or {}, field)}


def _is_posted(entry: Obj) -> bool:
    return (
        entry.get("manager") == FIELD_MANAGER
        and entry.get("operation") == "Update"
        and not entry.get("subresource")
    )


def _is_applied(entry: Obj) -> bool:
    return (
        entry.get("manager") == FIELD_MANAGER
        and entry.get("operation") == "Apply"
        and not entry.get("subresource")
    )


__all__ = ["MANAGED", "Client", "Versions"]
