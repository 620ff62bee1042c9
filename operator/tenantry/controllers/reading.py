"""Live reads that do not touch the store: it holds trimmed copies, and only of what bears our label."""

from __future__ import annotations

from tenantry.cluster import Client, Key, NotFound, Obj, Resource


async def read(client: Client, resource: Resource, key: Key) -> Obj | None:
    """The live object, whole, without touching the store; None when there is none."""
    try:
        found: Obj = await client.transport.request("GET", resource.path(*key))
    except NotFound:
        return None
    return found


async def listed(client: Client, resource: Resource, namespace: str = "", **query: str) -> list[Obj]:
    """Live objects, whole, without touching the store. `query`: labelSelector, fieldSelector."""
    found: list[Obj] = []
    more: dict[str, str] = {"limit": "500", **query}
    while True:
        answer = await client.transport.request("GET", resource.path(namespace), query=more)
        found += answer.get("items") or []
        token = answer["metadata"].get("continue")
        if not token:
            return found
        more["continue"] = token
