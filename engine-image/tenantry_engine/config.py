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

ADAPTABLE = (*PROJECTIONS, "embed_tokens", "lm_head")
"""Everything that may carry LoRA."""


@dataclass(frozen=True)
class LoraConfig:
    """Bounds on adapters. `None` instead of it = the engine serves its base model alone."""

    max_rank: int = 64
    max_registered: int = 2000
    target_modules: tuple[str, ...] = ADAPTABLE
    max_bytes: int = 1 << 30
    host_bytes: int | None = None  # pinned host memory for adapters; None = a share of what is free, on a GPU

    def __post_init__(self) -> None:
        if self.max_rank < 1:
            raise EngineError(f"`--max-rank` must be at least 1, not {self.max_rank}")
        if self.max_registered < 1:
            raise EngineError(f"`--max-registered` must be at least 1, not {self.max_registered}")
        for name in self.target_modules:
            if name not in ADAPTABLE:
                raise EngineError(
                    f"`--target-modules` must list some of {', '.join(ADAPTABLE)}, not {name!r}"
                )


@dataclass(frozen=True)
class EngineConfig:
    """One replica."""

    model: Path
    model_name: str
    data_dir: Path
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    tensor_parallel_size: int = 1  # processes that hold the model together
    max_model_len: int | None = None
    slots: int = 16
    pool_bytes: int | None = None
    step_tokens: int = 256
    target_token_gap: float | None = None  # seconds; None = by device
    prefix_cache: bool = True
    max_waiting: int = 512
    stall_seconds: float = 60.0
    model_digest: str | None = None
    lora: LoraConfig | None = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        for name, value in (
            ("--slots", self.slots),
            ("--max-waiting", self.max_waiting),
            ("--tensor-parallel-size", self.tensor_parallel_size),
        ):
            if value < 1:
                raise EngineError(f"`{name}` must be at least 1, not {value}")
        if self.step_tokens <= self.slots:
            raise EngineError(
                f"`--step-tokens` must be more than `--slots` ({self.slots}), not {self.step_tokens}: "
                "every running sequence takes one token of each step"
            )
        if self.token_gap <= 0:
            raise EngineError(f"`--target-token-gap` must be more than 0 seconds, not {self.token_gap}")

    @property
    def token_gap(self) -> float:
        """Seconds that a step with running requests should stay below."""
        if self.target_token_gap is not None:
            return self.target_token_gap
        return 0.1 if self.device == "cpu" else 0.05


def configure(options: argparse.Namespace) -> EngineConfig:
    """The options as a configuration. Raises EngineError."""
    lora = None
    if not options.no_lora:
        targets: tuple[str, ...] = ADAPTABLE
        if options.target_modules is not None:
            targets = tuple(name.strip() for name in options.target_modules.split(",") if name.strip())
        lora = LoraConfig(
            options.max_rank, options.max_registered, targets, host_bytes=options.adapter_host_bytes
        )
    return EngineConfig(
        model=options.model,
        model_name=options.model_name or options.model.resolve().name,
        data_dir=options.data_dir,
        dtype=DTYPES[options.dtype],
        device=options.device,
        tensor_parallel_size=options.tensor_parallel_size,
        max_model_len=options.max_model_len,
        slots=options.slots,
        pool_bytes=options.pool_bytes,
        step_tokens=options.step_tokens,
        target_token_gap=options.target_token_gap,
        prefix_cache=not options.no_prefix_cache,
        max_waiting=options.max_waiting,
        stall_seconds=options.stall_seconds,
        model_digest=options.model_digest,
        lora=lora,
    )
