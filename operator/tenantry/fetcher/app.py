"""The fetcher's door: `POST /v1/transfers` for a proven operator, health and metrics for all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from tenantry.api.common import Digest, DnsLabel, DnsSubdomain, Model
from tenantry.api.identity import IdentityError
from tenantry.api.streams import TooLong, read_bounded
from tenantry.api.tls import Credentials
from tenantry.engines.base import Replica
from tenantry.engines.fetcher import (
    TRANSFERS_PATH,
    Identity,
    Pull,
    SignaturePolicy,
    Transfer,
    Verification,
)

from . import metrics
from .auth import Authenticator
from .transfers import Transfers

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
_TRANSFER: TypeAdapter[Transfer] = TypeAdapter(Transfer)


class ReplicaRequest(Model):
    """Where to push: `<namespace>/<pod>`, its admin port without a path, the uid of its pool."""

    name: Annotated[str, Field(min_length=1, max_length=317)]
    url: Annotated[str, Field(max_length=300, pattern=r"^https?://[A-Za-z0-9.\[\]:-]+$")]
    audience: Annotated[str, Field(min_length=1, max_length=64)]


class IdentityRequest(Model):
    """A signer whom the Adapter names."""

    issuer: Annotated[str, Field(min_length=1, max_length=512)]
    subject: Annotated[str, Field(min_length=1, max_length=512)]


class VerificationRequest(Model):
    """Whose signature the Adapter asks for."""

    policy: SignaturePolicy
    key_ref: DnsLabel | None = None
    identities: Annotated[list[IdentityRequest], Field(max_length=8)] = []


class TransferRequest(Model):
    """The body of `POST /v1/transfers`."""

    digest: Digest
    source: Annotated[str, Field(min_length=1, max_length=512)]
    namespace: DnsLabel | None = None
    secret_ref: DnsSubdomain | None = None
    verification: VerificationRequest | None = None
    replicas: Annotated[list[ReplicaRequest], Field(max_length=1000)] = []

    @model_validator(mode="after")
    def _secrets_have_a_namespace(self) -> TransferRequest:
        if self.secret_ref is not None and self.namespace is None:
            raise ValueError("`namespace` must be given with `secretRef`")
        return self

    def pull(self) -> Pull:
        """What is asked for, as the work's key."""
        asked, verification = self.verification, None
        if asked is not None:
            signers = tuple(Identity(signer.issuer, signer.subject) for signer in asked.identities)
            verification = Verification(asked.policy, asked.key_ref or "", signers)
        return Pull(self.digest, self.source, self.namespace or "", self.secret_ref or "", verification)


def create_app(auth: Authenticator, transfers: Transfers, credentials: Credentials | None = None) -> FastAPI:
    """The ASGI application. Takes new `credentials` as they come; closes the transfers when it shuts down."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = None if credentials is None else asyncio.create_task(credentials.watch())
        yield
        if watching is not None:
            watching.cancel()
        await transfers.close()

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)

    @app.post(TRANSFERS_PATH)
    async def transfer(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return _error(413, "too_large", f"the body must have at most {MAX_BODY_BYTES} bytes")
        try:
            auth.check(request.headers.get("authorization", ""), request.url.path, body)
        except IdentityError as error:
            metrics.refused.inc()
            return _error(401, "unauthorized", str(error))
        try:
            asked = TransferRequest.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or None
            return _error(400, "invalid_request", f"`{field or 'body'}`: {first['msg']}", field)
        replicas = [Replica(r.name, r.url, r.audience) for r in asked.replicas]
        report = transfers.ask(asked.pull(), replicas)
        return Response(_TRANSFER.dump_json(report, by_alias=True), media_type="application/json")

    @app.get("/healthz")
    @app.get("/readyz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Exception) -> Response:
        status = int(getattr(error, "status_code", 404))
        return _error(
            status, "not_found" if status == 404 else "method_not_allowed", "there is no such route"
        )

    @app.exception_handler(Exception)
    async def crashed(request: Request, error: Exception) -> Response:
        log.error("request failed", exc_info=error)
        return _error(500, "internal_error", "the fetcher failed; its log says why")

    return app


async def _body(request: Request) -> bytes | None:
    """The body, or None when it is too large."""
    try:
        return await read_bounded(request.stream(), MAX_BODY_BYTES)
    except TooLong:
        return None


def _error(status: int, code: str, message: str, param: str | None = None) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}, status_code=status
    )
