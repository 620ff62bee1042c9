"""Reads a safetensors file that somebody else wrote, believing nothing in it.

Format: `u64le(header size) || header (JSON) || data`; the header maps names to dtype, shape and a range of the data.
The library that reads base models accepts a name twice and checks no values; adapters come from tenants.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from tenantry_engine.errors import AdapterError

MAX_HEADER_BYTES = 8 << 20
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
        raise _invalid("the file must start with the size of its header; it is cut short")
    size = struct.unpack_from("<Q", file, 0)[0]
    if size > MAX_HEADER_BYTES or 8 + size > len(file):
        raise _invalid(
            f"the header must fit in the file and in {MAX_HEADER_BYTES} bytes; it says {size}. "
            "Only safetensors files are read"
        )
    try:
        header = json.loads(bytes(file[8 : 8 + size]), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _invalid("the header must be JSON. Only safetensors files are read") from error
    if not isinstance(header, dict):
        raise _invalid("the header must be a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(name, value, 8 + size) for name, value in header.items()}
    at = 8 + size
    for name, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        if entry.begin != at:
            raise _invalid(f"`{name}` must begin where the tensor before it ends")
        at = entry.end
    if at != len(file):
        raise _invalid(
            f"the data must end with the last tensor: {at} bytes are described, {len(file)} are there"
        )
    return entries


def read_tensor(file: memoryview, entry: Entry) -> Tensor:
    """A copy of one tensor."""
    data = bytearray(file[entry.begin : entry.end])
    if not data:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(data, dtype=entry.dtype).view(entry.shape)


def _entry(name: str, value: object, data: int) -> Entry:
    shown = name[:_MAX_NAME]
    if len(name) > _MAX_NAME:
        raise _invalid(f"names must be at most {_MAX_NAME} characters: `{shown}...`")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _invalid(f"`{shown}` must have exactly dtype, shape and data_offsets")
    dtype = _DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise _invalid(f"`{shown}` must be of dtype {', '.join(_DTYPES)}, not {str(value['dtype'])[:20]!r}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _sizes(shape) or len(shape) > 4:
        raise _invalid(f"`{shown}` must have a shape of at most 4 sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _invalid(f"`{shown}` must have two ascending data_offsets")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise _invalid(f"`{shown}` must have as many bytes as its shape and dtype say")
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


def _invalid(message: str) -> AdapterError:
    return AdapterError("InvalidTensors", f"`adapter_model.safetensors`: {message}")
