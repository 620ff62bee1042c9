"""The admin port: the declared adapters, their bytes, load, drain, health and metrics (docs/reference/wire.md)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tenantry_engine.adapters.store import BlobStore, DigestMismatchError, TooLargeError
from tenantry_engine.digest import is_digest, most_blob_bytes
from tenantry_engine.errors import RequestError
from tenantry_engine.identity import FETCHER, GATEWAY, OPERATOR, Verifier
from tenantry_engine.ipc.messages import Facts
from tenantry_engine.server.http import authorize, guarded, json_response, read_body
from tenantry_engine.server.schemas import DeclareBody, SmokeBody, parse


class Asked(Protocol):
    """Whatever serves behind the admin port: the engine's link, or the agent that stands before another engine."""

    draining: bool
    lost: asyncio.Event

    @property
    def facts(self) -> Facts: ...
    @property
    def healthy(self) -> bool: ...

    async def ask(self, what: str, **arguments: Any) -> Any:
        """The answer to one of the questions below. Raises RequestError."""


class Rendered(Protocol):
    """The series of the replica."""

    def look(self, numbers: dict[str, Any]) -> None: ...
    def render(self) -> bytes: ...


class Admin:
    """The application of the admin port. `verifier` None = `--dev-open`."""

    def __init__(
        self,
        engine: Asked,
        verifier: Verifier | None,
        metrics: Rendered,
        smoke: Callable[[str, str, str], Awaitable[int]],
    ) -> None:
        """`smoke` runs (served name, digest, tenant's uid) on a short prompt."""
        self._engine = engine
        self._smoke_test = smoke
        self._verifier = verifier
        self._metrics = metrics
        self._store = BlobStore(Path(engine.facts.data_dir))
        self.ready = False
        self.app = Starlette(
            routes=[
                Route("/admin/v1/adapters", guarded(self._put_adapters), methods=["PUT"]),
                Route("/admin/v1/adapters", guarded(self._get_adapters), methods=["GET"]),
                Route("/admin/v1/blobs/{digest}", guarded(self._put_blob), methods=["PUT"]),
                Route("/admin/v1/smoke", guarded(self._smoke), methods=["POST"]),
                Route("/admin/v1/load", guarded(self._load), methods=["GET"]),
                Route("/admin/v1/drain", guarded(self._drain), methods=["POST"]),
                *(health := self._health_routes()),
                Route("/metrics", self._render, methods=["GET"]),
            ]
        )
        self.health = Starlette(routes=health)
        """For kubelets, which show no certificate, where the admin port asks for one."""

    def _health_routes(self) -> list[Route]:
        return [
            Route("/healthz", self._healthz, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
        ]

    async def _put_adapters(self, request: Request) -> Response:
        raw = await read_body(request)
        authorize(self._verifier, request, {OPERATOR}, raw)
        body = parse(DeclareBody, raw)
        report = await self._engine.ask(
            "declare",
            fence=(body.fence.epoch, body.fence.counter),
            wanted=[adapter.model_dump() for adapter in body.adapters],
            drain_seconds=body.drainSeconds,
        )
        return json_response(self._whole(report))

    async def _get_adapters(self, request: Request) -> Response:
        authorize(self._verifier, request, {OPERATOR})
        return json_response(self._whole(await self._engine.ask("report")))

    async def _put_blob(self, request: Request) -> Response:
        digest = request.path_params["digest"]
        if not is_digest(digest):
            raise RequestError("the digest must be sha256: and 64 hex digits", param="digest")
        authorize(self._verifier, request, {FETCHER}, body_sha256=digest.removeprefix("sha256:"))
        limit = most_blob_bytes(self._engine.facts.max_adapter_bytes)
        if self._store.has(digest):
            async for _ in request.stream():
                pass
            return json_response({"digest": digest, "stored": True})
        if not await self._engine.ask("wants", digest=digest):
            raise RequestError(
                "no declared adapter lacks these bytes", status=409, code="not_wanted", param="digest"
            )
        with self._store.receive(digest, limit) as incoming:
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
        await self._engine.ask("stored", digest=digest)  # and checked against the base model
        return json_response({"digest": digest, "stored": True}, 201)

    async def _smoke(self, request: Request) -> Response:
        raw = await read_body(request)
        authorize(self._verifier, request, {OPERATOR}, raw)
        body = parse(SmokeBody, raw)
        return json_response({"tokens": await self._smoke_test(body.name, body.digest, body.tenant)})

    async def _load(self, request: Request) -> Response:
        authorize(self._verifier, request, {GATEWAY})
        load = await self._engine.ask("load")
        return json_response({**self._state(), "slots": self._engine.facts.slots, **load})

    async def _drain(self, request: Request) -> Response:
        raw = await read_body(request)
        authorize(self._verifier, request, {OPERATOR}, raw)
        self._engine.draining = True
        return json_response(self._whole(await self._engine.ask("drain")))

    async def _healthz(self, request: Request) -> Response:
        if self._engine.healthy:
            return json_response({"ok": True})
        ended = self._engine.lost.is_set()
        reason = "the engine has ended" if ended else "work waits and no step ends"
        return json_response({"ok": False, "reason": reason}, 503)

    async def _readyz(self, request: Request) -> Response:
        state = self._state()
        return json_response(state, 200 if state["ready"] else 503)

    async def _render(self, request: Request) -> Response:
        with contextlib.suppress(
            TimeoutError, RequestError
        ):  # in a long step the numbers of the last look serve
            async with asyncio.timeout(2):
                self._metrics.look(await self._engine.ask("numbers"))
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    def _state(self) -> dict[str, bool]:
        draining = self._engine.draining
        return {"ready": self.ready and not draining and not self._engine.lost.is_set(), "draining": draining}

    def _whole(self, report: dict[str, Any]) -> dict[str, Any]:
        """The engine's report with what is known here."""
        facts = self._engine.facts
        epoch, counter = report["fence"]
        return {
            "fence": {"epoch": epoch, "counter": counter},
            **self._state(),
            "model": {"name": facts.model_name, "digest": facts.model_digest},
            "capacity": {
                "maxRank": facts.max_rank,
                "maxRegistered": facts.max_registered,
                "slots": facts.slots,
                "pages": report["pages"],
            },
            "adapters": report["adapters"],
            "requests": report["requests"],
            "separation": report["separation"],
        }
