"""Bodies that others send are read to their limit and no further."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tenantry.api.streams import TooLong, read_bounded


async def test_what_fits_is_read_whole_and_an_endless_body_to_its_limit() -> None:
    asked = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield b"four"

    async def three() -> AsyncIterator[bytes]:
        for chunk in (b"four", b"", b"five5"):
            yield chunk

    assert await read_bounded(three(), 9) == b"fourfive5"
    with pytest.raises(TooLong, match="more than 8 bytes"):
        await read_bounded(three(), 8)
    with pytest.raises(TooLong):
        await read_bounded(endless(), 8)
    assert asked == 3
