"""The HTTP process: the tokenizer and the applications of both ports, at their end of the link to the engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenantry_engine.identity import Verifier
from tenantry_engine.ipc.link import EngineLink
from tenantry_engine.server.admin import Admin
from tenantry_engine.server.metrics import Metrics
from tenantry_engine.server.sampling import Defaults
from tenantry_engine.server.serving import Serving
from tenantry_engine.tokenizer import Tokenizer


@dataclass
class Front:
    """Everything of the HTTP process but its sockets."""

    link: EngineLink
    serving: Serving
    admin: Admin

    @classmethod
    def make(
        cls,
        link: EngineLink,
        model: Path,
        tokenizer: Tokenizer,
        verifier: Verifier | None,
        *,
        adapters: Path | None = None,
    ) -> Front:
        """For an engine that is ready. `model` is the folder whose tokenizer it is, `adapters` that of `--adapters`."""
        metrics = Metrics(link.model_name)
        link.observer = metrics.step
        serving = Serving(link, tokenizer, read_defaults(model), verifier, metrics, adapters=adapters)
        return cls(link, serving, Admin(link, verifier, metrics))


def read_defaults(folder: Path) -> Defaults:
    """Sampling defaults and ends of text from generation_config.json, else config.json."""
    generation = _read(folder / "generation_config.json")
    eos = generation.get("eos_token_id", _read(folder / "config.json").get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    sampled = bool(generation.get("do_sample"))
    return Defaults(
        eos=frozenset(int(token) for token in ids),
        temperature=float(generation.get("temperature") or 1.0) if sampled else 1.0,
        top_p=float(generation.get("top_p") or 1.0) if sampled else 1.0,
        top_k=int(generation.get("top_k") or 0) if sampled else 0,
    )


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return value
