"""Brings adapters into pages, off the step path: disk (mmap by digest), pinned host memory, pages of the pool.

On a CPU the last two are one: tensors go from the mapped file straight into their pages. On a GPU an adapter is built
once as it will look in pages, in pinned host memory, and then goes over page by page on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tenantry_kernels import PagedAdapter, place, write_adapter, write_vocabulary
from torch import Tensor

from tenantry_engine.adapters.check import CheckedAdapter
from tenantry_engine.adapters.host import HostTier
from tenantry_engine.adapters.safetensors_file import read_tensor
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.digest import split_blob
from tenantry_engine.errors import EngineError

_SHARE_OF_MEMORY = 0.125

Cut = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The part of a module's a `[rank, in]` and b `[out, rank]` that this process holds."""


def whole(module: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """No cut: this process holds the whole model."""
    return a, b


def host_budget(accelerator: bool, asked: int | None, available: int) -> int:
    """Bytes of the host tier: as told, else an eighth of the `available` memory; none on a CPU. Raises EngineError."""
    if not accelerator:
        if asked is not None:
            raise EngineError(
                "`--adapter-host-bytes` must be left out on a CPU: its pages are in host memory already"
            )
        return 0
    if asked is not None and asked < 1:
        raise EngineError(f"`--adapter-host-bytes` must be at least 1, not {asked}")
    return int(available * _SHARE_OF_MEMORY) if asked is None else asked


class PageLoader:
    """`fill` and `prefetch` run on background threads, everything else on the engine's.

    `memory`: `[pages, page_elems]`, the pool. `host_bytes`: budget of the host tier; 0 = there is none.
    """

    def __init__(self, store: BlobStore, memory: Tensor, host_bytes: int = 0, cut: Cut = whole) -> None:
        self._store = store
        self._memory = memory
        self._cut = cut
        self.host = HostTier(host_bytes)
        self._stream: torch.cuda.Stream | None = None
        if memory.is_cuda:
            self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]

    def place(self, checked: CheckedAdapter, pages: Sequence[int]) -> PagedAdapter:
        """Where everything lies once the pages are filled."""
        return place(checked.plan, pages, checked.scales, checked.vocabulary_scales)

    def settled(self) -> torch.cuda.Event | None:
        """What the pages' last users have queued on the device: `fill` waits for it. None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._memory.device))
        return event

    def fill(
        self, digest: str, checked: CheckedAdapter, pages: Sequence[int], after: torch.cuda.Event | None
    ) -> None:
        """Writes the adapter into its pages; returns when they may be used. Raises AdapterError Corrupt, OSError."""
        if not self.host.budget:
            self._write(digest, checked, self._memory, self.place(checked, pages))
            return
        image = self._image(digest, checked)
        if self._stream is None:
            self._copy(image, pages)
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._copy(image, pages)
            self._stream.synchronize()

    def prefetch(self, digest: str, checked: CheckedAdapter) -> None:
        """A request waits that will need the adapter: brings it one tier up. Raises AdapterError Corrupt, OSError."""
        if self.host.budget:
            self._image(digest, checked)
        else:
            self._store.read_ahead(digest)

    def forget(self, digest: str) -> None:
        """The bytes are not wanted any more, or wrong."""
        self.host.forget(digest)

    def _copy(self, image: Tensor, pages: Sequence[int]) -> None:
        for page, part in zip(pages, image, strict=True):
            self._memory[page].copy_(part, non_blocking=True)

    def _image(self, digest: str, checked: CheckedAdapter) -> Tensor:
        """The adapter as it looks in pages, from the host tier or built from disk."""
        image = self.host.get(digest)
        if image is None:
            plan = checked.plan
            image = torch.zeros(
                plan.pages, plan.page_elems, dtype=self._memory.dtype, pin_memory=self._stream is not None
            )
            self._write(digest, checked, image, self.place(checked, range(plan.pages)))
            self.host.put(digest, image)
        return image

    def _write(self, digest: str, checked: CheckedAdapter, memory: Tensor, paged: PagedAdapter) -> None:
        # Not closed by hand: an error's traceback holds views of the bytes, and closing would hide the error.
        _, file = split_blob(memoryview(self._store.verified(digest)))
        for (layer, module), (a, b) in checked.tensors.items():
            halves = self._cut(module, read_tensor(file, a), read_tensor(file, b))
            write_adapter(memory, paged, layer, module, *halves)
        for key, (a, b) in checked.vocabulary.items():
            write_vocabulary(memory, paged, key, read_tensor(file, a), read_tensor(file, b))
