"""Pinned adapters: loaded ahead of any request, and never evicted, as long as enough of the pool stays for requests."""

from __future__ import annotations

from collections.abc import Callable

from tenantry_engine.adapters.artifact import Artifact
from tenantry_engine.pages import PagePool


class Pins:
    """On the engine's thread. `most` pages may be pinned, fewer where the pool says so; `load` fills reserved pages."""

    def __init__(self, pool: PagePool, most: int, load: Callable[[str], None]) -> None:
        self._pool = pool
        self._most = most
        self._load = load
        self._pages: dict[str, int] = {}  # digest -> pages that are pinned, or will be once filled

    def keep_only(self, wanted: Callable[[str], bool]) -> None:
        """The others may be evicted again."""
        for digest in [digest for digest in self._pages if not wanted(digest)]:
            del self._pages[digest]
            self._pool.pin(digest, False)

    def forget(self, digest: str) -> None:
        """Its pages are gone, or could not be filled."""
        self._pages.pop(digest, None)

    def bring(self, digest: str, artifact: Artifact) -> None:
        """Begins to load the adapter if there is room; pins one that is filled. Called as often as things change."""
        if digest not in self._pages:
            if artifact.checked is None or artifact.final:
                return
            pages = artifact.checked.plan.pages
            if sum(self._pages.values()) + pages > self._limit:
                return
            if not self._pool.holds(digest):
                if self._pool.reserve(0, digest, pages) is None:
                    return
                self._pages[digest] = pages
                self._load(digest)
                self._pool.release((), digest)
                return
            self._pages[digest] = pages
        if self._pool.holds(digest) and artifact.filled:
            self._pool.pin(digest, True)

    @property
    def _limit(self) -> int:
        limit = self._pool.pin_limit
        return self._most if limit is None else min(self._most, limit)
