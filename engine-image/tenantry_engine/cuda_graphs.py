"""Decode steps on a GPU, recorded once per batch size and replayed: one launch in place of one per kernel.

A recording has fixed shapes, so a step is padded to the next batch size that is recorded: padding rows write nothing,
and belong to no adapter. Steps with adapters have recordings of their own, in which the tables are as large as that
many distinct adapters of the greatest rank need; kernels still do no work for ranks that an adapter does not have.
Every rank of a replica records and replays at the same steps, since it decides by the rows alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from tenantry_kernels import BASE, LoraShape, Segments
from torch import Tensor

from tenantry_engine.batch import Batch
from tenantry_engine.rows import Rows

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Batch sizes that are recorded. None is larger than what one chunk size of `Segments` serves."""

Forward = Callable[[Batch], Tensor]
"""All layers of the model: rows -> hidden states [T, hidden]."""


class Recorder(Protocol):
    """Records what a function queues on the device; calling the result does that again and returns the same tensor."""

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]: ...


@dataclass(frozen=True)
class Key:
    """Which recording."""

    size: int
    lora: bool


def choose(rows: Rows, segments: Segments) -> Key | str:
    """The recording that serves a step, or why none does."""
    if not rows.decodes:
        return "a step with prompts has a shape of its own"
    size = next((size for size in BUCKETS if size >= len(rows.tokens)), None)
    if size is None:
        return f"more than {BUCKETS[-1]} sequences are not recorded"
    if segments.embed:
        return "an adapter changes the embeddings"
    return Key(size, segments.max_rank > 0)


class DecodeGraphs:
    """One rank's recordings. `max_pages`: of one sequence; `max_rank`: of an adapter; `shape`: this rank's part."""

    def __init__(
        self, forward: Forward, recorder: Recorder, shape: LoraShape, *, max_pages: int, max_rank: int
    ) -> None:
        self._forward = forward
        self._recorder = recorder
        self._shape = shape
        self._max_pages = max_pages
        self._max_rank = max_rank
        self._recordings: dict[Key, tuple[_Buffers, Callable[[], Tensor]]] = {}
        self._reasons: set[str] = set()
        self._broken = False

    def run(self, rows: Rows, batch: Batch) -> Tensor:
        """Hidden states [T, hidden] of the step, replayed where that can be, else kernel by kernel."""
        key = "recording failed before" if self._broken else choose(rows, batch.segments)
        if isinstance(key, str):
            self._tell(key)
            return self._forward(batch)
        found = self._recordings.get(key)
        if found is None:
            buffers = _Buffers(key, self._shape, self._max_pages, self._max_rank, batch)
            buffers.load(batch)
            try:
                found = (buffers, self._recorder(lambda: self._forward(buffers.batch)))
            except RuntimeError as error:
                self._broken = True
                self._tell(f"recording {key} failed: {error}")
                return self._forward(batch)
            self._recordings[key] = found
            log.info("recorded decode steps of %d rows, adapters %s", key.size, "on" if key.lora else "off")
        else:
            found[0].load(batch)
        return found[1]()[: len(rows.tokens)]

    def _tell(self, reason: str) -> None:
        """Each reason once: which steps run kernel by kernel, and why."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            log.info("some steps are not replayed: %s", reason)


class _Buffers:
    """The tensors that a recording reads, where it expects them."""

    def __init__(self, key: Key, shape: LoraShape, max_pages: int, max_rank: int, like: Batch) -> None:
        size, device = key.size, like.tokens.device

        def zeros(*dims: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(dims, dtype=dtype, device=device)

        adapters = size if key.lora else 0
        table = (adapters, shape.layers, shape.modules)
        segments = Segments(
            tokens=size,
            shape=shape,
            max_rank=max_rank if key.lora else 0,
            spans=(),
            starts=zeros(size + 1),
            adapter=zeros(size),
            ranks=zeros(*table),
            scales=zeros(*table, dtype=torch.float32),
            first=zeros(*table, dtype=torch.int64),
            rows=zeros(adapters * 2 * shape.layers * shape.modules * max_rank, dtype=torch.int64),
            chunks=zeros(adapters, 3),
            chunk_tokens=like.segments.chunk_tokens,
        )
        self.batch = Batch(
            tokens=zeros(size, dtype=torch.int64),
            positions=zeros(size, dtype=torch.int64),
            slots=zeros(size, dtype=torch.int64),
            page_tables=zeros(size, max_pages),
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens=zeros(size),
            segments=segments,
            sampled_rows=zeros(0, dtype=torch.int64),
        )

    def load(self, step: Batch) -> None:
        """This step's numbers; what is beyond them is padding."""
        own, count = self.batch, step.tokens.shape[0]
        _put(own.tokens, step.tokens, 0)
        _put(own.positions, step.positions, 0)
        _put(own.slots, step.slots, -1)  # nothing is written
        _put(own.context_lens, step.context_lens, 1)  # a row that sees no key at all would not be a number
        own.page_tables[:count, : step.page_tables.shape[1]].copy_(step.page_tables)
        own.page_tables[count:].zero_()
        mine, theirs = own.segments, step.segments
        if not mine.max_rank:
            return
        _put(mine.starts, theirs.starts, theirs.tokens)
        _put(mine.adapter, theirs.adapter, BASE)
        _put(mine.chunks, theirs.chunks, 0)  # no tokens
        for name in ("ranks", "scales", "first", "rows"):
            _put(getattr(mine, name), getattr(theirs, name), None)


def _put(buffer: Tensor, values: Tensor, padding: int | None) -> None:
    """Values first, then padding; None = what lies there is not read."""
    count = values.shape[0]
    buffer[:count].copy_(values)
    if padding is not None:
        buffer[count:].fill_(padding)


class CudaRecorder:
    """Records on a stream of its own; all recordings share one pool of memory, since one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # kernels are compiled now: that cannot be recorded. What it writes is written again
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function()

        def again() -> Tensor:
            graph.replay()
            return result

        return again
