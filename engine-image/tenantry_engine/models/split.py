"""Which part of every matrix one rank of a tensor-parallel group holds (Shoeybi et al., arXiv 1909.08053).

Column-parallel layers (q, k, v, gate, up, head) are cut by outputs, row-parallel ones (o, down) by inputs. LoRA follows
its layer: column-parallel A whole and B cut by outputs; row-parallel A cut by inputs and B whole, added to the rank's
partial sum, so that the all-reduce of the base layer sums both. KV heads fewer than ranks are held by several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenantry_kernels import KvShape, LoraShape
from torch import Tensor
from torch.nn.functional import pad

from tenantry_engine.errors import EngineError
from tenantry_engine.models.config import DecoderConfig

Range = tuple[int, int]
"""First row or column, and the one after the last."""


@dataclass(frozen=True)
class Split:
    """The ranges of one rank. Widths are equal on all ranks, so one page layout serves all of them."""

    config: DecoderConfig
    rank: int
    size: int
    heads: int
    kv_heads: int
    q: Range  # rows of q, columns of o
    kv: Range  # rows of k and of v
    inner: Range  # rows of gate and up, columns of down
    vocab: Range  # rows of the head; the last ranks' may end beyond the vocabulary

    @property
    def kv_shape(self) -> KvShape:
        """What this rank keeps of a KV page."""
        return KvShape(self.config.layers, self.kv_heads, self.config.head_dim)

    @property
    def _ranges(self) -> tuple[tuple[Range, Range], ...]:
        """Input and output ranges of the adapted layers, in the order of `tenantry_kernels.Module`."""
        hidden = (0, self.config.hidden)
        return (
            (hidden, self.q), (hidden, self.kv), (hidden, self.kv), (self.q, hidden),
            (hidden, self.inner), (hidden, self.inner), (self.inner, hidden),
        )  # fmt: skip

    @property
    def lora_shape(self) -> LoraShape:
        """Widths of this rank's part of the adapted layers."""
        return LoraShape(
            self.config.layers,
            in_features=tuple(end - begin for (begin, end), _ in self._ranges),
            out_features=tuple(end - begin for _, (begin, end) in self._ranges),
            vocab=self.config.vocab,
        )

    def cut_lora(self, module: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of one module's a `[rank, in]` and b `[out, rank]`."""
        (in_begin, in_end), (out_begin, out_end) = self._ranges[module]
        return a[:, in_begin:in_end], b[out_begin:out_end]


def split(config: DecoderConfig, rank: int, size: int) -> Split:
    """The part of `rank` among `size`. Raises EngineError when the model cannot be cut evenly into so many."""
    for name, count in (("num_attention_heads", config.heads), ("intermediate_size", config.intermediate)):
        if count % size:
            raise EngineError(
                f"`--tensor-parallel-size` must divide `{name}` {count} of this model, {size} does not"
            )
    if config.kv_heads % size and size % config.kv_heads:
        raise EngineError(
            f"`--tensor-parallel-size` must divide `num_key_value_heads` {config.kv_heads} of this model "
            f"or be a multiple of it, {size} is neither"
        )
    heads, kv_heads = config.heads // size, max(1, config.kv_heads // size)
    first_kv = rank * config.kv_heads // size
    inner = config.intermediate // size
    vocab = -(-config.vocab // size)
    return Split(
        config=config,
        rank=rank,
        size=size,
        heads=heads,
        kv_heads=kv_heads,
        q=(rank * heads * config.head_dim, (rank + 1) * heads * config.head_dim),
        kv=(first_kv * config.head_dim, (first_kv + kv_heads) * config.head_dim),
        inner=(rank * inner, (rank + 1) * inner),
        vocab=(rank * vocab, (rank + 1) * vocab),
    )


def cut_vocab(rows: Tensor, part: Range) -> Tensor:
    """Rows `[vocab, ...]` of one rank, zeros where its range ends beyond the vocabulary."""
    begin, end = part
    held = rows[begin:end]
    return held if held.shape[0] == end - begin else pad(held, (0, 0, 0, end - begin - held.shape[0]))
