"""The admin port: the declared adapters, their bytes, load, drain, health and metrics (docs/reference/wire.md)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tenantry_engine.adapters.registry import Declaration
from tenantry_engine.adapters.store import DigestMismatchError, TooLargeError
from tenantry_engine.digest import MAX_CONFIG_BYTES, is_digest
from tenantry_engine.engine import Engine
from tenantry_engine.errors import RequestError
from tenantry_engine.identity import FETCHER, GATEWAY, OPERATOR, Verifier
from tenantry_engine.server.http import authorize, guarded, json_response, read_body
from tenantry_engine.server.metrics import Metrics
from tenantry_engine.server.schemas import DeclareBody, parse


class Admin:
    """The application of the admin port. `verifier` None = `--dev-open`."""

    def __init__(
        self, engine: Engine, model_digest: str, verifier: Verifier | None, metrics: Metrics
    ) -> None:
        self._engine = engine
        self._digest = model_digest
        self._verifier = verifier
        self._metrics = metrics
        self.ready = False
        self.app = Starlette(
            routes=[
                Route("/admin/v1/adapters", guarded(self._put_adapters), methods=["PUT"]),
                Route("/admin/v1/adapters", guarded(self._get_adapters), methods=["GET"]),
                Route("/admin/v1/blobs/{digest}", guarded(self._put_blob), methods=["PUT"]),
                Route("/admin/v1/load", guarded(self._load), methods=["GET"]),
                Route("/admin/v1/drain", guarded(self._drain), methods=["POST"]),
                Route("/healthz", self._healthz, methods=["GET"]),
                Route("/readyz", self._readyz, methods=["GET"]),
                Route("/metrics", self._render, methods=["GET"]),
            ]
        )

    async def _put_adapters(self, request: Request) -> Response:
        raw = await read_body(request)
        authorize(self._verifier, request, {OPERATOR}, raw)
        body = parse(DeclareBody, raw)
        wanted = [Declaration(a.name, a.digest, a.tenant, a.pinned) for a in body.adapters]
        fence = (body.fence.epoch, body.fence.counter)

        def declare() -> dict[str, Any]:
            engine = self._engine
            engine.registry.declare(fence, wanted, time.monotonic() + body.drainSeconds)
            engine.registry.sweep(time.monotonic(), engine.scheduler.in_flight)
            engine.registry.prune_store()
            return self._report()

        return json_response(await asyncio.wrap_future(self._engine.call(declare)))

    async def _get_adapters(self, request: Request) -> Response:
        authorize(self._verifier, request, {OPERATOR})
        return json_response(await asyncio.wrap_future(self._engine.call(self._report)))

    async def _put_blob(self, request: Request) -> Response:
        digest = request.path_params["digest"]
        if not is_digest(digest):
            raise RequestError("the digest must be sha256: and 64 hex digits", param="digest")
        authorize(self._verifier, request, {FETCHER}, body_sha256=digest.removeprefix("sha256:"))
        engine = self._engine
        lora = engine.config.lora
        limit = (lora.max_bytes if lora else 0) + MAX_CONFIG_BYTES + 16
        if engine.registry.store.has(digest):
            async for _ in request.stream():
                pass
            return json_response({"digest": digest, "stored": True})
        if not await asyncio.wrap_future(engine.call(lambda: engine.registry.wants(digest))):
            raise RequestError(
                "no declared adapter lacks these bytes", status=409, code="not_wanted", param="digest"
            )
        with engine.registry.store.receive(digest, limit) as incoming:
            try:
                async for piece in request.stream():
                    incoming.write(piece)
                incoming.commit()
            except TooLargeError as error:
                raise RequestError(
                    f"a blob must be at most {limit} bytes", status=413, code="too_large"
                ) from error
            except DigestMismatchError as error:
                raise RequestError(
                    "the bytes must have the digest of the path", code="digest_mismatch", param="digest"
                ) from error
        await self._checked(digest)
        return json_response({"digest": digest, "stored": True}, 201)

    async def _checked(self, digest: str) -> None:
        """Until the bytes that were stored are checked against the base model."""
        loop = asyncio.get_running_loop()
        checked = asyncio.Event()

        def then() -> None:
            loop.call_soon_threadsafe(checked.set)

        registry = self._engine.registry
        await asyncio.wrap_future(self._engine.call(lambda: registry.blob_stored(digest, then)))
        await checked.wait()

    async def _load(self, request: Request) -> Response:
        authorize(self._verifier, request, {GATEWAY})
        engine = self._engine

        def look() -> dict[str, Any]:
            registered, resident = engine.registry.names()
            return {
                "ready": self.ready and not engine.draining,
                "draining": engine.draining,
                "slots": engine.config.slots,
                "running": engine.scheduler.running,
                "waiting": engine.scheduler.waiting,
                "outstandingTokens": engine.scheduler.outstanding_tokens,
                "registered": registered,
                "resident": resident,
            }

        return json_response(await asyncio.wrap_future(engine.call(look)))

    async def _drain(self, request: Request) -> Response:
        raw = await read_body(request)
        authorize(self._verifier, request, {OPERATOR}, raw)
        self._engine.draining = True
        return json_response(await asyncio.wrap_future(self._engine.call(self._report)))

    async def _healthz(self, request: Request) -> Response:
        if self._engine.healthy:
            return json_response({"ok": True})
        return json_response({"ok": False, "reason": "work waits and no step ends"}, 503)

    async def _readyz(self, request: Request) -> Response:
        ready = self.ready and not self._engine.draining
        return json_response({"ready": ready}, 200 if ready else 503)

    async def _render(self, request: Request) -> Response:
        try:
            look = self._engine.call(lambda: self._metrics.look(self._engine))
            await asyncio.wait_for(asyncio.wrap_future(look), timeout=2)
        except TimeoutError:
            pass  # the engine is in a long step: the numbers of the last look serve
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    def _report(self) -> dict[str, Any]:
        engine = self._engine
        epoch, counter = engine.registry.fence
        lora = engine.config.lora
        return {
            "fence": {"epoch": epoch, "counter": counter},
            "ready": self.ready and not engine.draining,
            "draining": engine.draining,
            "model": {"name": engine.config.model_name, "digest": self._digest},
            "capacity": {
                "maxRank": lora.max_rank if lora else 0,
                "maxRegistered": lora.max_registered if lora else 0,
                "slots": engine.config.slots,
                "pages": asdict(engine.pool.counts()),
            },
            "adapters": [asdict(report) for report in engine.registry.reports(engine.scheduler.in_flight)],
        }
