"""What an adapter's two files say, read with bounds and without trust: configuration and the header of the weights.

PEFT's `adapter_config.json` and the safetensors format (8 bytes little-endian header length, JSON header, raw tensors).
Nothing is deserialised but JSON, names of tensors are compared and counted, never used as paths.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from tenantry.api.digest import CONFIG_FILE, WEIGHTS_FILE

from .errors import FetchError, Reason, printable

MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 100_000
MAX_MODULES = 64
MAX_RANK = 512
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class Facts:
    """What the operator compares with spec and pool."""

    rank: int
    base_model: str
    target_modules: tuple[str, ...]


def read_facts(blob: Path) -> Facts:
    """Facts of a stored adapter blob. Raises FetchError(InvalidArtifact)."""
    with blob.open("rb") as file:
        config_length = _length(file)
        config = file.read(config_length)
        weights_length = _length(file)
        header = read_header(file, weights_length)
    return facts(config, header)


def facts(config: bytes, header: dict[str, Any]) -> Facts:
    """Facts of a configuration and the checked header of its weights. Raises FetchError(InvalidArtifact)."""
    settings = _object(config, CONFIG_FILE)
    if settings.get("peft_type") != "LORA":
        _invalid(f"`peft_type` in {CONFIG_FILE} must be LORA")
    declared = _rank(settings)
    base_model = settings.get("base_model_name_or_path")
    if not isinstance(base_model, str) or not 0 < len(base_model) <= 512 or not base_model.isprintable():
        _invalid(f"`base_model_name_or_path` in {CONFIG_FILE} must be a text of 1 to 512 characters")
    modules = settings.get("target_modules")
    if (
        not isinstance(modules, list)
        or not 0 < len(modules) <= MAX_MODULES
        or not all(isinstance(name, str) and 0 < len(name) <= 128 and name.isprintable() for name in modules)
    ):
        _invalid(f"`target_modules` in {CONFIG_FILE} must be a list of 1 to {MAX_MODULES} module names")
    ranks = {
        tensor["shape"][0]
        for name, tensor in header.items()
        if name.endswith(".lora_A.weight") and len(tensor["shape"]) == 2
    }
    if not ranks:
        _invalid(f"{WEIGHTS_FILE} must hold LoRA tensors (`*.lora_A.weight`)")
    if max(ranks) > declared or (not settings.get("rank_pattern") and ranks != {declared}):
        _invalid(f"`r` in {CONFIG_FILE} is {declared}, but the tensors have rank {max(ranks)}")
    return Facts(max(ranks), base_model, tuple(sorted(set(modules))))


def read_header(file: BinaryIO, length: int) -> dict[str, Any]:
    """The tensors of a safetensors file of `length` bytes that starts at the file's position: name -> entry.

    Checks that every entry is well formed and that the tensors fill the file without a gap or an overlap.
    Raises FetchError(InvalidArtifact).
    """
    size = _length(file) if length >= 8 else 0
    if not 2 <= size <= min(length - 8, MAX_HEADER_BYTES):
        _invalid(
            f"{WEIGHTS_FILE} must be a safetensors file with a header of at most {MAX_HEADER_BYTES} bytes"
        )
    header = _object(file.read(size), f"the header of {WEIGHTS_FILE}")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        _invalid(f"{WEIGHTS_FILE} must hold at most {MAX_TENSORS} tensors")
    spans = sorted(_span(name, entry) for name, entry in header.items())
    end = 0
    for begin, stop in spans:
        if begin != end:
            _invalid(f"{WEIGHTS_FILE} has tensors that overlap or leave a gap")
        end = stop
    if end != length - 8 - size:
        _invalid(f"{WEIGHTS_FILE} must end where its last tensor ends")
    return header


def _span(name: str, entry: Any) -> tuple[int, int]:
    """First byte and the one after the last of a tensor."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(stop)]}:
            pass
        case _:
            _invalid(f"tensor `{printable(name, 80)}` must have dtype, shape and data_offsets")
    if (
        dtype not in _DTYPE_BYTES
        or len(shape) > 8
        or not all(type(d) is int and 0 <= d < 1 << 40 for d in shape)
    ):
        _invalid(f"tensor `{printable(name, 80)}` must have a known dtype and a shape of whole numbers")
    if begin < 0 or stop - begin != math.prod(shape) * _DTYPE_BYTES[dtype]:
        _invalid(f"tensor `{printable(name, 80)}` must have as many bytes as its shape says")
    return begin, stop


def _rank(settings: dict[str, Any]) -> int:
    """The greatest rank that the configuration declares."""
    pattern = settings.get("rank_pattern") or {}
    ranks = [settings.get("r"), *(pattern.values() if isinstance(pattern, dict) else [None])]
    numbers = [rank for rank in ranks if type(rank) is int and 1 <= rank <= MAX_RANK]
    if len(numbers) != len(ranks):
        _invalid(f"`r` and `rank_pattern` in {CONFIG_FILE} must be whole numbers between 1 and {MAX_RANK}")
    return max(numbers)


def _object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no key twice, no NaN. Two readers must not see two meanings."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            _invalid(f"{what} must not hold a key twice")
        return result

    def constant(text: str) -> NoReturn:
        _invalid(f"{what} must not hold {text}")

    try:
        value = json.loads(raw.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise FetchError(Reason.INVALID_ARTIFACT, f"{what} must be JSON") from error
    if not isinstance(value, dict):
        _invalid(f"{what} must be a JSON object")
    return value


def _length(file: BinaryIO) -> int:
    raw = file.read(8)
    if len(raw) != 8:
        _invalid("the adapter ends too early")
    length: int = struct.unpack("<Q", raw)[0]
    return length


def _invalid(message: str) -> NoReturn:
    raise FetchError(Reason.INVALID_ARTIFACT, message)
