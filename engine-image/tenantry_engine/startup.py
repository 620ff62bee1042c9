"""Puts the engine together: model, pages, adapters. No HTTP: the engine's process imports none of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from tenantry_kernels import describe

from tenantry_engine.adapters.registry import Declaration
from tenantry_engine.config import EngineConfig
from tenantry_engine.defaults import Defaults
from tenantry_engine.digest import folder_blob, folder_digest, model_digest, most_blob_bytes
from tenantry_engine.engine import Engine
from tenantry_engine.errors import EngineError
from tenantry_engine.executor import SCORED_ROWS, Executor
from tenantry_engine.grammar import Grammars
from tenantry_engine.ipc.messages import Facts
from tenantry_engine.loader import Weights
from tenantry_engine.memory import pool_budget, size_pool, step_bytes
from tenantry_engine.models import load_model
from tenantry_engine.parallel.group import SOLO
from tenantry_engine.parallel.leader import Ranks
from tenantry_engine.runner import Runner
from tenantry_engine.sampler import Sampler
from tenantry_engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 3.0


def load_engine(config: EngineConfig) -> tuple[Engine, Facts]:
    """Loads the model and says what it does; the engine does not run yet. Raises EngineError."""
    log.info("%s", describe(config.device, config.dtype))
    started = time.monotonic()
    digest = model_digest(config.model)
    if config.model_digest not in (None, digest):
        raise EngineError(f"`--model-digest` must be the folder's digest {digest}, not {config.model_digest}")
    ranks = Ranks(config) if config.tensor_parallel_size > 1 else None
    log.info("weights: digest of %s after %.1f s; reading", config.model_name, time.monotonic() - started)
    with Weights(config.model, config.dtype, config.device, _progress()) as weights:
        model = load_model(weights, ranks.join() if ranks else SOLO)
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
    working = step_bytes(
        model.part, config.dtype, step_tokens=config.step_tokens, logit_rows=max(config.slots, SCORED_ROWS),
        max_rank=config.lora.max_rank if config.lora else 0,
    )  # fmt: skip
    sizes = size_pool(
        shape=model.lora_shape,
        page_elems=model.kv_shape.page_elems,
        page_bytes=page_bytes,
        lora=config.lora,
        max_model_len=length,
        slots=config.slots,
        pool_bytes=config.pool_bytes,
        budget=pool_budget(config.device, config.tensor_parallel_size, working=working),
    )
    if ranks:
        ranks.allocate(sizes.pages, length)
    grammars = Grammars(lambda: Tokenizer(config.model), model.vocab_size, Defaults.of(config.model).eos)
    executor = Executor(
        model,
        sizes.pages,
        config.device,
        positions=length,
        max_rank=config.lora.max_rank if config.lora else 1,
    )
    runner = Runner(executor, Sampler(grammars), ranks)
    log.info(
        "pages: %d of %d KiB (%.2f GiB); a sequence of %d tokens takes %d, the largest adapter %d",
        sizes.pages, page_bytes >> 10, sizes.pages * page_bytes / (1 << 30), length, sizes.sequence_pages - 1,
        sizes.adapter_pages,
    )  # fmt: skip
    lora = config.lora
    facts = Facts(
        model_name=config.model_name,
        model_digest=digest,
        max_model_len=length,
        slots=config.slots,
        max_waiting=config.max_waiting,
        stall_seconds=config.stall_seconds,
        data_dir=str(config.data_dir),
        max_rank=lora.max_rank if lora else 0,
        max_registered=lora.max_registered if lora else 0,
        max_adapter_bytes=lora.max_bytes if lora else 0,
    )
    return Engine(config, runner, sizes, length, digest=digest), facts


def _progress() -> Callable[[float], None]:
    """Says every few seconds which share of the weights has been read."""
    said = time.monotonic()

    def tell(share: float) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _PROGRESS_SECONDS:
            said = now
            log.info("weights: %.0f %% read", 100 * share)

    return tell


def register_folder(engine: Engine, folder: Path) -> None:
    """Declares every PEFT folder in `folder` under its own name, for any tenant (development)."""
    lora = engine.config.lora
    if lora is None:
        raise EngineError("`--adapters` must not be given with `--no-lora`")
    found = sorted(path.parent for path in folder.glob("*/adapter_config.json"))
    if not found:
        raise EngineError(f"`--adapters` must hold folders with an adapter_config.json: {folder}")
    declarations = []
    store = engine.registry.store
    for path in found:
        digest = folder_digest(path)
        if not store.has(digest):
            with store.receive(digest, most_blob_bytes(lora.max_bytes)) as incoming:
                for piece in folder_blob(path):
                    incoming.write(piece)
                incoming.commit()
        declarations.append(Declaration(path.name, digest))
        log.info("adapter: %s %s", path.name, digest)
    engine.registry.declare((0, 0), declarations, time.monotonic())
