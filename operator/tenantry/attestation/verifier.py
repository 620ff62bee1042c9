"""Asks a verifier to appraise evidence: the REST interface of attestation services such as Trustee's.

`POST <url>` with `verification_requests`; the answer is a signed token (a JWT) as text or as a JSON string. Whatever
comes back is judged by `token.verify`; here it is only bounded in size and time.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from typing import Final

import httpx

from tenantry.api.config import VerifierService

from .token import MAX_TOKEN_BYTES, Question

MAX_EVIDENCE_BYTES: Final = 4 << 20
_MAX_ANSWER_BYTES: Final = MAX_TOKEN_BYTES + 16


class VerifierUnavailable(Exception):
    """No verdict: unreachable, too slow, or its own failure. To be asked again."""


class VerifierRefusal(Exception):
    """The verifier looked at the evidence and refused it."""


class VerifierClient:
    """Speaks to one verifier, as an admin configured it: no proxies, no redirects, no tenant's word in it."""

    def __init__(self, service: VerifierService) -> None:
        self._service = service
        verify: ssl.SSLContext | bool = True
        if service.ca:
            verify = ssl.create_default_context(cadata=service.ca)
        self._client = httpx.AsyncClient(verify=verify, follow_redirects=False, trust_env=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def appraise(self, question: Question, evidence: bytes) -> str:
        """The verifier's token. Raises VerifierUnavailable, VerifierRefusal."""
        request = {
            "tee": self._service.tee,
            "evidence": base64.urlsafe_b64encode(evidence).rstrip(b"=").decode(),
            "runtime_data": {"structured": question.runtime_data()},
            "runtime_data_hash_algorithm": "sha384",
        }
        try:
            async with asyncio.timeout(self._service.timeout_seconds):
                status, raw = await self._post({"verification_requests": [request], "policy_ids": []})
        except TimeoutError as error:
            raise VerifierUnavailable(f"no answer within {self._service.timeout_seconds} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise VerifierUnavailable(str(error)[:256] or type(error).__name__) from error
        if status >= 500 or status == 429:
            raise VerifierUnavailable(f"HTTP {status}")
        if status != 200:
            raise VerifierRefusal(f"HTTP {status}")
        return _token(raw)

    async def _post(self, payload: object) -> tuple[int, bytes]:
        """Status and body; of a body that is too long only so much that `verify` refuses it."""
        raw = bytearray()
        async with self._client.stream("POST", self._service.url, json=payload) as response:
            async for chunk in response.aiter_bytes():
                raw += chunk
                if len(raw) > _MAX_ANSWER_BYTES:
                    break
            return response.status_code, bytes(raw)


def _token(raw: bytes) -> str:
    text = raw.decode("ascii", "replace").strip()
    if text.startswith('"'):
        try:
            found = json.loads(text)
        except ValueError:
            return text
        return found if isinstance(found, str) else text
    return text
