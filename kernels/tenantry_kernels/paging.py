"""Where things lie in the unified pool: KV pages and the rows of adapters. Pure host code, no kernels.

The pool is one tensor `[num_pages, page_elems]` in the model's dtype. A KV page holds `PAGE_TOKENS` tokens of K and V
of all layers. An adapter takes whole pages of the same pool: A lies as `rank` rows of width `in`, B transposed as
`rank` rows of width `out`; rows are contiguous within a page and follow one another closely, in any order of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

PAGE_TOKENS = 16
ROW_ALIGN = 16
"""Rows begin at multiples of this many elements, so that vector loads of any dtype stay aligned."""


class Module(IntEnum):
    """Linear layers of a decoder block, in the order of every `[layers, modules]` table."""

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741 - the field's name
    GATE = 4
    UP = 5
    DOWN = 6


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
    """Widths of the adapted linear layers, one entry per `Module` (more may follow: embeddings, head)."""

    layers: int
    in_features: tuple[int, ...]
    out_features: tuple[int, ...]

    @property
    def modules(self) -> int:
        return len(self.in_features)


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


@dataclass(frozen=True, eq=False)
class PagedAdapter:
    """One resident adapter: where its rows are in the flat pool, its true ranks and scales. Compared by identity."""

    ranks: Tensor  # int32 [layers, modules]
    scales: Tensor  # float32 [layers, modules]
    first: Tensor  # int64 [layers, modules], as in Layout
    rows: Tensor  # int64 [2 * sum(ranks)]: element offsets into the flat pool


def layout(shape: LoraShape, ranks: Sequence[Sequence[int]], page_elems: int) -> Layout:
    """Pack an adapter with true `ranks[layer][module]` into whole pages.

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
    rows: list[int] = []
    page, used = 0, 0
    for layer in range(shape.layers):
        for module in range(shape.modules):
            first[layer, module] = len(rows)
            rank = int(table[layer, module])
            for width in (shape.in_features[module], shape.out_features[module]):
                step = -(-width // ROW_ALIGN) * ROW_ALIGN
                if step > page_elems:
                    raise ValueError(
                        f"`page_elems` must be at least the widest adapter row ({step} elements), not {page_elems}; "
                        "this model's pages are too small for adapters on this module"
                    )
                for _ in range(rank):
                    if used + step > page_elems:
                        page, used = page + 1, 0
                    rows.append(page * page_elems + used)
                    used += step
    pages = page + 1 if rows else 0
    return Layout(pages, page_elems, table, first, torch.tensor(rows, dtype=torch.int64))


def place(plan: Layout, pages: Sequence[int], scales: Sequence[Sequence[float]]) -> PagedAdapter:
    """Turn a layout into the adapter that occupies `pages` of the pool (in this order).

    scales `[layers][modules]`: alpha / rank (or alpha / sqrt(rank) for rsLoRA), any value where rank is 0.
    """
    if len(pages) != plan.pages:
        raise ValueError(f"`pages` must hold {plan.pages} page numbers for this layout, not {len(pages)}")
    numbers = torch.tensor(list(pages), dtype=torch.int64)
    virtual = torch.div(plan.rows, plan.page_elems, rounding_mode="floor")
    rows = numbers[virtual] * plan.page_elems + plan.rows % plan.page_elems if plan.pages else plan.rows
    return PagedAdapter(
        plan.ranks, torch.tensor([list(s) for s in scales], dtype=torch.float32), plan.first, rows
    )


def write_adapter(pool: Tensor, adapter: PagedAdapter, layer: int, module: int, a: Tensor, b: Tensor) -> None:
    """Copy one module's weights into the adapter's rows, cast to the pool's dtype.

    a `[rank, in]`, b `[out, rank]` as PEFT stores them (lora_A.weight, lora_B.weight).
    """
    rank = int(adapter.ranks[layer, module])
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ValueError(f"`a` and `b` must have the layout's rank {rank}, not {a.shape[0]} and {b.shape[1]}")
    first = int(adapter.first[layer, module])
    flat = pool.view(-1)
    for start, matrix in ((first, a), (first + rank, b.t())):
        where = adapter.rows[start : start + rank].to(pool.device)
        columns = torch.arange(matrix.shape[1], device=pool.device)
        flat[where[:, None] + columns] = matrix.to(device=pool.device, dtype=pool.dtype)
