"""Connections to many peers, kept apart: each has a pool of its own.

A pool looks at each of its connections, with a system call, at every request: one for hundreds of replicas would spend
more time on that than on what is asked.
"""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass, field

import httpx

IDLE_SECONDS = 300.0
"""A peer that was not asked for so long is forgotten; no request takes that long."""
LIMITS = httpx.Limits(max_connections=64, max_keepalive_connections=8, keepalive_expiry=30.0)

_Origin = tuple[str, str, int | None]


@dataclass
class _Peer:
    transport: httpx.AsyncHTTPTransport
    used: float = field(default_factory=time.monotonic)


class PerPeer(httpx.AsyncBaseTransport):
    """Sends each request by the pool of the peer that its URL names."""

    def __init__(self, verify: ssl.SSLContext, idle_seconds: float = IDLE_SECONDS) -> None:
        self._verify = verify
        self._idle_seconds = idle_seconds
        self._peers: dict[_Origin, _Peer] = {}

    @property
    def peers(self) -> int:
        """How many are remembered."""
        return len(self._peers)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        origin = (request.url.scheme, request.url.host, request.url.port)
        peer = self._peers.get(origin)
        if peer is None:
            await self._forget_idle()
            transport = httpx.AsyncHTTPTransport(verify=self._verify, trust_env=False, limits=LIMITS)
            peer = self._peers.setdefault(origin, _Peer(transport))
        peer.used = time.monotonic()
        return await peer.transport.handle_async_request(request)

    async def aclose(self) -> None:
        while self._peers:
            _, peer = self._peers.popitem()
            await peer.transport.aclose()

    async def _forget_idle(self) -> None:
        """Now and then: when a peer comes that is not known, for others have gone then."""
        before = time.monotonic() - self._idle_seconds
        idle = [origin for origin, peer in self._peers.items() if peer.used < before]
        gone = [self._peers.pop(origin) for origin in idle]  # at once: others forget while these are closed
        for peer in gone:
            await peer.transport.aclose()
