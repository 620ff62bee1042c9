"""What one step's adapters look like to the kernels: built once per step on the host, shared by all layers.

Tokens of a step are sorted by adapter, so each adapter's tokens are one segment, a view of the batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tenantry_kernels.paging import LoraShape, PagedAdapter, VocabularyLora, VocabularyModule

BASE = -1
"""Adapter index of rows that use the base model alone."""

VocabularySpans = tuple[tuple[int, int, VocabularyLora], ...]
"""(first row, last row + 1, LoRA of the rows), on the host; rows without such LoRA have no span."""


@dataclass(frozen=True, eq=False)
class Segments:
    """S segments over N distinct adapters. Small tensors live on the pool's device.

    `max_rank` bounds grids and buffers only: no kernel does work for ranks that an adapter does not have.
    """

    tokens: int
    shape: LoraShape
    max_rank: int  # largest rank in this step; 0 = no adapter in the batch: apply_lora returns at once
    spans: tuple[
        tuple[int, int, int], ...
    ]  # (first token, last token + 1, adapter index or BASE), on the host
    starts: Tensor  # int32 [S + 1]: token borders
    adapter: Tensor  # int32 [S]: index of the segment's adapter, or BASE
    ranks: Tensor  # int32 [N, layers, modules]
    scales: Tensor  # float32 [N, layers, modules]
    first: Tensor  # int64 [N, layers, modules]: index in `rows` of A's first row; B's at first + rank
    rows: Tensor  # int64 [sum of all rows]: element offsets into the flat pool
    chunks: (
        Tensor  # int32 [C, 3]: (first token, tokens <= chunk_tokens, adapter index); base rows have no chunk
    )
    chunk_tokens: int  # 16, 32 or 128 by batch size
    embed: VocabularySpans = ()  # tokens whose adapter changes the embeddings
    head: VocabularySpans = ()  # tokens whose adapter changes the head
    reach: int = 0  # elements that a pool must have to hold the pages of all these adapters
    plans: list[tuple[Sequence[int], Tensor] | None] = field(default_factory=list)
    """By a group's first module: the group and what the CPU extension made of the above for it. Empty where the tables
    may change in place: nothing is kept then."""


@dataclass(frozen=True, eq=False)
class _Stack:
    """Tables of one set of adapters, kept while the set stays the same (most decode steps)."""

    adapters: tuple[PagedAdapter, ...]
    max_rank: int
    ranks: Tensor
    scales: Tensor
    first: Tensor
    rows: Tensor
    reach: int = 0


def vocabulary_spans(
    runs: Sequence[tuple[PagedAdapter | None, int]], module: VocabularyModule
) -> VocabularySpans:
    """Which rows of the runs have LoRA on the embeddings or the head."""
    spans: list[tuple[int, int, VocabularyLora]] = []
    row = 0
    for adapter, count in runs:
        part = None if adapter is None else adapter.vocabulary[module]
        if part is not None and count:
            if spans and spans[-1][1] == row and spans[-1][2] is part:
                row, count = spans[-1][0], row + count - spans[-1][0]
                spans.pop()
            spans.append((row, row + count, part))
        row += count
    return tuple(spans)


def spans_of_rows(spans: VocabularySpans, rows: Sequence[int]) -> VocabularySpans:
    """The spans of a selection of rows (ascending), counted in that selection: the head runs on sampled rows alone."""
    found: list[tuple[int, int, VocabularyLora]] = []
    for begin, end, lora in spans:
        first, last = bisect_left(rows, begin), bisect_left(rows, end)
        if first < last:
            found.append((first, last, lora))
    return tuple(found)


class SegmentBuilder:
    """Makes `Segments`; remembers the last ones, and the tables of the last set of adapters."""

    def __init__(self, shape: LoraShape, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.device = torch.device(device)
        self._stack = self._stacked(())
        self._last: tuple[list[tuple[PagedAdapter | None, int]], Segments] | None = None

    def build(self, runs: Sequence[tuple[PagedAdapter | None, int]]) -> Segments:
        """runs: (adapter or None for base rows, number of tokens) in the order of the batch's tokens.

        Neighbouring runs of the same adapter become one segment; empty runs are allowed and vanish.
        """
        merged: list[tuple[PagedAdapter | None, int]] = []
        for adapter, count in runs:
            if count == 0:
                continue
            if merged and merged[-1][0] is adapter:
                merged[-1] = (adapter, merged[-1][1] + count)
            else:
                merged.append((adapter, count))
        distinct = tuple(dict.fromkeys(a for a, _ in merged if a is not None))
        if len(distinct) != len(self._stack.adapters) or any(
            a is not b for a, b in zip(distinct, self._stack.adapters, strict=True)
        ):
            self._stack = self._stacked(distinct)
        index = {id(a): i for i, a in enumerate(distinct)}
        spans: list[tuple[int, int, int]] = []
        token = 0
        for adapter, count in merged:
            spans.append((token, token + count, BASE if adapter is None else index[id(adapter)]))
            token += count
        size = 16 if token <= 128 else 32 if token <= 1024 else 128
        chunks = [
            (at, min(size, end - at), slot)
            for begin, end, slot in spans
            if slot != BASE
            for at in range(begin, end, size)
        ]
        stack = self._stack
        if self._last is not None and merged == self._last[0]:
            return self._last[1]

        def table(values: object, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

        segments = Segments(
            tokens=token,
            shape=self.shape,
            max_rank=stack.max_rank,
            spans=tuple(spans),
            starts=table([0, *(end for _, end, _ in spans)], torch.int32),
            adapter=table([slot for _, _, slot in spans], torch.int32),
            ranks=stack.ranks,
            scales=stack.scales,
            first=stack.first,
            rows=stack.rows,
            chunks=table(chunks, torch.int32).view(-1, 3),
            chunk_tokens=size,
            embed=vocabulary_spans(runs, VocabularyModule.EMBED),
            head=vocabulary_spans(runs, VocabularyModule.HEAD),
            reach=stack.reach,
            plans=[None] * self.shape.modules,
        )
        self._last = merged, segments
        return segments

    def _stacked(self, adapters: tuple[PagedAdapter, ...]) -> _Stack:
        dims = (len(adapters), self.shape.layers, self.shape.modules)
        if not adapters:
            empty = torch.zeros(dims, device=self.device)
            return _Stack(
                (), 0, empty.int(), empty, empty.long(), torch.zeros(0, dtype=torch.int64, device=self.device)
            )
        ranks = torch.stack([a.ranks for a in adapters])
        lengths = torch.tensor([a.rows.numel() for a in adapters], dtype=torch.int64)
        first = torch.stack([a.first for a in adapters])
        _check(ranks, first, lengths, dims)
        shift = (lengths.cumsum(0) - lengths).view(-1, 1, 1)
        return _Stack(
            adapters=adapters,
            max_rank=int(ranks.max()),
            ranks=ranks.to(self.device, non_blocking=True),
            scales=torch.stack([a.scales for a in adapters]).to(self.device, non_blocking=True),
            first=(first + shift).to(self.device, non_blocking=True),
            rows=torch.cat([a.rows for a in adapters]).to(self.device, non_blocking=True),
            reach=max(a.end for a in adapters),
        )


def _check(ranks: Tensor, first: Tensor, lengths: Tensor, dims: tuple[int, int, int]) -> None:
    """Every index that a kernel follows leads to a row of its own adapter: kernels look none of them up twice."""
    if tuple(ranks.shape) != dims or tuple(first.shape) != dims:
        raise ValueError(
            f"`runs` must hold adapters of {dims[1]} layers and {dims[2]} modules, not {tuple(ranks.shape[1:])}"
        )
    if min(int(ranks.min()), int(first.min())) < 0 or (first + 2 * ranks > lengths.view(-1, 1, 1)).any():
        raise ValueError("`runs` must hold adapters whose tables stay within their own rows")
