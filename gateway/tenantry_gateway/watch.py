"""List and watch, with nothing between the API server's JSON and the state: no models, no cache of whole objects.

A watch that ends goes on from where it was, one that is too old (410) lists anew, every failure waits a little longer.
The last good state stays in force: with the API server or the operator down, traffic flows on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config
from tenantry.api import names
from tenantry.api.common import GROUP, VERSION

from .state import State

log = logging.getLogger(__name__)
PAGE = 500
WATCH_SECONDS = 300
# Bookmarks come about every minute; a connection silent for longer may be dead without our knowing.
SILENCE_SECONDS = 90.0
MAX_BACKOFF = 15.0
MAX_EVENT = 4 << 20

Item = dict[str, Any]


class WatchError(Exception):
    """The API server refused or cut; `gone` when the position is too old and a new list is needed."""

    def __init__(self, message: str, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class ApiServer:
    """Reads from one API server, as the kubeconfig or the pod's service account says."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._rest = RESTClientObject(configuration)

    @classmethod
    async def connect(cls, kubeconfig: Path | None) -> ApiServer:
        """Raises ConfigException where there is neither."""
        configuration = Configuration()
        if kubeconfig is not None:
            await load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        return cls(configuration)

    async def get(self, path: str, query: dict[str, str], silence: float) -> aiohttp.ClientResponse:
        """An open answer of status 200. Raises WatchError, aiohttp.ClientError, TimeoutError."""
        token = await self._configuration.get_api_key_with_prefix("BearerToken", "authorization")
        headers = {"Accept": "application/json", **({"Authorization": token} if token else {})}
        text = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
        answer = await self._rest.request(  # type: ignore[no-untyped-call]
            "GET",
            f"{self._configuration.host}{path}?{text}",
            headers=headers,
            _request_timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=silence),
        )
        response: aiohttp.ClientResponse = answer.response
        if response.status != 200:
            status = response.status
            response.close()
            raise WatchError(f"GET {path} answered {status}", gone=status == 410)
        return response

    async def close(self) -> None:
        await self._rest.close()


@dataclass(frozen=True)
class Kind:
    """What to watch and whom to tell."""

    name: str
    path: str
    selector: str
    replace: Callable[[list[Item]], None]
    put: Callable[[Item], None]
    drop: Callable[[Item], None]


def kinds(state: State) -> tuple[Kind, ...]:
    """The two kinds that the gateway reads; it needs no right to anything else."""
    return (
        Kind(
            "tenants",
            f"/apis/{GROUP}/{VERSION}/tenants",
            "",
            state.replace_tenants,
            state.put_tenant,
            lambda item: state.drop_tenant(str(item.get("metadata", {}).get("name", ""))),
        ),
        Kind(
            "endpointslices",
            "/apis/discovery.k8s.io/v1/endpointslices",
            f"{names.MANAGED_BY_LABEL}={names.MANAGED_BY}",
            state.replace_slices,
            state.put_slice,
            state.drop_slice,
        ),
    )


async def follow(server: ApiServer, kind: Kind) -> None:
    """Keep the state up to date for ever."""
    backoff, position = 0.0, ""
    while True:
        try:
            if not position:
                position = await _list(server, kind)
                log.info("listed", extra={"kind": kind.name})
            async for event in _watch(server, kind, position):
                position = _apply(kind, event) or position
                backoff = 0.0
        except (
            WatchError,
            aiohttp.ClientError,
            OSError,
            TimeoutError,
            ValueError,
            KeyError,
            ConfigException,
        ) as error:
            if isinstance(error, WatchError) and error.gone:
                position = ""
            backoff = min(MAX_BACKOFF, backoff * 2 + 0.1)
            log.warning(
                "watch interrupted",
                extra={"kind": kind.name, "why": f"{type(error).__name__}: {error}"[:300]},
            )
        await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - spreads reconnects, guards nothing


async def _list(server: ApiServer, kind: Kind) -> str:
    """Replace all of the kind; returns the position to watch from."""
    items: list[Item] = []
    query = {"limit": str(PAGE), **({"labelSelector": kind.selector} if kind.selector else {})}
    while True:
        async with await server.get(kind.path, query, 30.0) as response:
            page = orjson.loads(await response.read())
        items += page.get("items") or []
        more = page["metadata"].get("continue")
        if not more:
            kind.replace(items)
            return str(page["metadata"]["resourceVersion"])
        query["continue"] = more


async def _watch(server: ApiServer, kind: Kind, position: str) -> AsyncIterator[Item]:
    query = {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": position,
        "timeoutSeconds": str(WATCH_SECONDS + random.randrange(WATCH_SECONDS)),  # noqa: S311
        **({"labelSelector": kind.selector} if kind.selector else {}),
    }
    async with await server.get(kind.path, query, SILENCE_SECONDS) as response:
        buffer = bytearray()
        async for data in response.content.iter_any():
            buffer += data
            while (end := buffer.find(b"\n")) >= 0:
                line = bytes(buffer[:end])
                del buffer[: end + 1]
                if line:
                    yield orjson.loads(line)
            if len(buffer) > MAX_EVENT:
                raise WatchError("an event is too long")


def _apply(kind: Kind, event: Item) -> str | None:
    """Take one event; returns the new position. Raises WatchError on an ERROR event."""
    what, item = event["type"], event["object"]
    if what == "ERROR":
        raise WatchError(str(item.get("message", "error event"))[:300], gone=item.get("code") in (410, None))
    if what in ("ADDED", "MODIFIED"):
        kind.put(item)
    elif what == "DELETED":
        kind.drop(item)
    position = item.get("metadata", {}).get("resourceVersion")
    return None if position is None else str(position)
