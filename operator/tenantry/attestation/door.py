"""`tenantry-gate`: the gate's port, which the operator alone is heard on, and the check that the kubelet runs.

What crosses it is public or signed: nonces, a certificate request, evidence, the verifier's token, certificates.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final

import httpx
import uvicorn
from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tenantry.api import names
from tenantry.api.common import Model
from tenantry.api.identity import IdentityError, Verifier
from tenantry.api.streams import TooLong, read_bounded

from .gate import Challenge, Gate, GateError, evidence_path, is_open, lease
from .token import MAX_TOKEN_BYTES, Question
from .verifier import MAX_EVIDENCE_BYTES

CHALLENGE_PATH: Final = "/v1/challenge"
ANSWER_PATH: Final = "/v1/answer"
_MAX_BODY_BYTES: Final = MAX_TOKEN_BYTES + (64 << 10)
_AGENT_SECONDS: Final = 10.0

log = logging.getLogger(__name__)


class ChallengeBody(Model):
    """Body of `POST /v1/challenge`: the operator's own nonce."""

    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class AnswerBody(Model):
    """Body of `POST /v1/answer`."""

    token: Annotated[str, Field(max_length=MAX_TOKEN_BYTES)] = ""
    certificate: Annotated[str, Field(max_length=16_384)]
    authority: Annotated[str, Field(max_length=65_536)]


class Door:
    """The gate's application."""

    def __init__(self, gate: Gate, folder: Path, identities: Path, audience: str) -> None:
        self._gate = gate
        self._folder = folder
        self._identities = identities
        self._audience = audience
        self.app = Starlette(
            routes=[
                Route(CHALLENGE_PATH, self._challenge, methods=["POST"]),
                Route(ANSWER_PATH, self._answer, methods=["POST"]),
            ]
        )

    async def _challenge(self, request: Request) -> Response:
        try:
            asked = ChallengeBody.model_validate_json(await self._heard(request))
            own, question = self._gate.ask(asked.nonce)
            policy = self._gate.rules()
            evidence = await _evidence(policy.agent_url, question) if policy and policy.agent_url else b""
            found = Challenge(own, question.boot_id, self._gate.request(), evidence, lease(self._folder))
            return JSONResponse(found.wire())
        except ValidationError as error:
            return _invalid(error)
        except GateError as error:
            return _error(error.status, error.code, str(error))

    async def _answer(self, request: Request) -> Response:
        try:
            body = AnswerBody.model_validate_json(await self._heard(request))
            until = self._gate.admit(body.token, body.certificate, body.authority)
        except ValidationError as error:
            return _invalid(error)
        except GateError as error:
            log.error("answer refused: %s: %s", error.code, error)
            return _error(error.status, error.code, str(error))
        return JSONResponse({"expiresAt": until})

    async def _heard(self, request: Request) -> bytes:
        """The body of a request that the operator signed. Raises GateError."""
        try:
            raw = await read_bounded(request.stream(), _MAX_BODY_BYTES)
        except TooLong as error:
            raise GateError(
                "too_large", f"the body must have at most {_MAX_BODY_BYTES} bytes", 413
            ) from error
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        try:
            verifier = Verifier.load(self._audience, self._identities)
            verifier.verify(token, {names.OPERATOR_ISSUER}, request.url.path, sha256(raw).hexdigest())
        except (IdentityError, OSError, ValueError) as error:
            raise GateError("unauthorized", str(error), 401) from error
        return raw


async def _evidence(agent: str, question: Question) -> bytes:
    """What the agent in the pod's sandbox says, bounded. Raises GateError."""
    try:
        async with (
            httpx.AsyncClient(timeout=_AGENT_SECONDS, trust_env=False) as client,
            client.stream("GET", agent + evidence_path(question)) as response,
        ):
            raw = await read_bounded(response.aiter_bytes(), MAX_EVIDENCE_BYTES)
            if response.status_code != 200:
                raise GateError("NoEvidence", f"the attestation agent answers {response.status_code}", 502)
    except TooLong as error:
        raise GateError("NoEvidence", "the attestation agent sends too much", 502) from error
    except (httpx.HTTPError, OSError) as error:
        raise GateError(
            "NoEvidence", f"the attestation agent does not answer: {type(error).__name__}", 502
        ) from error
    return raw


def _invalid(error: ValidationError) -> JSONResponse:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    return _error(400, "invalid_request", f"`{field}`: {first['msg']}")


def _error(status: int, code: str, message: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}, status_code=status
    )


def parser() -> argparse.ArgumentParser:
    """The flags of the process."""
    p = argparse.ArgumentParser(prog="tenantry-gate", description=__doc__)
    p.add_argument(
        "--folder", type=Path, required=True, help="shared with the engine: key, certificate, lease"
    )
    p.add_argument("--policy", type=Path, help="by what tokens are judged; without it none is asked for")
    p.add_argument("--check", action="store_true", help="exit with 0 when the engine may start, else with 1")
    p.add_argument("--identity-dir", type=Path, help="folder with the operator's certificate")
    p.add_argument(
        "--audience", default="", help="uid of the pool; the operator's tokens must be made for it"
    )
    p.add_argument("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104
    p.add_argument("--port", type=int, default=names.ENGINE_GATE_PORT)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parser().parse_args(argv)
    if options.check:
        sys.exit(0 if is_open(options.folder, options.policy is not None, time.time()) else 1)
    if options.identity_dir is None or not options.audience:
        sys.stderr.write("tenantry-gate: `--identity-dir` and `--audience` must be given\n")
        sys.exit(2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    door = Door(Gate(options.folder, options.policy), options.folder, options.identity_dir, options.audience)
    uvicorn.run(
        door.app, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=5
    )


__all__ = ["ANSWER_PATH", "CHALLENGE_PATH", "Door", "main"]
