"""The adapters of one rank other than 0: this rank's part of each, in the pages that rank 0 has chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tenantry_kernels import PagedAdapter

from tenantry_engine.adapters.base import Base
from tenantry_engine.adapters.check import check
from tenantry_engine.adapters.loading import PageLoader
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.config import LoraConfig
from tenantry_engine.errors import AdapterError
from tenantry_engine.parallel.messages import Fill, Filled

log = logging.getLogger(__name__)


class Parts:
    """Pages are filled on a thread of their own, whose answers go to `tell`."""

    def __init__(
        self,
        store: BlobStore,
        loader: PageLoader,
        base: Base,
        limits: LoraConfig,
        tell: Callable[[Filled], None],
    ) -> None:
        self._store = store
        self._loader = loader
        self._base = base
        self._limits = limits
        self._tell = tell
        self._filler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fill")
        self._adapters: dict[str, tuple[frozenset[int], PagedAdapter]] = {}

    def paged(self, digest: str) -> PagedAdapter:
        """The resident adapter."""
        return self._adapters[digest][1]

    def fill(self, message: Fill) -> None:
        """Fills pages, in the background."""
        after = self._loader.settled()

        def job() -> None:
            try:
                checked = check(memoryview(self._store.verified(message.digest)), self._base, self._limits)
                self._loader.fill(message.digest, checked, message.pages, after)
                self._adapters[message.digest] = (
                    frozenset(message.pages), self._loader.place(checked, message.pages),
                )  # fmt: skip
                self._tell(Filled())
            except AdapterError as error:
                self._tell(Filled(error.message))
            except Exception as error:
                log.exception("an adapter could not be filled")
                self._tell(Filled(f"it could not be read: {type(error).__name__}"))

        self._filler.submit(job)

    def wiped(self, pages: Sequence[int]) -> None:
        """These pages hold nothing any more."""
        for digest, (own, _) in list(self._adapters.items()):
            if not own.isdisjoint(pages):
                del self._adapters[digest]

    def forget(self, digest: str) -> None:
        """Keeps nothing of the adapter in host memory."""
        self._loader.forget(digest)
