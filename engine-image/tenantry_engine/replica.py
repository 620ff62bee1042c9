"""Puts one replica together: model, pages, engine thread, and the two applications."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenantry_kernels import describe

from tenantry_engine.adapters.registry import Declaration
from tenantry_engine.config import EngineConfig
from tenantry_engine.digest import folder_blob, folder_digest, model_digest
from tenantry_engine.engine import Engine
from tenantry_engine.errors import EngineError
from tenantry_engine.grammar import Grammars
from tenantry_engine.identity import Verifier
from tenantry_engine.loader import Weights, read_config
from tenantry_engine.memory import available_bytes, size_pool
from tenantry_engine.models import load_model
from tenantry_engine.runner import Runner
from tenantry_engine.sampler import Sampler
from tenantry_engine.server.admin import Admin
from tenantry_engine.server.metrics import Metrics
from tenantry_engine.server.serving import Defaults, Serving
from tenantry_engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass
class Replica:
    """Everything of one process but its sockets."""

    engine: Engine
    serving: Serving
    admin: Admin

    @classmethod
    def load(cls, config: EngineConfig, verifier: Verifier | None) -> Replica:
        """Loads the model and says what it does. Raises EngineError."""
        log.info("%s", describe(config.device, config.dtype))
        started = time.monotonic()
        digest = model_digest(config.model)
        if config.model_digest not in (None, digest):
            raise EngineError(
                f"`--model-digest` must be the folder's digest {digest}, not {config.model_digest}"
            )
        tokenizer = Tokenizer(config.model)
        with Weights(config.model, config.dtype, config.device) as weights:
            model = load_model(weights)
        length = config.max_model_len or model.max_positions
        if not 1 < length <= model.max_positions:
            raise EngineError(
                f"`--max-model-len` must be 2 to {model.max_positions}, the model's own limit, not {length}"
            )
        model.prepare(length)
        log.info(
            "weights: %s in %s, %s, %.1f s",
            config.model_name,
            config.dtype,
            digest,
            time.monotonic() - started,
        )
        page_bytes = model.kv_shape.page_elems * config.dtype.itemsize
        sizes = size_pool(
            shape=model.lora_shape,
            page_elems=model.kv_shape.page_elems,
            page_bytes=page_bytes,
            lora=config.lora,
            max_model_len=length,
            slots=config.slots,
            pool_bytes=config.pool_bytes,
            available=available_bytes(),
        )
        grammars = Grammars(
            (config.model / "tokenizer.json").read_text, model.vocab_size, read_defaults(config.model).eos
        )
        runner = Runner(model, sizes.pages, config.device, Sampler(grammars))
        log.info(
            "pages: %d of %d KiB (%.2f GiB); a sequence of %d tokens takes %d, the largest adapter %d",
            sizes.pages, page_bytes >> 10, sizes.pages * page_bytes / (1 << 30), length, sizes.sequence_pages - 1,
            sizes.adapter_pages,
        )  # fmt: skip
        engine = Engine(config, runner, sizes, length)
        metrics = Metrics(config.model_name)
        engine.observer = metrics.step
        serving = Serving(engine, tokenizer, read_defaults(config.model), verifier, metrics)
        return cls(engine, serving, Admin(engine, digest, verifier, metrics))

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to serve."""
        self.serving.attach(loop)
        self.engine.start()
        self.admin.ready = True

    def register_folder(self, folder: Path) -> None:
        """Declares every PEFT folder in `folder` under its own name, for any tenant (development)."""
        lora = self.engine.config.lora
        if lora is None:
            raise EngineError("`--adapters` must not be given with `--no-lora`")
        found = sorted(path.parent for path in folder.glob("*/adapter_config.json"))
        if not found:
            raise EngineError(f"`--adapters` must hold folders with an adapter_config.json: {folder}")
        declarations = []
        store = self.engine.registry.store
        for path in found:
            digest = folder_digest(path)
            if not store.has(digest):
                with store.receive(digest, lora.max_bytes) as incoming:
                    for piece in folder_blob(path):
                        incoming.write(piece)
                    incoming.commit()
            declarations.append(Declaration(path.name, digest))
            log.info("adapter: %s %s", path.name, digest)
        self.engine.registry.declare((0, 0), declarations, time.monotonic())


def read_defaults(folder: Path) -> Defaults:
    """Sampling defaults and ends of text from generation_config.json, else config.json."""
    path = folder / "generation_config.json"
    generation: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    eos = generation.get("eos_token_id", read_config(folder).get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    sampled = bool(generation.get("do_sample"))
    return Defaults(
        eos=frozenset(int(token) for token in ids),
        temperature=float(generation.get("temperature") or 1.0) if sampled else 1.0,
        top_p=float(generation.get("top_p") or 1.0) if sampled else 1.0,
        top_k=int(generation.get("top_k") or 0) if sampled else 0,
    )
