"""The watch against an API server that misbehaves in every way that real ones do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from gateway_fakes import tenant
from gateway_world import until
from kubernetes.aio.client.configuration import Configuration
from tenantry_gateway import watch
from tenantry_gateway.state import State

Script = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


class Server:
    """Lists what `items` holds; each watch plays the next script, the last one again and again."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.version = 10
        self.scripts: list[Script] = []
        self.lists = 0
        self.watches: list[str] = []
        self.fail_lists = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.lists += 1
            if self.fail_lists:
                self.fail_lists -= 1
                return web.Response(status=500)
            start = int(request.query.get("continue", "0"))
            page = {"resourceVersion": str(self.version)}
            if start + 2 < len(self.items):
                page["continue"] = str(start + 2)
            return web.json_response({"metadata": page, "items": self.items[start : start + 2]})
        self.watches.append(request.query["resourceVersion"])
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        response = web.StreamResponse()
        await response.prepare(request)
        await script(request, response)
        return response


async def send(response: web.StreamResponse, what: str, item: dict[str, Any], version: int) -> None:
    item = {**item, "metadata": {**item.get("metadata", {}), "resourceVersion": str(version)}}
    await response.write(json.dumps({"type": what, "object": item}).encode() + b"\n")


async def forever(_request: web.Request, _response: web.StreamResponse) -> None:
    await asyncio.sleep(3600)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, State]]:
    found, state = Server(), State()
    app = web.Application()
    app.router.add_get("/{path:.*}", found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    api = watch.ApiServer(configuration)
    found.scripts = [forever]
    following = asyncio.create_task(watch.follow(api, watch.kinds(state)[0]))
    yield found, state
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    await api.close()
    await runner.cleanup()


def names(state: State) -> set[str]:
    return set(state.tenants)


async def test_pages_are_put_together_and_events_applied(server: tuple[Server, State]) -> None:
    api, state = server
    api.items = [tenant(f"t{index}", []) for index in range(5)]

    async def script(_request: web.Request, response: web.StreamResponse) -> None:
        whole = json.dumps({"type": "ADDED", "object": tenant("new", [])}).encode() + b"\n"
        await response.write(whole[:50])
        await asyncio.sleep(0.01)
        await response.write(whole[50:])
        await send(response, "DELETED", tenant("t0", []), 12)
        await send(response, "MODIFIED", tenant("t1", [], weight=9), 13)
        await send(response, "BOOKMARK", {}, 20)

    api.scripts = [script, forever]
    await until(lambda: len(api.watches) == 2)
    assert names(state) == {"t1", "t2", "t3", "t4", "new"}
    assert state.tenants["t1"].weight == 9
    assert api.watches == ["10", "20"], "goes on from the bookmark, without a new list"
    assert "tenants" in state.synced


@pytest.mark.parametrize("in_stream", [True, False])
async def test_gone_lists_anew(server: tuple[Server, State], in_stream: bool) -> None:
    api, state = server
    api.items = [tenant("old", [])]

    async def gone(_request: web.Request, response: web.StreamResponse) -> None:
        api.items, api.version = [tenant("new", [])], 99
        await send(response, "ERROR", {"kind": "Status", "code": 410, "message": "too old"}, 0)

    async def refuse(request: web.Request, response: web.StreamResponse) -> None:
        api.items, api.version = [tenant("new", [])], 99
        assert request.transport is not None
        request.transport.close()

    api.scripts = [gone if in_stream else refuse, forever]
    await until(lambda: len(api.watches) == 2)
    assert names(state) == ({"new"} if in_stream else {"old"})
    assert api.watches[1] == ("99" if in_stream else "10"), "a cut alone goes on from where it was"


async def test_failures_keep_the_last_good_state(server: tuple[Server, State]) -> None:
    api, state = server
    api.items = [tenant("kept", [])]

    async def gone(_request: web.Request, response: web.StreamResponse) -> None:
        api.fail_lists = 2
        await send(response, "ERROR", {"kind": "Status", "code": 410}, 0)

    async def nonsense(_request: web.Request, response: web.StreamResponse) -> None:
        await response.write(b"not json\n")

    api.scripts = [nonsense, gone, forever]
    await until(lambda: api.lists >= 3)
    assert names(state) == {"kept"}
    await until(lambda: len(api.watches) == 3, 10)
    assert names(state) == {"kept"}
