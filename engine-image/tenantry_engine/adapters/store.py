"""Adapter blobs on disk, each in a file that is named by its digest alone.

Nothing that came from outside names a file. A blob is written beside its place and moved there once its digest holds.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
from collections.abc import Iterable, Set
from pathlib import Path
from types import TracebackType

from tenantry_engine.digest import is_digest
from tenantry_engine.errors import AdapterError, EngineError


class BlobStore:
    """The folder of one replica's blobs."""

    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "blobs"
        self._incoming = folder / "incoming"
        try:
            self._blobs.mkdir(parents=True, exist_ok=True)
            self._incoming.mkdir(exist_ok=True)
            for left_over in self._incoming.iterdir():
                left_over.unlink()
        except OSError as error:
            raise EngineError(f"`--data-dir` must be a folder that can be written: {error}") from error

    def has(self, digest: str) -> bool:
        """Whether there is a file for the digest (verified when it is opened by `verified`)."""
        return self._path(digest).exists()

    def receive(self, digest: str, limit: int) -> Incoming:
        """A writer for the blob of a digest, at most `limit` bytes."""
        return Incoming(self._incoming / secrets.token_hex(16), self._path(digest), digest, limit)

    def map(self, digest: str) -> mmap.mmap:
        """The blob, mapped into memory (writes stay private). Raises AdapterError Corrupt when it is not there."""
        try:
            with self._path(digest).open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise AdapterError("Corrupt", "its bytes cannot be read from disk") from error

    def verified(self, digest: str) -> mmap.mmap:
        """The same after its SHA-256 was checked; a file that cannot be read or does not match is removed."""
        try:
            blob = self.map(digest)
        except AdapterError:
            self.remove([digest])
            raise
        if f"sha256:{hashlib.sha256(blob).hexdigest()}" != digest:
            blob.close()
            self.remove([digest])
            raise AdapterError("Corrupt", "its bytes on disk did not match its digest")
        return blob

    def read_ahead(self, digest: str) -> None:
        """Asks the system to read the blob from disk soon. Raises AdapterError Corrupt when it is not there."""
        with self.map(digest) as blob:
            blob.madvise(mmap.MADV_WILLNEED)

    def remove(self, digests: Iterable[str]) -> None:
        """Deletes blobs; those that are not there are no error."""
        for digest in digests:
            self._path(digest).unlink(missing_ok=True)

    def prune(self, keep: Set[str]) -> None:
        """Deletes every blob whose digest is not in `keep`."""
        names = {digest.removeprefix("sha256:") for digest in keep}
        for name in os.listdir(self._blobs):
            if name not in names:
                (self._blobs / name).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise ValueError("a digest must be sha256: and 64 hex digits")
        return self._blobs / digest.removeprefix("sha256:")


class TooLargeError(Exception):
    """More bytes than the limit."""


class DigestMismatchError(Exception):
    """Other bytes than the digest says."""


class Incoming:
    """One blob on its way in; a context manager that leaves nothing behind unless `commit` succeeded."""

    def __init__(self, temporary: Path, final: Path, digest: str, limit: int) -> None:
        self._temporary = temporary
        self._final = final
        self._digest = digest
        self._limit = limit
        self._sha = hashlib.sha256()
        self._size = 0
        self._file = temporary.open("xb")

    def __enter__(self) -> Incoming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, piece: bytes) -> None:
        """Raises TooLargeError."""
        self._size += len(piece)
        if self._size > self._limit:
            raise TooLargeError
        self._sha.update(piece)
        self._file.write(piece)

    def commit(self) -> None:
        """Puts the blob in its place. Raises DigestMismatchError."""
        if f"sha256:{self._sha.hexdigest()}" != self._digest:
            raise DigestMismatchError
        self._file.flush()
        os.replace(self._temporary, self._final)
