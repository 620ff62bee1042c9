"""The little of ASGI that the data path needs: reading a bounded body, answering, noticing that the client left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .errors import ApiError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
JSON = "application/json"
DISCARD_BYTES = 16 << 20
DISCARD_SECONDS = 2.0


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


def header(scope: Scope, name: bytes) -> str:
    """The first header of that name, empty when there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""


async def read_body(scope: Scope, receive: Receive, limit: int, timeout: float) -> bytes:
    """The whole body. Raises ApiError 413 over `limit` bytes, 408 after `timeout` seconds; ClientGone."""
    length = header(scope, b"content-length")
    if length.isdecimal() and int(length[:20]) > limit:
        if not header(scope, b"expect"):
            await _discard(receive)
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    break
                parts.append(part)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError as error:
        raise ApiError(
            408, "body_timeout", f"the body must arrive within {timeout:g} s", headers={"connection": "close"}
        ) from error
    await _discard(receive)
    raise _too_large(limit)


async def _discard(receive: Receive) -> None:
    """Read on for a while: a connection closed on bytes in flight is reset, and the client never sees why."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while size < DISCARD_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return


def _too_large(limit: int) -> ApiError:
    # Not all of the body may have been read, so the connection cannot carry another request.
    return ApiError(
        413, "body_too_large", f"the body must have at most {limit} bytes", headers={"connection": "close"}
    )


async def start(send: Send, status: int, headers: dict[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def respond(
    send: Send, status: int, headers: dict[str, str], body: bytes, content_type: str = JSON
) -> None:
    await start(send, status, {"content-type": content_type, "content-length": str(len(body)), **headers})
    await send({"type": "http.response.body", "body": body})


class Watch:
    """Cancels the current task when the client leaves. Begins when the body was read; `stop` before the last byte.

    So a request ends in all three windows: while it waits in the queue, for its first token, and in mid-stream.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = False
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()

    def stop(self) -> None:
        self._watcher.cancel()
