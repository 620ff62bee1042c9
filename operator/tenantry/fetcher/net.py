"""Where the fetcher may connect to: listed origins only, and only to addresses that were checked.

Every request, redirected ones and those to token servers included, goes through `GuardedTransport`. It resolves
the name once, refuses forbidden addresses and connects to the very address it checked, so that a second answer of
the DNS server (rebinding) changes nothing. Certificates are still verified against the name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import httpx

from .errors import FetchError, Reason
from .reference import Origin, parse_host

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[list[str]]]

RESOLVE_SECONDS = 5.0

# Metadata services and the like outside of the link-local ranges. Nobody keeps a registry there.
_NEVER = frozenset(
    ipaddress.ip_address(text)
    for text in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254")
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


async def system_resolver(host: str, port: int) -> list[str]:
    """Addresses of a host as the system resolves them."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def forbidden(address: Address, *, allow_private: bool) -> str | None:
    """Why nothing may connect there, or None. Link-local and metadata addresses stay forbidden in any case."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return forbidden(inner, allow_private=allow_private)
    if address.is_link_local or address in _NEVER:
        return "a link-local or metadata address"
    if address.is_multicast or address.is_unspecified:
        return "a multicast or unspecified address"
    if address.is_global:
        return None
    if allow_private and not _broadcast(address):
        return None
    return "a loopback address" if address.is_loopback else "a private address"


def _broadcast(address: Address) -> bool:
    return address == ipaddress.IPv4Address("255.255.255.255")


@dataclass(frozen=True)
class OriginPolicy:
    """Which hosts an admin listed, and how they are spoken to."""

    allowed: frozenset[Origin]
    plain: frozenset[Origin]
    allow_private: bool

    @classmethod
    def build(cls, allow: Iterable[str], plain_http: Iterable[str], allow_private: bool) -> OriginPolicy:
        """From the flags. Raises ValueError."""
        plain = frozenset(Origin(host, port or 80) for host, port in _hosts(plain_http, "--plain-http"))
        allowed: set[Origin] = set()
        for host, port in _hosts(allow, "--allow-origin"):
            if port is None:
                port = 80 if Origin(host, 80) in plain else 443
            allowed.add(Origin(host, port))
        for origin in sorted(plain - allowed, key=str):
            raise ValueError(f"`--plain-http` {origin} must be listed by `--allow-origin` too")
        return cls(frozenset(allowed), plain, allow_private)

    def base_url(self, host: str, port: int | None) -> str:
        """`scheme://host:port` of a source. Raises FetchError when nobody listed it."""
        origin = self.origin(host, port)
        self.check(origin)
        return f"{'http' if origin in self.plain else 'https'}://{origin}"

    def origin(self, host: str, port: int | None) -> Origin:
        """The host with the port that a connection uses."""
        return Origin(host, port or (80 if Origin(host, 80) in self.plain else 443))

    def check(self, origin: Origin) -> None:
        """Raises FetchError when nobody listed the origin."""
        if origin not in self.allowed:
            raise FetchError(
                Reason.SOURCE_NOT_ALLOWED,
                f"`{origin}` must be listed among the hosts that the fetcher may read (--allow-origin)",
            )


def _hosts(texts: Iterable[str], flag: str) -> list[tuple[str, int | None]]:
    return [parse_host(text, flag) for text in texts]


class GuardedTransport(httpx.AsyncBaseTransport):
    """Sends requests to listed origins at checked addresses. Lives as long as one pull."""

    def __init__(self, policy: OriginPolicy, resolver: Resolver = system_resolver) -> None:
        self._policy = policy
        self._resolver = resolver
        # One pool per name: two names behind one address must not share a connection that proves only one of them.
        self._pools: dict[Origin, tuple[list[str], httpx.AsyncHTTPTransport]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        origin = Origin(url.host.lower(), url.port or (80 if url.scheme == "http" else 443))
        self._policy.check(origin)
        if url.scheme != ("http" if origin in self._policy.plain else "https"):
            raise FetchError(
                Reason.SOURCE_NOT_ALLOWED,
                f"`{origin}` must be spoken to by https unless it is listed by --plain-http",
            )
        if origin not in self._pools:
            addresses = await self._resolve(origin)
            # The system's trust store, or the one that SSL_CERT_FILE names.
            context = ssl.create_default_context()
            self._pools[origin] = (
                addresses,
                httpx.AsyncHTTPTransport(verify=context, trust_env=False, retries=0),
            )
        addresses, pool = self._pools[origin]
        while True:
            pinned = httpx.Request(
                method=request.method,
                url=url.copy_with(host=addresses[0]),
                headers=request.headers,
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": origin.host},
            )
            try:
                return await pool.handle_async_request(pinned)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                # A host may have an address that leads nowhere from here, IPv6 mostly; the others were checked as well.
                if len(addresses) == 1:
                    raise
                del addresses[0]

    async def _resolve(self, origin: Origin) -> list[str]:
        """All addresses of the host, every one of them checked. Raises FetchError."""
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                addresses = await self._resolver(origin.host, origin.port)
        except (OSError, TimeoutError) as error:
            raise FetchError(
                Reason.SOURCE_UNAVAILABLE,
                f"`{origin.host}` cannot be resolved: {error or 'no answer in time'}",
            ) from error
        if not addresses:
            raise FetchError(Reason.SOURCE_UNAVAILABLE, f"`{origin.host}` has no address")
        for text in addresses:
            why = forbidden(ipaddress.ip_address(text), allow_private=self._policy.allow_private)
            if why is not None:
                raise FetchError(
                    Reason.SOURCE_NOT_ALLOWED,
                    f"`{origin.host}` resolves to {why}, which the fetcher never reads",
                )
        return list(dict.fromkeys(addresses))

    async def aclose(self) -> None:
        for _, pool in self._pools.values():
            await pool.aclose()
