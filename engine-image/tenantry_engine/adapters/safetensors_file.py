"""Reads a safetensors file that somebody else wrote, believing nothing in it.

Format: `u64le(header size) || header (JSON) || data`; the header maps names to dtype, shape and a range of the data.
The library that reads base models accepts a name twice and checks no values; adapters come from tenants.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from tenantry_engine.adapters.hostile import invalid, shown

MAX_HEADER_BYTES = 2 << 20
"""Ten times what the adapter of the largest model needs: JSON takes much more memory than text."""

PIECE = 1 << 15
"""Elements per operation: torch runs so few on the thread that asks, so that reading an adapter takes no core from the
engine's steps."""
_MAX_NAME = 512
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # in the file
    end: int


def read_header(file: memoryview) -> dict[str, Entry]:
    """The tensors of a file, by name. Raises AdapterError InvalidTensors when the file is not exactly well-formed."""
    if len(file) < 8:
        raise invalid("the file must start with the size of its header; it is cut short")
    size = struct.unpack_from("<Q", file, 0)[0]
    if size > MAX_HEADER_BYTES or 8 + size > len(file):
        raise invalid(
            f"the header must fit in the file and in {MAX_HEADER_BYTES} bytes; it says {size}. "
            "Only safetensors files are read"
        )
    try:
        header = json.loads(bytes(file[8 : 8 + size]), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise invalid("the header must be JSON. Only safetensors files are read") from error
    if not isinstance(header, dict):
        raise invalid("the header must be a JSON object")
    if not isinstance(header.pop("__metadata__", {}), dict):
        raise invalid("`__metadata__` must be a JSON object")
    entries = {name: _entry(name, value, 8 + size) for name, value in header.items()}
    at = 8 + size
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise invalid(f"`{shown(name)}` must begin where the tensor before it ends")
        at = entry.end
    if at != len(file):
        raise invalid(
            f"the data must end with the last tensor: {at} bytes are described, {len(file)} are there"
        )
    return entries


def read_tensor(file: memoryview, entry: Entry) -> Tensor:
    """A copy of one tensor: aligned, which the file's bytes need not be."""
    data = numpy.frombuffer(file, numpy.uint8, entry.end - entry.begin, entry.begin).copy()
    return torch.from_numpy(data).view(entry.dtype).view(entry.shape)


def is_finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether no value is NaN or infinite, also after a cast to `dtype`."""
    flat = tensor.reshape(-1)
    return all(
        bool(torch.isfinite(flat[at : at + PIECE].to(dtype)).all()) for at in range(0, flat.numel(), PIECE)
    )


def _entry(name: str, value: object, data: int) -> Entry:
    seen = shown(name)
    if len(name) > _MAX_NAME:
        raise invalid(f"names must be at most {_MAX_NAME} characters: `{seen}`")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise invalid(f"`{seen}` must have exactly dtype, shape and data_offsets")
    dtype = _DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise invalid(f"`{seen}` must be of dtype {', '.join(_DTYPES)}, not {shown(value['dtype'])}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _sizes(shape) or len(shape) > 4:
        raise invalid(f"`{seen}` must have a shape of at most 4 sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise invalid(f"`{seen}` must have two ascending data_offsets")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise invalid(f"`{seen}` must have as many bytes as its shape and dtype say")
    return Entry(dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 48 for n in value
    )


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result
