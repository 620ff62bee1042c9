"""LoRA of embeddings and head: right against dense products, alone or in any batch, wherever its pages lie."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tenantry_kernels import (
    KvShape,
    LoraShape,
    PagedAdapter,
    SegmentBuilder,
    VocabularyModule,
    embed_lora,
    head_lora,
    layout,
    place,
    spans_of_rows,
    write_adapter,
    write_vocabulary,
)
from tenantry_kernels.segments import vocabulary_spans

VOCAB, HIDDEN = 331, 48
KV = KvShape(layers=1, kv_heads=2, head_dim=16)  # pages of 1,024 elements: the tall halves take several
SHAPE = LoraShape(1, (HIDDEN,) * 7, (HIDDEN,) * 7, VOCAB)
EMBED, HEAD = VocabularyModule.EMBED, VocabularyModule.HEAD


class World:
    """A pool with adapters of several ranks in shuffled pages, NaN wherever nothing was written."""

    def __init__(self, ranks: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(0)
        plans = [layout(SHAPE, [[2] + [0] * 6], KV.page_elems, pair) for pair in ranks]
        numbers = torch.randperm(sum(p.pages for p in plans) + 3, generator=draw).tolist()
        self.pool = torch.full((len(numbers), KV.page_elems), float("nan"), dtype=dtype)
        self.adapters: list[PagedAdapter] = []
        self.dense: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
        for plan, pair in zip(plans, ranks, strict=True):
            pages, numbers = numbers[: plan.pages], numbers[plan.pages :]
            adapter = place(plan, pages, [[1.0] * 7], (0.5, 3.0))
            q = [torch.randn(shape, generator=draw) for shape in ((2, HIDDEN), (HIDDEN, 2))]
            write_adapter(self.pool, adapter, 0, 0, *q)
            dense = {}
            for module, rank in zip((EMBED, HEAD), pair, strict=True):
                wide, out = (VOCAB, HIDDEN) if module is EMBED else (HIDDEN, VOCAB)
                if rank:
                    a, b = (torch.randn(shape, generator=draw) for shape in ((rank, wide), (out, rank)))
                    write_vocabulary(self.pool, adapter, module, a, b)
                    dense[module] = (a.to(dtype).float(), b.to(dtype).float())
            self.adapters.append(adapter)
            self.dense.append(dense)

    def runs(self) -> list[tuple[PagedAdapter | None, int]]:
        return [
            (None, 2),
            *((adapter, index % 3 + 1) for index, adapter in enumerate(self.adapters)),
            (None, 1),
        ]


RANKS = [(1, 0), (0, 1), (3, 3), (7, 16), (0, 0), (17, 5), (64, 33), (300, 1)]


def test_rows_lie_in_the_pages_and_never_overlap() -> None:
    plan = layout(SHAPE, [[3] * 7], KV.page_elems, (5, 7))
    taken = [(int(at), int(at) + HIDDEN) for at in plan.rows]
    for part in plan.vocabulary:
        assert part is not None
        taken += [(int(at), int(at) + HIDDEN) for at in part.narrow]
        for row in range(VOCAB):
            at = int(part.blocks[row // part.block_rows]) + row % part.block_rows * part.rank
            taken.append((at, at + part.rank))
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))
    assert all(a // KV.page_elems == (b - 1) // KV.page_elems < plan.pages for a, b in taken)
    assert plan.pages * KV.page_elems < 1.25 * sum(b - a for a, b in taken), "little is wasted"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_dense_products(dtype: torch.dtype) -> None:
    world = World(RANKS, dtype)
    runs = world.runs()
    count = sum(n for _, n in runs)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (count,), generator=draw)
    tokens[-2:] = VOCAB - 1
    base = torch.randn(count, HIDDEN, generator=draw).to(dtype)
    logits = torch.randn(count, VOCAB, generator=draw)
    want_embed, want_logits = base.float().clone(), logits.clone()
    row = 0
    for adapter, n in runs:
        if adapter is not None:
            dense, at = world.dense[world.adapters.index(adapter)], slice(row, row + n)
            if EMBED in dense:
                a, b = dense[EMBED]
                want_embed[at] += 0.5 * a.t()[tokens[at]] @ b.t()
            if HEAD in dense:
                a, b = dense[HEAD]
                want_logits[at] += 3.0 * base[at].float() @ a.t() @ b.t()
        row += n
    spans = SegmentBuilder(SHAPE).build(runs).embed
    assert sum(end - begin for begin, end, _ in spans) < count
    embedded = embed_lora(tokens, base.clone(), world.pool, spans)
    torch.testing.assert_close(
        embedded.float(), want_embed.to(dtype).float(), rtol=2e-5 if dtype.itemsize == 4 else 1e-2, atol=1e-4
    )
    head_lora(base, logits, world.pool, vocabulary_spans(runs, HEAD))
    torch.testing.assert_close(logits, want_logits, rtol=1e-4, atol=1e-3)


def test_a_row_is_the_same_bits_in_any_batch() -> None:
    world = World([(8, 8), (5, 3)])
    one, two = world.adapters
    tokens = torch.arange(40) * 7 % VOCAB
    x, logits = torch.randn(40, HIDDEN), torch.randn(40, VOCAB)
    runs = [(None, 3), (one, 17), (two, 20)]
    together = embed_lora(tokens, x.clone(), world.pool, vocabulary_spans(runs, EMBED))
    scored = head_lora(x, logits.clone(), world.pool, vocabulary_spans(runs, HEAD))
    row = 0
    for adapter, count in runs:
        for at in range(row, row + count):
            part = slice(at, at + 1)
            alone = [(adapter, 1)]
            single = embed_lora(tokens[part], x[part].clone(), world.pool, vocabulary_spans(alone, EMBED))
            assert torch.equal(single[0], together[at])
            single = head_lora(x[part], logits[part].clone(), world.pool, vocabulary_spans(alone, HEAD))
            assert torch.equal(single[0], scored[at])
        row += count
    assert torch.equal(together[:3], x[:3])


def test_spans_join_neighbours_and_leave_others_out() -> None:
    world = World([(4, 0), (0, 4)])
    one, two = world.adapters
    runs = [(None, 1), (one, 2), (one, 3), (one, 0), (two, 2), (one, 1)]
    embed, head = one.vocabulary[EMBED], two.vocabulary[HEAD]
    assert vocabulary_spans(runs, EMBED) == ((1, 6, embed), (8, 9, embed))
    assert vocabulary_spans(runs, HEAD) == ((6, 8, head),)
    step = SegmentBuilder(SHAPE).build(runs)
    assert (step.embed, step.head) == (vocabulary_spans(runs, EMBED), vocabulary_spans(runs, HEAD))
    assert spans_of_rows(step.embed, [0, 1, 5, 7, 8]) == ((1, 3, embed), (4, 5, embed))
    assert spans_of_rows(step.head, [0, 5, 8]) == ()
    assert spans_of_rows(step.head, range(7, 9)) == ((0, 1, head),)


def test_errors_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"`shape.vocab` must"):
        layout(LoraShape(1, (HIDDEN,) * 7, (HIDDEN,) * 7), [[0] * 7], KV.page_elems, (4, 0))
    with pytest.raises(ValueError, match="`page_elems` must be at least the rank"):
        layout(SHAPE, [[0] * 7], KV.page_elems, (KV.page_elems + 1, 0))
    world = World([(4, 0)])
    with pytest.raises(ValueError, match="`module` HEAD"):
        write_vocabulary(world.pool, world.adapters[0], HEAD, torch.zeros(4, HIDDEN), torch.zeros(VOCAB, 4))
    with pytest.raises(ValueError, match="rank 4, not 5"):
        write_vocabulary(world.pool, world.adapters[0], EMBED, torch.zeros(5, VOCAB), torch.zeros(HIDDEN, 5))
