"""The HTTP process: the tokenizer and the applications of both ports, at their end of the link to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tenantry_engine.defaults import Defaults
from tenantry_engine.identity import Verifier
from tenantry_engine.ipc.link import EngineLink
from tenantry_engine.server.admin import Admin
from tenantry_engine.server.metrics import Metrics
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
        serving = Serving(link, tokenizer, Defaults.of(model), verifier, metrics, adapters=adapters)
        return cls(link, serving, Admin(link, verifier, metrics, serving.smoke))
