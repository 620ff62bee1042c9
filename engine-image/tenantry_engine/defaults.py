"""What the model's folder says of its answers: where they end, and how they are sampled unless a request says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Defaults:
    """Ends of text, and sampling that requests may override."""

    eos: frozenset[int]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, folder: Path) -> Defaults:
        """From generation_config.json, else config.json."""
        generation = _read(folder / "generation_config.json")
        eos = generation.get("eos_token_id", _read(folder / "config.json").get("eos_token_id"))
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        sampled = bool(generation.get("do_sample"))
        return cls(
            eos=frozenset(int(token) for token in ids),
            temperature=float(generation.get("temperature") or 1.0) if sampled else 1.0,
            top_p=float(generation.get("top_p") or 1.0) if sampled else 1.0,
            top_k=int(generation.get("top_k") or 0) if sampled else 0,
        )


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return value
