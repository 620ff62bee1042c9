"""HTTP/1.1 to the engines: pooled connections that parse with httptools and stop reading when the client is slow.

General clients cost more CPU per streamed chunk than the whole budget of the data path, so this one does only what the
gateway needs. An answer without a framed end (Content-Length or chunked) counts as cut.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import defaultdict
from typing import cast

import httptools

Peer = tuple[str, int, str | None]
"""Address, port, and the name that the certificate must be for (None: no TLS)."""

HIGH_WATER = 64 * 1024
IDLE_SECONDS = 4.0
MAX_IDLE = 256
MAX_HEADERS = 64 * 1024


class UpstreamError(Exception):
    """The engine could not be reached or went away.

    `reused`: on a connection that had been kept, before any answer, so that it may just have been closed for idleness.
    """

    def __init__(self, message: str, reused: bool = False) -> None:
        super().__init__(message)
        self.reused = reused


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.used = False
        self.closed = False
        self.busy = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.header_bytes = 0
        self.chunks: list[bytes] = []
        self.buffered = 0
        self.complete = False
        self.keep_alive = False
        self.head_seen = False
        self.error: UpstreamError | None = None
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.busy or self.complete:
            self.abort()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not HTTP: {type(error).__name__}")
            self.abort()
        else:
            if self.buffered > HIGH_WATER and not self._paused and self.transport is not None:
                self._paused = True
                self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.busy and not self.complete:
            self._fail("the connection was closed")

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.header_bytes += len(name) + len(value)
        if self.header_bytes > MAX_HEADERS:
            raise ValueError("headers too large")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self.head_seen = True
        self._wake()

    def on_body(self, data: bytes) -> None:
        self.chunks.append(data)
        self.buffered += len(data)
        self._wake()

    def on_message_complete(self) -> None:
        if self.status < 200:
            return
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()
        self._wake()

    # one request

    def send(self, data: bytes) -> None:
        self._reset()
        self._parser = httptools.HttpResponseParser(self)
        self.busy = True
        assert self.transport is not None
        self.transport.write(data)

    async def head(self) -> None:
        while not self.head_seen:
            if self.error is not None:
                raise self.error
            await self._wait()

    async def read(self) -> bytes:
        """What has arrived, b"" at the end. Raises UpstreamError when the answer was cut."""
        while not self.chunks:
            if self.complete:
                return b""
            if self.error is not None:
                raise self.error
            await self._wait()
        data = self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)
        self.chunks.clear()
        self.buffered = 0
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()
        return data

    def release(self) -> bool:
        """End the request; True when the connection can carry another."""
        reusable = self.busy and self.complete and self.keep_alive and not self.closed and not self.chunks
        self.busy = False
        self.used = True
        self.idle_since = time.monotonic()
        return reusable

    def abort(self) -> None:
        self.busy = False
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, message: str) -> None:
        if self.error is None:
            self.error = UpstreamError(message, reused=self.used and not self.head_seen)
        self._wake()


class Answer:
    """An answer whose head has arrived. Read it to its end or abort it."""

    def __init__(self, pool: Upstream, address: Peer, connection: _Connection) -> None:
        self._pool = pool
        self._address = address
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    async def read(self, timeout: float) -> bytes:
        """The next bytes, b"" at the end. Raises UpstreamError, TimeoutError (seconds without any byte)."""
        connection = self._connection
        if not connection.chunks and not connection.complete:
            async with asyncio.timeout(timeout):
                data = await connection.read()
        else:
            data = await connection.read()
        if not data:
            self._pool.put(self._address, connection)
        return data

    async def read_all(self, timeout: float, limit: int) -> bytes:
        """The whole body, at most `limit` bytes. `timeout` as in `read`."""
        parts: list[bytes] = []
        size = 0
        while data := await self.read(timeout):
            parts.append(data)
            size += len(data)
            if size > limit:
                self.abort()
                raise UpstreamError(f"the answer is longer than {limit} bytes")
        return b"".join(parts)

    def abort(self) -> None:
        """Close the connection, which tells the engine to stop. Does nothing after the end was read."""
        if self._connection.busy:
            self._connection.abort()


class Upstream:
    """Connections to all engines."""

    def __init__(self, connect_timeout: float = 2.0, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: for engines that are reached by mutual TLS."""
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._idle: defaultdict[Peer, list[_Connection]] = defaultdict(list)

    async def request(
        self,
        method: str,
        address: tuple[str, int],
        path: str,
        *,
        headers: dict[str, str],
        body: bytes,
        head_timeout: float,
        fresh: bool = False,
        server: str | None = None,
    ) -> Answer:
        """Send one request and wait for the head of its answer. `headers` and `path` are ours, never a client's.

        `fresh` asks for a new connection. `server`: by mutual TLS, to whoever has a certificate for that name.
        Raises UpstreamError, TimeoutError (no head in `head_timeout` seconds).
        """
        host, port = address
        netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"{method} {path} HTTP/1.1", f"host: {netloc}", *(f"{k}: {v}" for k, v in headers.items())]
        if body:
            lines.append(f"content-length: {len(body)}")
        data = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        connection = (None if fresh else self._take((*address, server))) or await self._connect(
            host, port, server
        )
        try:
            connection.send(data)
            async with asyncio.timeout(head_timeout):
                await connection.head()
        except BaseException:
            connection.abort()
            raise
        return Answer(self, (*address, server), connection)

    def put(self, address: Peer, connection: _Connection) -> None:
        """Keep a connection for the next request, or close it."""
        idle = self._idle[address]
        if connection.release() and len(idle) < MAX_IDLE:
            idle.append(connection)
        else:
            connection.abort()

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()

    def sweep(self) -> None:
        """Close what has been idle for too long; called now and then."""
        for address, idle in list(self._idle.items()):
            fresh = [c for c in idle if not c.closed and time.monotonic() - c.idle_since < IDLE_SECONDS]
            for connection in idle:
                if connection not in fresh:
                    connection.abort()
            if fresh:
                self._idle[address] = fresh
            else:
                del self._idle[address]

    def _take(self, address: Peer) -> _Connection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if not connection.closed and time.monotonic() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self, host: str, port: int, server: str | None) -> _Connection:
        loop = asyncio.get_running_loop()
        if server is not None and self._tls is None:
            raise UpstreamError("no connection: this gateway has no certificate for mutual TLS")
        tls = None if server is None else self._tls
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    _Connection, host, port, ssl=tls, server_hostname=server
                )
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"no connection: {type(error).__name__}") from error
        return connection
