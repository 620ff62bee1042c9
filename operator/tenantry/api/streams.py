"""Bodies that others send: read up to a limit and no further."""

from __future__ import annotations

from collections.abc import AsyncIterable


class TooLong(Exception):
    """A body has more bytes than it may have."""


async def read_bounded(chunks: AsyncIterable[bytes], limit: int) -> bytes:
    """All that comes. Raises TooLong once that is more than `limit` bytes; the rest is never asked for."""
    raw = bytearray()
    async for chunk in chunks:
        raw += chunk
        if len(raw) > limit:
            raise TooLong(f"more than {limit} bytes")
    return bytes(raw)
