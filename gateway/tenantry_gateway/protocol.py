"""Bounds on what comes before a body: uvicorn alone waits for ever for headers and takes any number of them."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10


def bounded(header_timeout: float) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn: request line and headers within 64 KiB and `header_timeout` seconds."""

    class BoundedProtocol(HttpToolsProtocol):
        _header_bytes = 0
        _in_headers = True
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_headers:
                if self._deadline is None:
                    self._expect_headers()
                self._header_bytes += len(data)
            super().data_received(data)
            if self._in_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                )
                self.transport.close()

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._header_bytes = 0
            self._cancel()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_headers = True

        def _expect_headers(self) -> None:
            self._deadline = self.loop.call_later(header_timeout, self._give_up)

        def _give_up(self) -> None:
            self._deadline = None
            if self._in_headers and not self.transport.is_closing():
                self.transport.close()

        def _cancel(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return BoundedProtocol
