"""Who may ask: the operator, by a token over exactly this request that was not seen before."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tenantry.api import names
from tenantry.api.identity import LEEWAY_SECONDS, IdentityError, Verifier

RELOAD_SECONDS = 10.0


class Authenticator:
    """Certificates are read again at most every 10 s, so that a rotated one is known without a restart."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._verifier = Verifier.load(names.FETCHER_AUDIENCE, folder)
        self._loaded = clock()
        self._seen: set[str] = set()
        self._expiries: deque[tuple[float, str]] = deque()

    def check(self, authorization: str, path: str, body: bytes) -> None:
        """Raises IdentityError."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise IdentityError("`authorization` must be a bearer token")
        self._reload()
        claims = self._verifier.verify(token, {names.OPERATOR_ISSUER}, path, hashlib.sha256(body).hexdigest())
        now = self._clock()
        while self._expiries and self._expiries[0][0] < now:
            self._seen.discard(self._expiries.popleft()[1])
        jti = str(claims["jti"])[:128]
        if jti in self._seen:
            raise IdentityError("this token was used before")
        self._seen.add(jti)
        # Kept for the longest life of any token, so that the queue stays ordered.
        self._expiries.append((now + 30 + 2 * LEEWAY_SECONDS + 1, jti))

    def _reload(self) -> None:
        if self._clock() - self._loaded < RELOAD_SECONDS:
            return
        self._loaded = self._clock()
        try:
            self._verifier = Verifier.load(names.FETCHER_AUDIENCE, self._folder)
        except (IdentityError, OSError, ValueError):
            # A half-written folder: the certificates known so far stay valid until it can be read.
            return
