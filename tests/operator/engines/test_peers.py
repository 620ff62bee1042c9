"""Many peers: none sees another's connections, and those that are gone are forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
from tenantry.engines.peers import PerPeer


class Peer:
    """Answers every request with its own port, and counts connections."""

    connections = 0

    async def start(self) -> str:
        self.closed = asyncio.Event()
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{self.port}/"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        body = str(self.port).encode()
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        except asyncio.IncompleteReadError:
            self.closed.set()
            writer.close()


@pytest.fixture
async def peers() -> AsyncIterator[list[tuple[Peer, str]]]:
    made = [Peer() for _ in range(3)]
    yield [(peer, await peer.start()) for peer in made]
    for peer in made:
        peer.server.close()


async def test_each_peer_is_asked_on_one_connection_that_stays(peers: list[tuple[Peer, str]]) -> None:
    transport = PerPeer(httpx.create_ssl_context(trust_env=False))
    async with httpx.AsyncClient(transport=transport) as client:
        for _ in range(3):
            for peer, url in peers:
                assert (await client.get(url)).text == str(peer.port)
        assert [peer.connections for peer, _ in peers] == [1, 1, 1]
        assert transport.peers == 3
    assert transport.peers == 0


async def test_a_peer_that_nobody_asks_any_more_is_forgotten(peers: list[tuple[Peer, str]]) -> None:
    transport = PerPeer(httpx.create_ssl_context(trust_env=False), idle_seconds=0.0)
    async with httpx.AsyncClient(transport=transport) as client:
        for _, url in peers:
            await client.get(url)
        assert transport.peers == 1
        async with asyncio.timeout(5):
            for peer, _ in peers[:2]:
                await peer.closed.wait()
        assert not peers[2][0].closed.is_set()


def slowly(close: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], Coroutine[Any, Any, None]]:
    """Lets others run while it closes, as a connection by TLS does."""

    async def closing() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        await close()

    return closing


async def test_two_that_come_at_once_forget_the_others_once(
    peers: list[tuple[Peer, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = PerPeer(httpx.create_ssl_context(trust_env=False), idle_seconds=300.0)
    fourth = Peer()
    urls = [url for _, url in peers] + [await fourth.start()]
    async with httpx.AsyncClient(transport=transport) as client:
        await asyncio.gather(*(client.get(url) for url in urls[:2]))
        monkeypatch.setattr(transport, "_idle_seconds", 0.0)
        for known in transport._peers.values():
            monkeypatch.setattr(known.transport, "aclose", slowly(known.transport.aclose))
        answers = await asyncio.gather(*(client.get(url) for url in urls[2:]))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert transport.peers == 2
    fourth.server.close()
