"""The middle tier: adapters as they look in pages, in pinned host memory, the least recently used one leaving first.

Only where pages are on an accelerator. On a CPU the pool is host memory already: a copy beside it would serve nobody.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor


class HostTier:
    """Images `[pages, page_elems]` by digest, within `budget` bytes. Used by the loading threads and the engine's."""

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"`budget` must be at least 0 bytes, not {budget}")
        self.budget = budget
        self.used = 0
        self._images: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            return digest in self._images

    def get(self, digest: str) -> Tensor | None:
        """The image, now the most recently used one. Its user may keep it even when it leaves the tier."""
        with self._lock:
            image = self._images.get(digest)
            if image is not None:
                self._images.move_to_end(digest)
            return image

    def put(self, digest: str, image: Tensor) -> None:
        """Keeps an image; others leave for it. One larger than the budget is not kept."""
        if image.nbytes > self.budget:
            return
        with self._lock:
            self._forget(digest)
            while self.used + image.nbytes > self.budget:
                self._forget(next(iter(self._images)))
            self._images[digest] = image
            self.used += image.nbytes

    def forget(self, digest: str) -> None:
        """Drops an image; no error when there is none."""
        with self._lock:
            self._forget(digest)

    def _forget(self, digest: str) -> None:
        image = self._images.pop(digest, None)
        if image is not None:
            self.used -= image.nbytes
