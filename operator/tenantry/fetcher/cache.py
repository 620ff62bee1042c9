"""Adapter blobs on disk, under their digest and nothing else; complete or not there.

    blobs/<hex>/blob               the bytes, as they travel to replicas
    blobs/<hex>/sources/<sha256>   one file per place that was seen to deliver them; it holds what signatures speak of
    tmp/                           downloads in progress, emptied at start

Knowing a digest is no right to its bytes: a place (a source, with the credentials that it was read with) counts only
after it delivered them itself.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import FetchError, Reason


class Cache:
    """Least recently used blobs leave when `max_bytes` would be exceeded, those in use never."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._blobs = folder / "blobs"
        self._tmp = folder / "tmp"
        self._max_bytes = max_bytes
        self._used: dict[str, int] = {}
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._tmp.mkdir(parents=True)
        self._blobs.mkdir(exist_ok=True)

    def find(self, digest: str, place: str) -> Path | None:
        """The blob, when this place is known to deliver it."""
        folder = self._folder(digest)
        if not self.subject(digest, place) or not (folder / "blob").exists():
            return None
        os.utime(folder / "blob")
        return folder / "blob"

    def subject(self, digest: str, place: str) -> str:
        """The digest that a signature of what this place delivered speaks of; "" when it delivered nothing."""
        try:
            return (self._folder(digest) / "sources" / _mark(place)).read_text()
        except FileNotFoundError:
            return ""

    def scratch(self) -> Path:
        """A new name for a download, on the same file system."""
        return self._tmp / uuid.uuid4().hex

    def add(self, scratch: Path, digest: str, place: str, subject: str) -> Path:
        """Take over a complete download whose digest was verified. Raises FetchError when it does not fit."""
        folder = self._folder(digest)
        self._make_room(scratch.stat().st_size, digest)
        (folder / "sources").mkdir(parents=True, exist_ok=True)
        scratch.replace(folder / "blob")
        (folder / "sources" / _mark(place)).write_text(subject)
        return folder / "blob"

    def drop(self, digest: str) -> None:
        """Forget a blob, e.g. because a receiver found it damaged."""
        shutil.rmtree(self._folder(digest), ignore_errors=True)

    @contextmanager
    def hold(self, digest: str) -> Iterator[None]:
        """Keep the blob from being evicted."""
        self._used[digest] = self._used.get(digest, 0) + 1
        try:
            yield
        finally:
            self._used[digest] -= 1
            if not self._used[digest]:
                del self._used[digest]

    def size(self) -> int:
        """Bytes of all complete blobs."""
        return sum(size for _, size, _ in self._entries())

    def _make_room(self, wanted: int, keep: str) -> None:
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, digest in entries:
            if total + wanted <= self._max_bytes:
                return
            if digest != keep and digest not in self._used:
                self.drop(digest)
                total -= size
        if total + wanted > self._max_bytes:
            raise FetchError(
                Reason.TOO_LARGE, f"the cache of {self._max_bytes} bytes is full of blobs in use"
            )

    def _entries(self) -> list[tuple[float, int, str]]:
        """(last use, bytes, digest) of every complete blob."""
        found: list[tuple[float, int, str]] = []
        for folder in self._blobs.iterdir():
            try:
                stat = (folder / "blob").stat()
            except FileNotFoundError:
                continue
            found.append((stat.st_mtime, stat.st_size, f"sha256:{folder.name}"))
        return found

    def _folder(self, digest: str) -> Path:
        algorithm, _, value = digest.partition(":")
        if algorithm != "sha256" or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            raise ValueError("`digest` must be sha256:<64 hex digits>")
        return self._blobs / value


def _mark(place: str) -> str:
    return hashlib.sha256(place.encode()).hexdigest()
