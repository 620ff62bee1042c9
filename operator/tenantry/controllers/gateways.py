"""What gateways say of a tenant: whether they follow its new route, and which of its requests are not over.

Asked only while a tenant leaves a place. Gateways are pods of the release, and of the tenant's own namespace where it
has a gateway of its own; pods elsewhere are not believed, whatever their labels say.
"""

from __future__ import annotations

import asyncio

import httpx
from pydantic import BaseModel, ValidationError

from tenantry.api import names
from tenantry.api.streams import TooLong, read_bounded
from tenantry.cluster import POD, Obj
from tenantry.desired.objects import GATEWAY_COMPONENT, OWN_GATEWAY_COMPONENT
from tenantry.placement.moves import GatewayView

from . import pods
from .world import World

TIMEOUT = httpx.Timeout(3.0)
MAX_ANSWER_BYTES = 1 << 20
_SELECTOR = f"{names.COMPONENT_LABEL} in ({GATEWAY_COMPONENT},{OWN_GATEWAY_COMPONENT})"


class _Answer(BaseModel):
    """Uids of pools: those that the route names, and the requests there."""

    routes: list[str]
    requests: dict[str, int]


async def views(world: World, tenant: str) -> list[GatewayView]:
    """One view for each gateway that runs. Raises ApiError when they cannot be listed."""
    found: list[Obj] = []
    for namespace in (world.config.release_namespace, names.tenant_namespace(tenant)):
        async for pod in world.setup.client.list(POD, namespace=namespace, labels=_SELECTOR):
            if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed") and pods.address(pod):
                found.append(pod)
    return list(await asyncio.gather(*(_ask(world, pod, tenant) for pod in found)))


async def _ask(world: World, pod: Obj, tenant: str) -> GatewayView:
    name = pod["metadata"]["name"]
    url = f"{world.gateway_url(pod)}/tenants/{tenant}"
    try:
        async with world.http.stream("GET", url, timeout=TIMEOUT) as response:
            raw = await read_bounded(response.aiter_bytes(), MAX_ANSWER_BYTES)
            if response.status_code != 200:
                return GatewayView(name, silent=True)
        answer = _Answer.model_validate_json(raw)
    except (httpx.HTTPError, OSError, TooLong, ValidationError):
        return GatewayView(name, silent=True)
    return GatewayView(name, routes=frozenset(answer.routes), requests=answer.requests)
