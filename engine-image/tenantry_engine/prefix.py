"""Keys of the prefix cache: which blocks of K and V may be used again, and by whom. Pure.

A block is a page full of tokens. Its key is H(key of the block before it, its tokens), and the first one hangs on a
root H(version, salt of the tenant, base model, adapter, dtype of K and V, RoPE configuration): everything that decides
what K and V of these tokens are, and the secret of the one tenant that may see them. Two tenants thus never share a
block, nor do two adapters, nor two versions of one. The salt comes from a request's signed identity, never its body.

Every field is hashed with its own tag and length, so no field can be mistaken for another, whatever it holds.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_VERSION = b"tenantry-prefix-1"
_ROPE_FIELDS = ("head_dim", "rope_parameters", "rope_scaling", "rope_theta")


@dataclass(frozen=True)
class Space:
    """What all cached blocks of one replica have in common. `rope` is any text that tells configurations apart."""

    base: str  # digest of the base model
    dtype: str  # of K and V
    rope: str

    @classmethod
    def of(cls, base: str, dtype: object, config: Mapping[str, Any]) -> Space:
        """The space of a model folder with this digest and `config.json`."""
        rope = {name: config.get(name) for name in _ROPE_FIELDS}
        return cls(base, str(dtype), json.dumps(rope, sort_keys=True))

    def root(self, salt: str, adapter: str | None) -> bytes:
        """What the first block of a tenant's sequences with this adapter (a digest; None = the base) hangs on."""
        return _hash(
            (b"version", _VERSION),
            (b"salt", salt.encode()),
            (b"base", self.base.encode()),
            (b"adapter", b"" if adapter is None else adapter.encode()),
            (b"dtype", self.dtype.encode()),
            (b"rope", self.rope.encode()),
        )


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of the block of `tokens` that follows `parent` (a block's key or a root)."""
    return _hash((b"parent", parent), (b"tokens", struct.pack(f"<{len(tokens)}I", *tokens)))


def extend(keys: list[bytes], root: bytes, tokens: Sequence[int], count: int, page_tokens: int) -> None:
    """Appends to `keys` (those of the leading blocks of `tokens`) until it holds `count`."""
    for index in range(len(keys), count):
        parent = keys[-1] if keys else root
        keys.append(block_key(parent, tokens[index * page_tokens : (index + 1) * page_tokens]))


def _hash(*fields: tuple[bytes, bytes]) -> bytes:
    """SHA-256 of tagged, length-prefixed fields."""
    digest = hashlib.sha256()
    for tag, value in fields:
        for part in (tag, value):
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
    return digest.digest()
