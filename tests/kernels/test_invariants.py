"""Tables that do not belong together are refused on the host, before a kernel follows an index of theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_world import KV, LORA, make_world
from tenantry_kernels import (
    QKV,
    LoraShape,
    PagedAdapter,
    SegmentBuilder,
    apply_lora,
    linear_lora,
    pack_linear,
    place,
)
from tenantry_kernels import layout as make_layout


def build(*adapters: PagedAdapter) -> None:
    SegmentBuilder(LORA).build([(adapter, 1) for adapter in adapters])


def test_tables_that_lead_to_other_rows_are_refused() -> None:
    good, other = make_world([4, 9], torch.float32).adapters
    build(good, other)
    shorter = replace(good, rows=good.rows[:-1])
    larger = replace(good, ranks=other.ranks)
    before = replace(good, first=good.first - 1)
    negative = replace(good, ranks=-good.ranks)
    for wrong in (shorter, larger, before, negative):
        for adapters in ((wrong,), (other, wrong), (wrong, other)):
            with pytest.raises(ValueError, match="`runs` must hold adapters whose tables stay within"):
                build(*adapters)


def test_tables_of_another_model_are_refused() -> None:
    foreign = LoraShape(3, LORA.in_features, LORA.out_features)
    plan = make_layout(foreign, [[2] * 7] * 3, KV.page_elems)
    adapter = place(plan, range(plan.pages), [[1.0] * 7] * 3)
    with pytest.raises(
        ValueError, match=r"`runs` must hold adapters of 2 layers and 7 modules, not \(3, 7\)"
    ):
        build(adapter)


def test_an_adapter_beyond_the_pool_is_refused() -> None:
    """One of two adapters has its last page just behind the pool that the step is given."""
    world = make_world([4, 4], torch.float32)
    segments = SegmentBuilder(LORA).build([(adapter, 1) for adapter in world.adapters])
    pages = segments.reach // KV.page_elems
    assert pages == max(int(adapter.rows.max()) for adapter in world.adapters) // KV.page_elems + 1
    x, out = torch.zeros(2, 96), torch.zeros(2, 160)
    packed = pack_linear(torch.zeros(160, 96))
    apply_lora(x, out, world.pool[:pages], segments, 0, QKV)
    linear_lora(x, packed, world.pool[:pages], segments, 0, QKV)
    for call in (
        lambda pool: apply_lora(x, out, pool, segments, 0, QKV),
        lambda pool: linear_lora(x, packed, pool, segments, 0, QKV),
    ):
        with pytest.raises(ValueError, match="`pool` must hold the pages of the step's adapters"):
            call(world.pool[: pages - 1])
