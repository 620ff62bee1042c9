"""LoRA of the embeddings and of the head: the two modules as wide as the vocabulary.

Plain torch on every device: few adapters have it, an embedding is a gather of `rank` numbers per token, and the head
runs on sampled rows alone. A row's result depends on that row and its adapter alone, so rows are multiplied one by one
(a matrix product rounds by its number of rows).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tenantry_kernels.paging import VocabularyLora
from tenantry_kernels.segments import VocabularySpans


def embed_lora(tokens: Tensor, out: Tensor, pool: Tensor, spans: VocabularySpans) -> Tensor:
    """out += scale * A[:, token]^T B^T for the rows of each span, in place.

    tokens int64 `[T]`; out `[T, hidden]`: the base's embeddings; pool `[num_pages, page_elems]`; spans:
    `Segments.embed`. Sums in fp32, rounds once; other rows are not touched.
    """
    flat = pool.view(-1)
    for begin, end, lora in spans:
        ids = tokens[begin:end]
        starts = lora.blocks.to(ids.device)[ids // lora.block_rows] + ids % lora.block_rows * lora.rank
        shrunk = flat[starts[:, None] + torch.arange(lora.rank, device=ids.device)].float()  # [t, rank]
        narrow = _narrow(flat, lora, out.shape[1]).t().contiguous()  # [hidden, rank]
        for row, vector in zip(out[begin:end], shrunk * lora.scale, strict=True):
            row.copy_(row.float() + torch.mv(narrow, vector))
    return out


def head_lora(x: Tensor, logits: Tensor, pool: Tensor, spans: VocabularySpans) -> Tensor:
    """logits += scale * (x A^T) B^T for the rows of each span, in place.

    x `[S, hidden]`: the head's input (after the last norm) of the sampled rows; logits float32 `[S, vocab]`; spans:
    `spans_of_rows(Segments.head, sampled rows)`. Other rows are not touched.
    """
    flat = pool.view(-1)
    for begin, end, lora in spans:
        narrow = _narrow(flat, lora, x.shape[1])  # [rank, hidden]
        # one tensor per row, so that no product depends on where the row begins in memory
        vectors = [torch.mv(narrow, row.to(torch.float32, copy=True)) * lora.scale for row in x[begin:end]]
        for index, start in enumerate(lora.blocks.tolist()):
            first = index * lora.block_rows
            last = min(first + lora.block_rows, logits.shape[1])
            block = flat[start : start + (last - first) * lora.rank].view(-1, lora.rank).float()
            for row, vector in zip(logits[begin:end, first:last], vectors, strict=True):
                row.add_(torch.mv(block, vector))
    return logits


def _narrow(flat: Tensor, lora: VocabularyLora, hidden: int) -> Tensor:
    columns = torch.arange(hidden, device=flat.device)
    return flat[lora.narrow.to(flat.device)[:, None] + columns].float()  # [rank, hidden]
