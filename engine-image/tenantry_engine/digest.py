"""Digests: what an adapter and a base model are called, whatever their names.

An adapter blob is `u64le(len(config)) || config || u64le(len(weights)) || weights`; its SHA-256 names the adapter.
A base model's digest is the SHA-256 over its `config.json`, then its `*.safetensors` and the index that says which of
them are read, in the order of their names, each as `<file name> NUL <SHA-256 of the content, hex> LF`.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tenantry_engine.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CHUNK = 1 << 20


def is_digest(text: str) -> bool:
    """Whether the text is a digest, and so safe as a part of a file's name."""
    return _DIGEST.fullmatch(text) is not None


def most_blob_bytes(weights: int) -> int:
    """The greatest blob of an adapter whose tensors' file has at most so many bytes."""
    return weights + MAX_CONFIG_BYTES + 16


def split_blob(blob: memoryview) -> tuple[memoryview, memoryview]:
    """The configuration and the weights of a blob, without a copy. Raises AdapterError when it is none."""
    if len(blob) < 16:
        raise AdapterError("Corrupt", "the blob must hold two length-prefixed files")
    config_size = struct.unpack_from("<Q", blob, 0)[0]
    if config_size > MAX_CONFIG_BYTES or 16 + config_size > len(blob):
        raise AdapterError("Corrupt", f"`{CONFIG_FILE}` in the blob must be at most {MAX_CONFIG_BYTES} bytes")
    weights_size = struct.unpack_from("<Q", blob, 8 + config_size)[0]
    if 16 + config_size + weights_size != len(blob):
        raise AdapterError("Corrupt", f"`{WEIGHTS_FILE}` in the blob must end where the blob ends")
    return blob[8 : 8 + config_size], blob[16 + config_size :]


def folder_blob(folder: Path) -> Iterator[bytes]:
    """The blob of a PEFT folder, in pieces. Raises FileNotFoundError."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = folder / name
        yield struct.pack("<Q", path.stat().st_size)
        with path.open("rb") as file:
            while piece := file.read(_CHUNK):
                yield piece


def folder_digest(folder: Path) -> str:
    """`sha256:<hex>` of the adapter in a PEFT folder. Raises FileNotFoundError."""
    total = hashlib.sha256()
    for piece in folder_blob(folder):
        total.update(piece)
    return f"sha256:{total.hexdigest()}"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_digest(folder: Path) -> str:
    """`sha256:<hex>` of the base model in a folder."""
    index = [folder / INDEX_FILE] if (folder / INDEX_FILE).is_file() else []
    files = [folder / "config.json", *sorted([*index, *folder.glob("*.safetensors")])]
    total = hashlib.sha256()
    with ThreadPoolExecutor(max_workers=4) as pool:
        for path, content in zip(files, pool.map(file_sha256, files), strict=True):
            total.update(f"{path.name}\0{content}\n".encode())
    return f"sha256:{total.hexdigest()}"
