"""Where things lie in the unified pool: KV pages and the rows of adapters. Pure host code, no kernels.

The pool is one tensor `[num_pages, page_elems]` in the model's dtype. A KV page holds `PAGE_TOKENS` tokens of K and V
of all layers. An adapter takes whole pages of the same pool: A lies as `rank` rows of width `in`, B transposed as
`rank` rows of width `out`; rows are contiguous within a page and follow one another closely, in any order of pages.
LoRA of the embeddings and of the head has one half as long as the vocabulary: that half lies as `vocab` rows of width
`rank`, so that no row outgrows a page and a token finds its row at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

PAGE_TOKENS = 16
ROW_ALIGN = 16
"""Rows begin at multiples of this many elements, so that vector loads of any dtype stay aligned."""


_PIECE = 1 << 15


class Module(IntEnum):
    """Linear layers of a decoder block, in the order of every `[layers, modules]` table."""

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741 - the field's name
    GATE = 4
    UP = 5
    DOWN = 6


class VocabularyModule(IntEnum):
    """Modules as wide as the vocabulary, in the order of every `vocabulary` pair."""

    EMBED = 0
    HEAD = 1


QKV = (Module.Q, Module.K, Module.V)
GATE_UP = (Module.GATE, Module.UP)


@dataclass(frozen=True)
class KvShape:
    """What one KV page holds."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def page_elems(self) -> int:
        return self.layers * 2 * self.kv_heads * PAGE_TOKENS * self.head_dim

    def view(self, pool: Tensor) -> Tensor:
        """pool `[num_pages, page_elems]` -> the same memory as `[num_pages, layers, 2, kv_heads, 16, head_dim]`."""
        return pool.view(pool.shape[0], self.layers, 2, self.kv_heads, PAGE_TOKENS, self.head_dim)


@dataclass(frozen=True)
class LoraShape:
    """Widths of the adapted linear layers, one entry per `Module`."""

    layers: int
    in_features: tuple[int, ...]
    out_features: tuple[int, ...]
    vocab: int = 0  # rows of the embeddings and of the head; 0 = these are not adapted

    @property
    def modules(self) -> int:
        return len(self.in_features)

    @property
    def hidden(self) -> int:
        """Width of the embeddings and of the head's input."""
        return self.in_features[0]


@dataclass(frozen=True, eq=False)
class VocabularyLora:
    """LoRA of the embeddings or of the head: `rank` rows of width hidden, and `vocab` rows of width rank.

    Embeddings: B transposed is the narrow half, A transposed the tall one. Head: A is the narrow half, B the tall one.
    Row `v` of the tall half is at `blocks[v // block_rows] + v % block_rows * rank`.
    """

    rank: int
    narrow: Tensor  # int64 [rank]: element offset of each row of the narrow half
    blocks: Tensor  # int64 [n]: element offset of each block; a block fills a page
    block_rows: int  # rows of the tall half in a block (fewer in the last one)
    scale: float = 0.0


VocabularyPair = tuple[VocabularyLora | None, VocabularyLora | None]


@dataclass(frozen=True)
class Layout:
    """Rows of one adapter in its own, still virtual pages `0..pages-1`."""

    pages: int
    page_elems: int
    ranks: Tensor  # int32 [layers, modules]; 0 = not targeted
    first: (
        Tensor  # int64 [layers, modules]: index in `rows` of A's first row; B's first row is at first + rank
    )
    rows: Tensor  # int64 [2 * sum(ranks)]: element offset of each row, virtual page * page_elems + offset in page
    vocabulary: VocabularyPair = (None, None)  # by VocabularyModule


@dataclass(frozen=True, eq=False)
class PagedAdapter:
    """One resident adapter: where its rows are in the flat pool, its true ranks and scales. Compared by identity."""

    ranks: Tensor  # int32 [layers, modules]
    scales: Tensor  # float32 [layers, modules]
    first: Tensor  # int64 [layers, modules], as in Layout
    rows: Tensor  # int64 [2 * sum(ranks)]: element offsets into the flat pool
    vocabulary: VocabularyPair = (None, None)
    end: int = 0  # element of the flat pool behind its last page


def layout(
    shape: LoraShape,
    ranks: Sequence[Sequence[int]],
    page_elems: int,
    vocabulary: tuple[int, int] = (0, 0),
) -> Layout:
    """Pack an adapter with true `ranks[layer][module]` into whole pages; `vocabulary`: ranks of embeddings and head.

    Rows fill a page one after another; a row that does not fit whole goes to the next page.
    Raises ValueError when a row is wider than a page.
    """
    table = torch.tensor([list(row) for row in ranks], dtype=torch.int32)
    if tuple(table.shape) != (shape.layers, shape.modules):
        raise ValueError(
            f"`ranks` must be [{shape.layers} layers, {shape.modules} modules], not {tuple(table.shape)}; "
            "give 0 for a module that the adapter does not target"
        )
    first = torch.zeros((shape.layers, shape.modules), dtype=torch.int64)
    cursor = _Cursor(page_elems)
    rows: list[int] = []
    for layer in range(shape.layers):
        for module in range(shape.modules):
            first[layer, module] = len(rows)
            rank = int(table[layer, module])
            rows += cursor.rows(rank, shape.in_features[module])
            rows += cursor.rows(rank, shape.out_features[module])
    embed, head = (cursor.vocabulary(rank, shape) if rank else None for rank in vocabulary)
    return Layout(
        cursor.pages, page_elems, table, first, torch.tensor(rows, dtype=torch.int64), (embed, head)
    )


class _Cursor:
    """The next free element of an adapter's virtual pages."""

    def __init__(self, page_elems: int) -> None:
        self._page_elems = page_elems
        self._at = 0

    @property
    def pages(self) -> int:
        """Pages begun so far."""
        return -(-self._at // self._page_elems)

    def rows(self, count: int, width: int) -> list[int]:
        """Offsets of `count` rows."""
        step = -(-width // ROW_ALIGN) * ROW_ALIGN
        if step > self._page_elems:
            raise ValueError(
                f"`page_elems` must be at least the widest adapter row ({step} elements), not {self._page_elems}; "
                "this model's pages are too small for adapters on this module"
            )
        found: list[int] = []
        for _ in range(count):
            if self._at % self._page_elems + step > self._page_elems:
                self._at = self.pages * self._page_elems
            found.append(self._at)
            self._at += step
        return found

    def vocabulary(self, rank: int, shape: LoraShape) -> VocabularyLora:
        """The narrow half behind what is there, then the tall half in pages of its own."""
        if not shape.vocab:
            raise ValueError("`shape.vocab` must be the vocabulary's size for LoRA of embeddings or head")
        if rank > self._page_elems:
            raise ValueError(f"`page_elems` must be at least the rank {rank}, not {self._page_elems}")
        narrow = self.rows(rank, shape.hidden)
        block_rows = self._page_elems // rank
        begin, blocks = self.pages, -(-shape.vocab // block_rows)
        left = shape.vocab - (blocks - 1) * block_rows  # rows of the last block
        self._at = (begin + blocks - 1) * self._page_elems + -(-left * rank // ROW_ALIGN) * ROW_ALIGN
        starts = torch.arange(begin, begin + blocks, dtype=torch.int64) * self._page_elems
        return VocabularyLora(rank, torch.tensor(narrow, dtype=torch.int64), starts, block_rows)


def place(
    plan: Layout,
    pages: Sequence[int],
    scales: Sequence[Sequence[float]],
    vocabulary_scales: tuple[float, float] = (0.0, 0.0),
) -> PagedAdapter:
    """Turn a layout into the adapter that occupies `pages` of the pool (in this order).

    scales `[layers][modules]`: alpha / rank (or alpha / sqrt(rank) for rsLoRA), any value where rank is 0;
    `vocabulary_scales` likewise for embeddings and head.
    """
    if len(pages) != plan.pages:
        raise ValueError(f"`pages` must hold {plan.pages} page numbers for this layout, not {len(pages)}")
    numbers = torch.tensor(list(pages), dtype=torch.int64)

    def real(offsets: Tensor) -> Tensor:
        virtual = torch.div(offsets, plan.page_elems, rounding_mode="floor")
        return numbers[virtual] * plan.page_elems + offsets % plan.page_elems if plan.pages else offsets

    embed, head = (
        None
        if part is None
        else replace(part, narrow=real(part.narrow), blocks=real(part.blocks), scale=scale)
        for part, scale in zip(plan.vocabulary, vocabulary_scales, strict=True)
    )
    return PagedAdapter(
        plan.ranks,
        torch.tensor([list(s) for s in scales], dtype=torch.float32),
        plan.first,
        real(plan.rows),
        (embed, head),
        (max(pages, default=-1) + 1) * plan.page_elems,
    )


def write_adapter(pool: Tensor, adapter: PagedAdapter, layer: int, module: int, a: Tensor, b: Tensor) -> None:
    """Copy one module's weights into the adapter's rows, cast to the pool's dtype.

    a `[rank, in]`, b `[out, rank]` as PEFT stores them (lora_A.weight, lora_B.weight).
    """
    rank = int(adapter.ranks[layer, module])
    _check_ranks(rank, a, b)
    first = int(adapter.first[layer, module])
    _write_rows(pool, adapter.rows[first : first + rank], a)
    _write_rows(pool, adapter.rows[first + rank : first + 2 * rank], b.t())


def write_vocabulary(pool: Tensor, adapter: PagedAdapter, module: int, a: Tensor, b: Tensor) -> None:
    """Copy the weights of the embeddings or of the head into the adapter's rows, cast to the pool's dtype.

    As PEFT stores them: EMBED a `[rank, vocab]`, b `[hidden, rank]`; HEAD a `[rank, hidden]`, b `[vocab, rank]`.
    """
    part = adapter.vocabulary[module]
    if part is None:
        raise ValueError(f"`module` {VocabularyModule(module).name} must be one that the layout has")
    _check_ranks(part.rank, a, b)
    narrow, tall = (b.t(), a.t()) if module == VocabularyModule.EMBED else (a, b)
    _write_rows(pool, part.narrow, narrow)
    flat = pool.view(-1)
    most = max(1, _PIECE // part.rank)
    for index, start in enumerate(part.blocks.tolist()):
        rows = tall[index * part.block_rows : (index + 1) * part.block_rows]
        block = flat[start : start + rows.numel()].view(rows.shape)
        for at in range(0, len(rows), most):
            block[at : at + most].copy_(rows[at : at + most])


def _check_ranks(rank: int, a: Tensor, b: Tensor) -> None:
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ValueError(f"`a` and `b` must have the layout's rank {rank}, not {a.shape[0]} and {b.shape[1]}")


def _write_rows(pool: Tensor, where: Tensor, matrix: Tensor) -> None:
    """Rows of `matrix` to the element offsets `where`; neighbours that also lie one after another go together.

    In pieces so small that torch copies each on the calling thread: on a CPU a load takes no core from the steps.
    """
    flat = pool.view(-1)
    width = matrix.shape[1]
    step = -(-width // ROW_ALIGN) * ROW_ALIGN
    most = max(1, _PIECE // step)
    offsets = where.tolist()
    begin = 0
    for end in range(1, len(offsets) + 1):
        follows = end < len(offsets) and offsets[end] == offsets[end - 1] + step
        if follows and end - begin < most:
            continue
        count = end - begin
        target = flat.as_strided((count, width), (step, 1), flat.storage_offset() + offsets[begin])
        target.copy_(matrix[begin:end])
        begin = end
