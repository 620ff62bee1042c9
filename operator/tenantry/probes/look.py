"""Whether something answers at an address: one TCP connection, or one DNS question. Sends nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections.abc import Mapping
from typing import Any, Final

OPEN: Final = "open"
TRY_SECONDS: Final = 2.0
QUESTION: Final = "kubernetes.default.svc.cluster.local"


async def reach(host: str, port: int, *, query: bool = False, seconds: float = TRY_SECONDS) -> str:
    """`open`, or in one word why not: `refused`, `timeout`, `unreachable`, or the name of the error."""
    try:
        async with asyncio.timeout(seconds):
            if query:
                return await _ask(host, port)
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return OPEN
    except TimeoutError:
        return "timeout"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM, errno.EACCES):
            return "unreachable"
        return errno.errorcode.get(error.errno or 0, type(error).__name__)


async def reach_wire(target: Mapping[str, Any]) -> str:
    """The same for a target as the plan writes it."""
    return await reach(str(target["host"]), int(target["port"]), query=bool(target.get("query")))


class _Answer(asyncio.DatagramProtocol):
    def __init__(self, answered: asyncio.Future[str], number: bytes) -> None:
        self._answered = answered
        self._number = number

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if data[:2] == self._number and not self._answered.done():
            self._answered.set_result(OPEN)

    def error_received(self, exc: Exception) -> None:
        if not self._answered.done():
            self._answered.set_exception(exc)


async def _ask(host: str, port: int) -> str:
    """Any answer to the question counts, whatever it says."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[str] = loop.create_future()
    number = os.urandom(2)
    transport, _ = await loop.create_datagram_endpoint(
        lambda: _Answer(answered, number), remote_addr=(host, port)
    )
    try:
        transport.sendto(question(number))
        return await answered
    finally:
        transport.close()


def question(number: bytes) -> bytes:
    """A DNS query (RFC 1035) for the A record of the API server's Service."""
    head = number + struct.pack(">HHHHH", 0x0100, 1, 0, 0, 0)
    labels = b"".join(bytes([len(label)]) + label.encode() for label in QUESTION.split("."))
    return head + labels + b"\0" + struct.pack(">HH", 1, 1)


def nameserver(path: str = "/etc/resolv.conf") -> str | None:
    """The first nameserver that this pod asks."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                words = line.split()
                if words[:1] == ["nameserver"] and len(words) > 1:
                    return words[1]
    except OSError:
        return None
    return None
