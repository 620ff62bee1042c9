"""Paged attention against dense softmax: mixed prefill and decode, page borders, stale NaN, the same bits in chunks."""

import random

import pytest
import torch
from kernel_world import HEAD_DIM, HEADS, KV, KV_HEADS, TOLERANCE
from tenantry_kernels import PAGE_TOKENS, KvShape, kv_write, paged_attention

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SCALE = HEAD_DIM**-0.5


class Sequences:
    """Sequences whose K and V lie in scattered pages of a pool that is NaN everywhere else."""

    def __init__(self, lengths, dtype, shape=KV, heads=HEADS, device="cpu", seed=0):
        torch.manual_seed(seed)
        self.shape, self.heads, self.lengths = shape, heads, lengths
        counts = [-(-n // PAGE_TOKENS) for n in lengths]
        total = sum(counts) + 3
        self.pool = torch.full((total, shape.page_elems), float("nan"), dtype=dtype, device=device)
        order = random.Random(seed).sample(range(total), sum(counts))
        self.tables = torch.full((len(lengths), max(counts) + 1), total + 1000, dtype=torch.int32)
        self.q, self.k, self.v = [], [], []
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            pages, order = order[:count], order[count:]
            self.tables[b, :count] = torch.tensor(pages, dtype=torch.int32)
            k, v = (
                torch.randn(length, shape.kv_heads, shape.head_dim).to(dtype).to(device) for _ in range(2)
            )
            slots = torch.tensor([pages[t // 16] * 16 + t % 16 for t in range(length)], device=device)
            kv_write(k, v, shape.view(self.pool), 1, slots)
            self.q.append(torch.randn(length, heads, shape.head_dim).to(dtype).to(device))
            self.k.append(k)
            self.v.append(v)
        self.tables = self.tables.to(device)

    def run(self, spans):
        """spans: for each sequence (first query position, end) of this step."""
        device = self.pool.device
        q = torch.cat([self.q[b][begin:end] for b, (begin, end) in enumerate(spans)])
        starts = torch.tensor([0, *(end - begin for begin, end in spans)]).cumsum(0).int().to(device)
        lens = torch.tensor([end for _, end in spans], dtype=torch.int32, device=device)
        return paged_attention(q, self.shape.view(self.pool), 1, self.tables, starts, lens, SCALE)

    def expected(self, spans):
        rows = []
        for b, (begin, end) in enumerate(spans):
            groups = self.heads // self.shape.kv_heads
            k, v = (t[:end].double().repeat_interleave(groups, dim=1) for t in (self.k[b], self.v[b]))
            scores = torch.einsum("qhd,khd->hqk", self.q[b][begin:end].double(), k) * SCALE
            future = torch.arange(end)[None] > torch.arange(begin, end)[:, None]
            weights = scores.masked_fill(future.to(scores.device), float("-inf")).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(rows)


LENGTHS = [1, 15, 16, 17, 32, 33, 70, 129]
MIXED = [(0, 1), (14, 15), (0, 16), (16, 17), (31, 32), (10, 33), (69, 70), (40, 129)]


@DTYPES
@pytest.mark.parametrize(
    ("shape", "heads"),
    [
        (KV, HEADS),
        (KvShape(2, 1, 64), 4),
        (KvShape(2, 3, 64), 9),
        (KvShape(2, 2, 80), 2),
        (KvShape(2, 1, 128), 8),
        (KvShape(2, 2, 24), 4),
    ],
    ids=lambda v: f"{v.kv_heads}x{v.head_dim}" if isinstance(v, KvShape) else str(v),
)
def test_mixed_batch_equals_dense_softmax(dtype, shape, heads) -> None:
    s = Sequences(LENGTHS, dtype, shape, heads)
    torch.testing.assert_close(
        s.run(MIXED).double(), s.expected(MIXED), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@DTYPES
def test_same_bits_in_any_chunks_and_any_crowd(dtype) -> None:
    s = Sequences(LENGTHS, dtype)
    whole = s.run([(0, n) for n in LENGTHS]).split(LENGTHS)
    rng = random.Random(5)
    for _ in range(6):
        spans = []
        for n in LENGTHS:
            begin = rng.randrange(n)
            spans.append((begin, rng.randint(begin, n)))
        got = s.run(spans).split([end - begin for begin, end in spans])
        for part, rows, (begin, end) in zip(got, whole, spans, strict=True):
            assert torch.equal(part, rows[begin:end])


@DTYPES
def test_nan_behind_the_context_does_no_harm(dtype) -> None:
    s = Sequences([19, 5], dtype)  # their last pages hold NaN behind positions 19 and 5
    assert torch.isfinite(s.run([(18, 19), (0, 5)])).all()


def test_query_may_be_a_view_into_qkv() -> None:
    s = Sequences([20], torch.float32)
    qkv = torch.randn(20, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    q = qkv.view(20, -1, HEAD_DIM)[:, :HEADS]
    args = (KV.view(s.pool), 1, s.tables, torch.tensor([0, 20]).int(), torch.tensor([20]).int(), SCALE)
    assert torch.equal(paged_attention(q, *args), paged_attention(q.contiguous(), *args))


def test_reference_agrees(reference_only) -> None:
    s = Sequences(LENGTHS, torch.float32)
    torch.testing.assert_close(s.run(MIXED).double(), s.expected(MIXED), atol=2e-5, rtol=2e-5)


def test_context_shorter_than_its_rows_is_refused() -> None:
    s = Sequences([20], torch.float32)
    args = (s.q[0], KV.view(s.pool), 1, s.tables, torch.tensor([0, 20]).int())
    with pytest.raises(RuntimeError, match="`context_lens` must cover"):
        paged_attention(*args, torch.tensor([19]).int(), SCALE)
    with pytest.raises(RuntimeError, match="`context_lens` must cover"):
        paged_attention(*args, torch.tensor([190]).int(), SCALE)
