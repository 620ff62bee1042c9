"""AWS Signature Version 4 for a GET without a body, as S3 and its kin want it.

Paths are signed as they are sent: sources hold only characters that need no escaping.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime

import httpx

from .credentials import AccessKey

_EMPTY = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


def signed_headers(url: str, key: AccessKey, now: datetime | None = None) -> dict[str, str]:
    """The headers that prove the key for one GET of `url`, which has no query."""
    parsed = httpx.URL(url)
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": parsed.netloc.decode(), "x-amz-content-sha256": _EMPTY, "x-amz-date": stamp}
    if key.session:
        headers["x-amz-security-token"] = key.session
    names = ";".join(sorted(headers))
    canonical = "\n".join(
        [
            "GET",
            parsed.raw_path.decode(),
            "",
            *(f"{name}:{headers[name]}" for name in sorted(headers)),
            "",
            names,
            _EMPTY,
        ]
    )
    scope = f"{stamp[:8]}/{key.region}/s3/aws4_request"
    text = "\n".join([_ALGORITHM, stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    derived = f"AWS4{key.secret}".encode()
    for part in scope.split("/"):
        derived = _mac(derived, part)
    signature = _mac(derived, text).hex()
    headers["authorization"] = (
        f"{_ALGORITHM} Credential={key.id}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return headers


def _mac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
