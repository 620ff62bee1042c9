"""What one engine process is told at its start. Frozen: nothing of this changes while it runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tenantry_engine.errors import EngineError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers that may carry LoRA, in the order of `tenantry_kernels.Module`."""


@dataclass(frozen=True)
class LoraConfig:
    """Bounds on adapters. `None` instead of it = the engine serves its base model alone."""

    max_rank: int = 64
    max_registered: int = 2000
    target_modules: tuple[str, ...] = PROJECTIONS
    max_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.max_rank < 1:
            raise EngineError(f"`--max-rank` must be at least 1, not {self.max_rank}")
        if self.max_registered < 1:
            raise EngineError(f"`--max-registered` must be at least 1, not {self.max_registered}")
        for name in self.target_modules:
            if name not in PROJECTIONS:
                raise EngineError(
                    f"`--target-modules` must list some of {', '.join(PROJECTIONS)}, not {name!r}"
                )


@dataclass(frozen=True)
class EngineConfig:
    """One replica."""

    model: Path
    model_name: str
    data_dir: Path
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    max_model_len: int | None = None
    slots: int = 16
    pool_bytes: int | None = None
    step_tokens: int = 256
    max_waiting: int = 512
    stall_seconds: float = 60.0
    model_digest: str | None = None
    lora: LoraConfig | None = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        for name, value in (("--slots", self.slots), ("--max-waiting", self.max_waiting)):
            if value < 1:
                raise EngineError(f"`{name}` must be at least 1, not {value}")
        if self.step_tokens <= self.slots:
            raise EngineError(
                f"`--step-tokens` must be more than `--slots` ({self.slots}), not {self.step_tokens}: "
                "every running sequence takes one token of each step"
            )


def configure(options: argparse.Namespace) -> EngineConfig:
    """The options as a configuration. Raises EngineError."""
    lora = None
    if not options.no_lora:
        targets = PROJECTIONS
        if options.target_modules is not None:
            targets = tuple(name.strip() for name in options.target_modules.split(",") if name.strip())
        lora = LoraConfig(options.max_rank, options.max_registered, targets)
    return EngineConfig(
        model=options.model,
        model_name=options.model_name or options.model.resolve().name,
        data_dir=options.data_dir,
        dtype=DTYPES[options.dtype],
        device=options.device,
        max_model_len=options.max_model_len,
        slots=options.slots,
        pool_bytes=options.pool_bytes,
        step_tokens=options.step_tokens,
        max_waiting=options.max_waiting,
        stall_seconds=options.stall_seconds,
        model_digest=options.model_digest,
        lora=lora,
    )
