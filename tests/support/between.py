"""Stands between an operator and its API server: passes requests on, turns some away, breaks watches off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import aiohttp
import yaml
from aiohttp import web
from tenantry.cluster.transport import load_configuration
from yarl import URL

Refuse = Callable[[web.Request], int | None]
"""The status by which a request is turned away; None lets it pass."""


def nobody(request: web.Request) -> int | None:
    return None


def status(code: int) -> dict[str, object]:
    """The API server's way to say no."""
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "injected"}


class Between:
    """On a thread and loop of its own. Whoever uses `kubeconfig` has the rights of the one that it was made from."""

    def __init__(self, behind: Path, folder: Path) -> None:
        self.kubeconfig = folder / "between.kubeconfig"
        self.refuse: Refuse = nobody
        self.refused: Counter[int] = Counter()
        self._behind = behind
        self._watches: set[aiohttp.ClientResponse] = set()
        self._last = b""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), daemon=True)

    def __enter__(self) -> Between:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)

    def cut(self, last: bytes = b"") -> None:
        """End every watch that is open, with `last` as its last words."""

        def close() -> None:
            self._last = last
            for watch in self._watches:
                watch.close()

        self._loop.call_soon_threadsafe(close)

    async def _live(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        given = await load_configuration(self._behind)
        tls = ssl.create_default_context(cafile=given.ssl_ca_cert)
        tls.load_cert_chain(given.cert_file, given.key_file)
        self._host = given.host
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._write(runner.addresses[0][1])
        connector = aiohttp.TCPConnector(ssl=tls, limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout()
        ) as self._session:
            self._ready.set()
            await self._end.wait()
        await runner.cleanup()

    def _write(self, port: int) -> None:
        name = "between"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": name, "user": {}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        code = self.refuse(request)
        if code is not None:
            self.refused[code] += 1
            return web.json_response(status(code), status=code)
        kept = {name: request.headers[name] for name in ("Accept", "Content-Type") if name in request.headers}
        url = URL(self._host + request.raw_path, encoded=True)
        async with self._session.request(
            request.method, url, headers=kept, data=await request.read() or None
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            if "watch" in request.query:
                self._watches.add(answer)
            try:
                with contextlib.suppress(aiohttp.ClientError):
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
            finally:
                self._watches.discard(answer)
            if "watch" in request.query and self._last:
                await response.write(self._last)
            return response


def error_event(code: int) -> bytes:
    """What a watch says before it ends for a reason of its own."""
    return json.dumps({"type": "ERROR", "object": status(code)}).encode() + b"\n"
