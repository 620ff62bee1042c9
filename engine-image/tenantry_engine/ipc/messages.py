"""The messages of the link, in MessagePack: plain data of declared types, so that decoding runs no code.

HTTP -> engine: `Submit`, `Abort` and `Ask`. Engine -> HTTP: `Ready` or `Refused` once, then `Reply` and `Step`.
A frame is the length of its body (4 bytes, little endian) and the body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from tenantry_engine.errors import RequestError
from tenantry_engine.sequence import Scores, Sequence

MAX_FRAME = 256 << 20
"""Bytes of one frame: far beyond any request; a longer one means that the two sides no longer understand each other."""

_LENGTH = struct.Struct("<I")


class Submit(msgspec.Struct, tag=True, array_like=True):
    """The sequences of one request, which stand or fall together. Answered by a `Reply`."""

    call: int
    sequences: list[Sequence]
    digest: str | None  # what the identity says; None in development
    uid: str | None


class Abort(msgspec.Struct, tag=True, array_like=True):
    """These sequences end; nothing more is heard of them."""

    ids: list[str]


class Ask(msgspec.Struct, tag=True, array_like=True):
    """`what` with its arguments, one of `Service`'s questions. Answered by a `Reply`."""

    call: int
    what: str
    arguments: dict[str, Any] = {}


class Fault(msgspec.Struct, array_like=True):
    """A RequestError on its way."""

    message: str
    status: int
    code: str
    param: str | None
    retry_after: int | None

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Faults of the engine itself say no detail: that is in its log."""
        if isinstance(error, RequestError):
            return cls(error.message, error.status, error.code, error.param, error.retry_after)
        return cls("the engine failed", 500, "internal_error", None, None)

    def error(self) -> RequestError:
        """To be raised on the other side."""
        return RequestError(
            self.message, status=self.status, code=self.code, param=self.param, retry_after=self.retry_after
        )


class Reply(msgspec.Struct, tag=True, array_like=True):
    """The answer to a `Submit` or an `Ask`: a result, or a fault."""

    call: int
    result: Any = None
    fault: Fault | None = None


class Happened(msgspec.Struct, array_like=True):
    """A token of a sequence, its end, or both."""

    id: str
    token: int | None = None
    finish: str | None = None
    cached: int = 0  # tokens of the prompt that were not computed, with the first token
    scores: Scores | None = None
    prompt_scores: list[Scores] | None = None


class Ran(msgspec.Struct, array_like=True):
    """What one step was: seconds, rows (tokens), distinct adapters."""

    seconds: float
    rows: int
    adapters: int


class Step(msgspec.Struct, tag=True, array_like=True):
    """All that one turn of the engine's loop brought. Sent for every turn while there is work: a sign of life."""

    events: list[Happened]
    ran: Ran | None


class Facts(msgspec.Struct, frozen=True):
    """What the engine turned out to be, once it is loaded."""

    model_name: str
    model_digest: str
    max_model_len: int
    slots: int
    max_waiting: int
    stall_seconds: float
    data_dir: str
    max_rank: int  # 0 = no adapters
    max_registered: int
    max_adapter_bytes: int


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The engine is loaded and runs."""

    facts: Facts


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The engine cannot start as it was told to; the message says why and what to do."""

    message: str


ToEngine = Submit | Abort | Ask
ToHttp = Ready | Refused | Reply | Step

to_engine = msgspec.msgpack.Decoder(ToEngine)
to_http = msgspec.msgpack.Decoder(ToHttp)
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | ToHttp) -> bytes:
    """The message as one frame."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


class Frames:
    """Cuts a stream of bytes into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete now. Raises ValueError for a frame beyond `MAX_FRAME`."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes must not come over the link")
            if len(self._buffer) - at - _LENGTH.size < size:
                break
            body = bytes(self._buffer[at + _LENGTH.size : at + _LENGTH.size + size])
            at += _LENGTH.size + size
            yield body
        del self._buffer[:at]
