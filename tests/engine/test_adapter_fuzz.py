"""Hostile files: whatever the bytes, the check ends soon, in little memory, with AdapterError if anything."""

from __future__ import annotations

import json
import random
import struct
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import engine_world as world
import pytest
import torch
from tenantry_engine.adapters.base import Base, weights_of
from tenantry_engine.adapters.check import check
from tenantry_engine.config import LoraConfig
from tenantry_engine.errors import AdapterError
from tenantry_kernels import KvShape, LoraShape

REASONS = {"BaseModelMismatch", "RankTooLarge", "UnsupportedConfig", "InvalidTensors", "TooLarge", "Corrupt"}
WIDTH = 64


@pytest.fixture(scope="module")
def base(tiny: world.TinyModel) -> Base:
    kv = KvShape(2, 2, 16)
    widths = (WIDTH, 32, 32, WIDTH, 96, 96, WIDTH)
    shape = LoraShape(2, (WIDTH, WIDTH, WIDTH, WIDTH, WIDTH, WIDTH, 96), widths, 302)
    return Base(shape, kv.page_elems, torch.float32, 200, tied=True, weight=weights_of(tiny.folder))


@pytest.fixture(scope="module")
def parts(tiny: world.TinyModel) -> tuple[bytes, bytes]:
    folder = tiny.adapter(
        "fuzzed", 60, r=2, target_modules=["q_proj", "down_proj", "lm_head"], rank_pattern={"q_proj": 3}
    )
    return tuple((folder / n).read_bytes() for n in ("adapter_config.json", "adapter_model.safetensors"))


def blob(config: bytes, weights: bytes) -> bytes:
    return struct.pack("<Q", len(config)) + config + struct.pack("<Q", len(weights)) + weights


def outcome(data: bytes, base: Base) -> str:
    """`good`, or the reason. Any other exception fails the test, and so does a message that is not fit to show."""
    refusal: AdapterError | None = None
    try:
        check(memoryview(data), base, LoraConfig())
    except AdapterError as error:
        refusal = error
    if refusal is None:
        return "good"
    assert refusal.reason in REASONS
    assert len(refusal.message) < 800
    assert refusal.message.isascii()
    assert refusal.message.isprintable()
    return refusal.reason


def mangled(draw: random.Random, data: bytes) -> bytes:
    """A few bytes changed, cut, repeated, moved or replaced by telling ones."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(out) + 1)
        length = draw.choice([1, 1, 2, 8, 50])
        match draw.randrange(6):
            case 0:
                out[at : at + length] = draw.randbytes(length)
            case 1:
                del out[at : at + length]
            case 2:
                out[at:at] = out[max(0, at - length) : at]
            case 3:
                out[at:at] = draw.choice(
                    [b'"', b"{", b"]", b"\\ud800", b"\xff", b"1e999", b"null", b"-1", b"9" * 30]
                )
            case 4:
                out[at : at + 8] = struct.pack("<Q", draw.choice([0, 1, 1 << 20, 1 << 40, (1 << 64) - 1]))
            case _:
                if out:
                    out[min(at, len(out) - 1)] ^= 1 << draw.randrange(8)
    return bytes(out)


ODD: list[Any] = [
    None, True, 0, -1, 2, 1.5, 1e300, 10**40, "", "x", "q_proj", ".*", "(", "(a+)+$", "\ud800", "../../x", [], [1],
    ["x"], [[0, 2]], {}, {"q_proj": 2}, {"(": 1},
    {"x": None}, {"a" * 2000: 3}, ["\n"], "pissa", [None], {"x": {"y": []}},
]  # fmt: skip


def bent(draw: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with some fields replaced, removed or invented."""
    out = dict(config)
    for _ in range(draw.randint(1, 3)):
        key = draw.choice([*config, "a_field_of_tomorrow"])
        if draw.random() < 0.1:
            out.pop(key, None)
        else:
            out[key] = draw.choice(ODD)
    return out


def bent_header(draw: random.Random, weights: bytes) -> bytes:
    """A file with a well-formed header whose entries say something else."""
    size = struct.unpack_from("<Q", weights)[0]
    header = json.loads(weights[8 : 8 + size])
    header.pop("__metadata__", None)
    for _ in range(draw.randint(1, 2)):
        name = draw.choice([n for n, entry in header.items() if isinstance(entry, dict) and "shape" in entry])
        entry = header[name]
        match draw.randrange(5):
            case 0:
                odd = ["x", "../../../etc/passwd", "\ud800", "\n" * 20, name + ".x", "lora_A", "a" * 600]
                header[draw.choice(odd)] = header.pop(name)
            case 1:
                entry["shape"] = draw.choice(
                    [[], [0], [1, 1, 1, 1, 1], [1 << 47, 1 << 47], [-1], ["1"], entry["shape"][::-1]]
                )
            case 2:
                entry["data_offsets"] = draw.choice(
                    [[0, 0], [0, 1 << 40], [4, 0], [-4, 0], [], [0.0, 4.0], None]
                )
            case 3:
                entry["dtype"] = draw.choice(["F16", "I8", "BOOL", "F8_E4M3", "", None, ["F32"], {}])
            case _:
                header[name] = draw.choice(ODD)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + weights[8 + size :]


@pytest.mark.parametrize(
    "kind", ["bytes of the file", "bytes of the configuration", "fields", "header", "whole blob"]
)
def test_mutations_of_a_good_adapter(kind: str, parts: tuple[bytes, bytes], base: Base) -> None:
    config, weights = parts
    assert outcome(blob(config, weights), base) == "good"
    size = 8 + struct.unpack_from("<Q", weights)[0]
    draw = random.Random(kind)
    seen: Counter[str] = Counter()
    until = time.monotonic() + 60
    for _ in range(700):
        match kind:
            case "bytes of the file":  # most of them in the header
                cut = draw.choice([size, size, len(weights)])
                data = blob(config, mangled(draw, weights[:cut]) + weights[cut:])
            case "bytes of the configuration":
                data = blob(mangled(draw, config), weights)
            case "fields":
                data = blob(json.dumps(bent(draw, json.loads(config))).encode(), weights)
            case "header":
                data = blob(config, bent_header(draw, weights))
            case _:
                data = mangled(draw, blob(config, weights))
        seen[outcome(data, base)] += 1
        assert time.monotonic() < until, "each check must end soon"
    assert seen["good"] < 500, seen
    assert len(seen) >= 2, seen


BOMBS = {
    "nested header": b"[" * (2 << 20),
    "header of many names": b"{" + b",".join(b'"%d":{}' % n for n in range(180_000)) + b"}",
    "header of one long number": b'{"a":' + b"9" * (1 << 20) + b"}",
    "header of one long name": b'{"' + b"a" * (1 << 20) + b'":{}}',
    "header larger than is read": b" " * (3 << 20),
    "metadata": b'{"__metadata__":{' + b",".join(b'"%d":"x"' % n for n in range(120_000)) + b"}}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_take_little_memory_and_time(name: str, parts: tuple[bytes, bytes], base: Base) -> None:
    header = BOMBS[name]
    data = blob(parts[0], struct.pack("<Q", len(header)) + header)
    started = time.monotonic()
    tracemalloc.start()
    try:
        assert outcome(data, base) != "good"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 96 << 20, f"{peak >> 20} MiB"
    assert time.monotonic() - started < 20


def test_a_pickle_named_as_safetensors_is_never_loaded(
    parts: tuple[bytes, bytes], base: Base, tmp_path: Path
) -> None:
    import pickle

    class Mark:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    for data in (pickle.dumps(Mark()), b"PK\x03\x04" + pickle.dumps(Mark()) * 40):
        assert outcome(blob(parts[0], data), base) == "InvalidTensors"
    torch.save({"base_model.model.lm_head.lora_A.weight": Mark()}, tmp_path / "weights.bin")
    assert outcome(blob(parts[0], (tmp_path / "weights.bin").read_bytes()), base) == "InvalidTensors"
    assert not (tmp_path / "ran").exists()
