"""Writes an adapter blob as it arrives: each file after its length, hashed on the way, bounded before it is read."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator
from typing import BinaryIO

from tenantry.api.digest import CONFIG_FILE

from .artifact import MAX_CONFIG_BYTES
from .errors import FetchError, Reason


def check_size(config: int, whole: int, limit: int) -> None:
    """Raises FetchError(TooLarge) for a configuration or a whole blob of too many bytes."""
    if config > MAX_CONFIG_BYTES or whole > limit:
        raise FetchError(
            Reason.TOO_LARGE,
            f"the adapter has {whole} bytes; it must have at most {limit}, "
            f"{CONFIG_FILE} at most {MAX_CONFIG_BYTES}",
        )


class BlobWriter:
    """Takes the files in the blob's order. `size` is what was written so far, in bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._whole = hashlib.sha256()
        self.size = 0

    async def add(
        self, title: str, size: int, chunks: AsyncIterator[bytes], promised: str | None = None
    ) -> None:
        """Append one file of exactly `size` bytes, whose SHA-256 (hex) may be promised.

        Reads no byte more than that. Raises FetchError(DigestMismatch).
        """
        own = hashlib.sha256()
        self._write(struct.pack("<Q", size))

        def take(chunk: bytes) -> None:
            own.update(chunk)
            self._write(chunk)

        received = 0
        async for chunk in chunks:
            received += len(chunk)
            if received > size:
                break
            await asyncio.to_thread(take, chunk)
        if received != size or promised not in (None, own.hexdigest()):
            raise FetchError(
                Reason.DIGEST_MISMATCH, f"{title} has not the bytes that the source itself promises"
            )

    def finish(self, digest: str) -> None:
        """Raises FetchError(DigestMismatch) when the whole is not what the Adapter names."""
        got = f"sha256:{self._whole.hexdigest()}"
        if got != digest:
            raise FetchError(Reason.DIGEST_MISMATCH, f"`digest` is {digest}, but the source delivers {got}")

    def _write(self, raw: bytes) -> None:
        self._whole.update(raw)
        self._file.write(raw)
        self.size += len(raw)
