"""An adapter loaded cold: from its mapped file (in the page cache) into pages, its SHA-256 verified.

By rank, so by bytes. Beside each load stand, in turns, the two things that bound it on a CPU: a copy of as many bytes
from memory to memory, and the SHA-256 of the file.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tenantry_engine.adapters.base import Base
from tenantry_engine.adapters.check import CheckedAdapter, check
from tenantry_engine.adapters.loading import PageLoader
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.config import LoraConfig
from tenantry_engine.digest import folder_blob, folder_digest
from tenantry_kernels import KvShape, LoraShape
from workload import RANKS

TIMES_BOUND = "cold load: time of the largest, to a copy and the digest of its bytes"


def shapes(model: Path) -> tuple[LoraShape, KvShape]:
    """What the pages of this model hold."""
    c = json.loads((model / "config.json").read_text())
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    width, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shape = LoraShape(
        c["num_hidden_layers"], (hidden, hidden, hidden, width, hidden, hidden, inner),
        (width, kv, kv, hidden, inner, inner, hidden), c["vocab_size"],
    )  # fmt: skip
    return shape, KvShape(c["num_hidden_layers"], c["num_key_value_heads"], head)


def look(model: Path, folder: Path) -> tuple[CheckedAdapter, bytes]:
    """An adapter as the registry knows it, and its blob."""
    shape, kv = shapes(model)
    blob = b"".join(folder_blob(folder))
    base = Base(shape, kv.page_elems, torch.bfloat16, 1 << 20)
    return check(memoryview(blob), base, LoraConfig()), blob


def measure_cold(model: Path, adapters: list[Path], data: Path, rounds: int) -> dict[str, Any]:
    """One adapter of each rank of the cycle (`adapters` follow it), `rounds` times each, in turns."""
    _, kv = shapes(model)
    store = BlobStore(data)
    memory = torch.zeros(256, kv.page_elems, dtype=torch.bfloat16)
    loader = PageLoader(store, memory)
    contenders: dict[int, dict[str, Callable[[], object]]] = {}
    sizes: dict[int, int] = {}
    for rank, folder in sorted(dict(zip(RANKS, adapters, strict=False)).items()):
        checked, blob = look(model, folder)
        digest = folder_digest(folder)
        with store.receive(digest, len(blob)) as incoming:
            incoming.write(blob)
            incoming.commit()
        pages = list(range(checked.plan.pages))
        source, target = torch.zeros(2, len(pages), kv.page_elems, dtype=torch.bfloat16).unbind()
        sizes[rank] = source.nbytes

        def load(digest: str = digest, checked: CheckedAdapter = checked, pages: list[int] = pages) -> None:
            loader.fill(digest, checked, pages, loader.settled())

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target.copy_(source)

        contenders[rank] = {"load": load, "copy": copy, "digest": partial(hashlib.sha256, blob)}
    times: dict[int, dict[str, list[float]]] = {r: {k: [] for k in c} for r, c in contenders.items()}
    for number in range(rounds + 1):
        for rank, each in contenders.items():
            for name, run in each.items():
                started = time.perf_counter()
                run()
                if number:  # the first one of each touches its memory for the first time
                    times[rank][name].append(1e3 * (time.perf_counter() - started))
    rows: list[dict[str, Any]] = []
    for rank, seen in times.items():
        ms = {name: statistics.median(values) for name, values in seen.items()}
        rows.append(
            {
                "rank": rank,
                "bytes": sizes[rank],
                "ms": ms["load"],
                "least and most ms": [min(seen["load"]), max(seen["load"])],
                "GB/s": sizes[rank] / ms["load"] / 1e6,
                "copy ms": ms["copy"],
                "copy GB/s": sizes[rank] / ms["copy"] / 1e6,
                "digest ms": ms["digest"],
            }
        )
    largest = rows[-1]
    return {"cold load": rows, TIMES_BOUND: largest["ms"] / (largest["copy ms"] + largest["digest ms"])}
