"""The digest of an adapter: both of its files, length-prefixed, so that neither can change unseen.

An adapter blob is the byte string

    u64le(len(config)) || config || u64le(len(weights)) || weights

with `config` the bytes of `adapter_config.json` and `weights` those of `adapter_model.safetensors`. Its SHA-256 is the
adapter's digest. The blob is also what travels to a replica, so a receiver verifies while it reads.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_CHUNK = 1 << 20


def blob_chunks(config: Path, weights: Path) -> Iterator[bytes]:
    """The adapter blob of the two files, in pieces of at most 1 MiB."""
    for path in (config, weights):
        yield struct.pack("<Q", path.stat().st_size)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk


def adapter_digest(folder: Path) -> str:
    """`sha256:<hex>` of the adapter in a PEFT folder.

    Raises FileNotFoundError when one of the two files is missing.
    """
    digest = hashlib.sha256()
    for chunk in blob_chunks(folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"
