"""HTTP as all sources need it: bounded, redirected by hand, with credentials that never leave their host.

Every hop goes through the guarded transport (`net`), so a redirect leads to listed hosts at checked addresses only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urljoin, urlsplit

import httpx

from tenantry.api.streams import TooLong, read_bounded

from .errors import FetchError, Reason, printable

MAX_REDIRECTS = 3
CHUNK = 1 << 20
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class Session:
    """Requests of one pull to one host, and to where it redirects."""

    def __init__(self, client: httpx.AsyncClient, base: str, host: str) -> None:
        self.client = client
        self.base = base
        self.host = host
        # Headers that prove to the host who asks, for one URL of it.
        self.authorize: Callable[[str], Mapping[str, str]] = lambda _: {}
        # Makes the Authorization header that the host's first 401 asks for; None: a 401 is final.
        self.challenged: Callable[[str], Awaitable[str]] | None = None
        # Whether there are credentials: that decides what an error advises.
        self.identified = False

    @asynccontextmanager
    async def get(
        self, url: str, what: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """The answer with status 200; earlier hops stand in its `history`. Raises FetchError."""
        response = await self._ask(url, headers or {})
        try:
            if response.status_code == 401 and self.challenged is not None and not response.history:
                await response.aclose()
                header = await self.challenged(response.headers.get("www-authenticate", ""))
                self.challenged, self.authorize = None, lambda _: {"authorization": header}
                response = await self._ask(url, headers or {})
            status = response.status_code
            if status == 404:
                raise FetchError(Reason.NOT_FOUND, f"`{self.host}` has no such {what}")
            if status in (401, 403):
                advice = (
                    "the credentials of `secretRef` must be good for it"
                    if self.identified
                    else "it must allow anonymous reads, or `secretRef` must name credentials"
                )
                raise FetchError(
                    Reason.ACCESS_DENIED, f"`{self.host}` answered HTTP {status} for the {what}: {advice}"
                )
            if status != 200:
                raise FetchError(
                    Reason.SOURCE_UNAVAILABLE, f"`{self.host}` answered HTTP {status} for the {what}"
                )
            if response.headers.get("content-encoding", "identity") != "identity":
                raise FetchError(
                    Reason.INVALID_ARTIFACT,
                    f"`{self.host}` must send the {what} as it is, without content-encoding",
                )
            yield response
        finally:
            await response.aclose()

    async def text(self, url: str, what: str, limit: int, headers: Mapping[str, str] | None = None) -> bytes:
        """A whole body of at most `limit` bytes. Raises FetchError."""
        async with self.get(url, what, headers) as response:
            return await bounded(response, limit, f"the {what}")

    async def _ask(self, url: str, headers: Mapping[str, str]) -> httpx.Response:
        """The first answer that is no redirect. What `authorize` gives stays with the first host."""
        home = _origin(url)
        history: list[httpx.Response] = []
        for _ in range(MAX_REDIRECTS + 1):
            own = {"accept-encoding": "identity", **headers}
            if _origin(url) == home:
                own.update(self.authorize(url))
            request = self.client.build_request("GET", url, headers=own)
            response = await self.client.send(request, stream=True)
            if response.status_code not in _REDIRECTS:
                response.history = history
                return response
            await response.aclose()
            history.append(response)
            url = urljoin(url, response.headers.get("location", ""))
        raise FetchError(
            Reason.SOURCE_UNAVAILABLE, f"`{self.host}` redirects more than {MAX_REDIRECTS} times"
        )


async def bounded(response: httpx.Response, limit: int, what: str) -> bytes:
    """The body as it travels, never decompressed. Raises FetchError(TooLarge)."""
    try:
        return await read_bounded(response.aiter_raw(CHUNK), limit)
    except TooLong as error:
        raise FetchError(Reason.TOO_LARGE, f"{what} must have at most {limit} bytes") from error


def transport_fault(host: str, error: Exception) -> FetchError:
    """A broken connection or an unreadable answer, as the status tells it."""
    text = printable(str(error)) or type(error).__name__
    return FetchError(Reason.SOURCE_UNAVAILABLE, f"`{host}`: {text}")


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
