"""Layout of adapters in pages: true ranks, whole rows, little waste, clear errors."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_world import KV, LORA, make_world
from tenantry_kernels import KvShape, LoraShape, Module, SegmentBuilder, layout, place, write_adapter


@given(st.lists(st.integers(0, 19), min_size=14, max_size=14))
@settings(max_examples=50, deadline=None)
def test_rows_lie_whole_in_pages_and_never_overlap(flat: list[int]) -> None:
    plan = layout(LORA, [flat[:7], flat[7:]], KV.page_elems)
    taken = []
    for layer in range(2):
        for m in Module:
            rank, first = int(plan.ranks[layer, m]), int(plan.first[layer, m])
            for i, width in enumerate([LORA.in_features[m]] * rank + [LORA.out_features[m]] * rank):
                start = int(plan.rows[first + i])
                assert start // plan.page_elems == (start + width - 1) // plan.page_elems < plan.pages
                taken.append((start, start + width))
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))


def test_a_rank_8_adapter_of_smollm2_takes_14_pages() -> None:
    kv = KvShape(layers=30, kv_heads=3, head_dim=64)
    shape = LoraShape(30, (576, 576, 576, 576, 576, 576, 1536), (576, 192, 192, 576, 1536, 1536, 576))
    assert layout(shape, [[8] * 7] * 30, kv.page_elems).pages == 14
    assert layout(shape, [[0] * 7] * 30, kv.page_elems).pages == 0


def test_weights_land_in_their_pages_alone() -> None:
    world = make_world([3, 5], torch.float32)
    flat = world.pool.view(-1)
    for adapter, dense in zip(world.adapters, world.dense, strict=True):
        for (layer, module), (a, b, _) in dense.items():
            first, rank = int(adapter.first[layer, module]), a.shape[0]
            for i in range(rank):
                at = int(adapter.rows[first + i])
                assert torch.equal(flat[at : at + a.shape[1]], a[i])
                at = int(adapter.rows[first + rank + i])
                assert torch.equal(flat[at : at + b.shape[0]], b[:, i])
    assert torch.isnan(world.pool[:24]).all()


def test_errors_name_the_field() -> None:
    with pytest.raises(ValueError, match="`page_elems` must be at least"):
        layout(LORA, [[1] * 7] * 2, 64)
    with pytest.raises(ValueError, match="`ranks` must be"):
        layout(LORA, [[1] * 7], KV.page_elems)
    plan = layout(LORA, [[2] * 7] * 2, KV.page_elems)
    with pytest.raises(ValueError, match="`pages` must hold"):
        place(plan, range(plan.pages + 1), [[1.0] * 7] * 2)
    adapter = place(plan, range(plan.pages), [[1.0] * 7] * 2)
    pool = torch.zeros(plan.pages, KV.page_elems)
    with pytest.raises(ValueError, match="rank 2, not 3"):
        write_adapter(pool, adapter, 0, Module.Q, torch.zeros(3, 96), torch.zeros(96, 3))


def test_segments_merge_neighbours_and_drop_empty_runs() -> None:
    world = make_world([2, 4], torch.float32)
    one, two = world.adapters
    builder = SegmentBuilder(LORA)
    s = builder.build([(None, 2), (one, 0), (one, 3), (one, 17), (None, 0), (two, 1), (one, 1)])
    assert s.spans == ((0, 2, -1), (2, 22, 0), (22, 23, 1), (23, 24, 0))
    assert s.tokens == 24
    assert s.max_rank == 4
    assert s.chunks.tolist() == [[2, 16, 0], [18, 4, 0], [22, 1, 1], [23, 1, 0]]
    assert builder.build([(one, 1), (two, 5)]).rows is s.rows  # same set: tables are kept
    assert builder.build([(two, 1), (one, 5)]).rows is not s.rows
    assert builder.build([(None, 3)]).max_rank == 0
