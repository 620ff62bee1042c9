"""Kernels on paged weights and KV cache, each with its torch reference.

One signature per kernel for GPU (Triton), CPU (C++ extension) and reference (torch): `backend.describe` says which
serves and why. `paging` and `segments` are host code that tells the kernels where things lie.
"""

from tenantry_kernels.activation import silu_and_mul
from tenantry_kernels.attention import paged_attention
from tenantry_kernels.backend import describe
from tenantry_kernels.compilations import compilations
from tenantry_kernels.kv_write import kv_write
from tenantry_kernels.linear import PackedWeight, linear, pack_linear
from tenantry_kernels.lora import apply_lora, linear_lora
from tenantry_kernels.norm_rope import qk_norm, rms_norm, rope_and_kv_write, rope_table
from tenantry_kernels.paging import (
    GATE_UP,
    PAGE_TOKENS,
    QKV,
    KvShape,
    Layout,
    LoraShape,
    Module,
    PagedAdapter,
    VocabularyModule,
    layout,
    place,
    write_adapter,
    write_vocabulary,
)
from tenantry_kernels.sample import sample, uniform
from tenantry_kernels.segments import BASE, SegmentBuilder, Segments, VocabularySpans, spans_of_rows
from tenantry_kernels.vocabulary import embed_lora, head_lora

__all__ = [
    "BASE",
    "GATE_UP",
    "PAGE_TOKENS",
    "QKV",
    "KvShape",
    "Layout",
    "LoraShape",
    "Module",
    "PackedWeight",
    "PagedAdapter",
    "SegmentBuilder",
    "Segments",
    "VocabularyModule",
    "VocabularySpans",
    "apply_lora",
    "compilations",
    "describe",
    "embed_lora",
    "head_lora",
    "kv_write",
    "layout",
    "linear",
    "linear_lora",
    "pack_linear",
    "paged_attention",
    "place",
    "qk_norm",
    "rms_norm",
    "rope_and_kv_write",
    "rope_table",
    "sample",
    "silu_and_mul",
    "spans_of_rows",
    "uniform",
    "write_adapter",
    "write_vocabulary",
]
