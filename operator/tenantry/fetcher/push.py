"""Pushes a verified blob to one engine replica by digest: `PUT /admin/v1/blobs/{digest}`, signed over the digest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tenantry.api.identity import Signer
from tenantry.engines.http import expects

from .errors import printable

CHUNK = 1 << 20


class PushError(Exception):
    """A replica that did not take the blob. `reason` is a word for the status."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        self.message = message
        super().__init__(f"{reason}: {message}")


class Pusher:
    """Speaks to replicas only; their addresses come from the operator, whose request was proven."""

    def __init__(self, signer: Signer, client: httpx.AsyncClient) -> None:
        self._signer = signer
        self._client = client

    async def push(self, url: str, audience: str, digest: str, blob: Path) -> None:
        """Send the blob. Raises PushError."""
        path = f"/admin/v1/blobs/{digest}"
        token = self._signer.sign_hash(audience, path, digest.removeprefix("sha256:"))
        headers = {
            "authorization": f"Bearer {token}",
            "content-type": "application/octet-stream",
            "content-length": str(blob.stat().st_size),
        }
        try:
            response = await self._client.put(
                url + path, content=_chunks(blob), headers=headers, extensions=expects(url, audience)
            )
        except httpx.TimeoutException as error:
            raise PushError("Timeout", f"no answer in time ({type(error).__name__})") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise PushError("Unreachable", printable(str(error)) or type(error).__name__) from error
        if response.status_code not in (200, 201):
            raise _refused(response)


def _refused(response: httpx.Response) -> PushError:
    status = response.status_code
    try:
        error = json.loads(response.content)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        code, message = "", response.text[:200]
    reasons = {"digest_mismatch": "DigestMismatch", "not_wanted": "NotWanted"}
    reason = reasons.get(code, "TooLarge" if status == 413 else "Refused")
    return PushError(reason, printable(f"HTTP {status} {code}: {message}"))


async def _chunks(blob: Path) -> AsyncIterator[bytes]:
    with blob.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK):
            yield chunk
