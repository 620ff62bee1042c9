"""Decides whether an adapter fits the base model, tensor by tensor, before anything of it is served."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from tenantry_kernels import Layout, LoraShape, layout

from tenantry_engine.adapters import peft_config
from tenantry_engine.adapters.safetensors_file import Entry, read_header, read_tensor
from tenantry_engine.config import PROJECTIONS, LoraConfig
from tenantry_engine.digest import split_blob
from tenantry_engine.errors import AdapterError

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_NOT_ADAPTED = ("lm_head", "model.embed_tokens")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.(?P<half>lora_A|lora_B)\.weight")


@dataclass(frozen=True)
class Base:
    """What the checks must know of the base model."""

    shape: LoraShape
    page_elems: int
    dtype: torch.dtype
    max_pages: int  # that one adapter may take of the pool


@dataclass(frozen=True)
class CheckedAdapter:
    """An adapter that fits: its scales, its place in virtual pages, and where its tensors lie."""

    rank: int
    plan: Layout
    scales: tuple[tuple[float, ...], ...]
    tensors: dict[tuple[int, int], tuple[Entry, Entry]]  # (layer, module) -> A, B


def module_path(layer: int, module: int) -> str:
    """The name of a projection in the model's own tree."""
    name = PROJECTIONS[module]
    return f"model.layers.{layer}.{'self_attn' if name in _ATTENTION else 'mlp'}.{name}"


def check(blob: memoryview, base: Base, limits: LoraConfig) -> CheckedAdapter:
    """Reads the whole blob. Raises AdapterError with the reason when this engine cannot serve exactly what it says."""
    raw, file = split_blob(blob)
    config = peft_config.parse(bytes(raw))
    paths = {
        module_path(layer, module): (layer, module)
        for layer in range(base.shape.layers)
        for module in range(base.shape.modules)
    }
    targets = peft_config.resolve(config, [*paths, *_NOT_ADAPTED])
    for module in targets:
        if module not in paths:
            raise AdapterError(
                "UnsupportedConfig", f"`target_modules` must not reach `{module}`: it is not adapted here"
            )
        if PROJECTIONS[paths[module][1]] not in limits.target_modules:
            raise AdapterError(
                "UnsupportedConfig",
                f"`target_modules` must stay within {', '.join(limits.target_modules)} on this pool, not {module}",
            )
    largest = max((t.rank for t in targets.values()), default=0)
    if largest > limits.max_rank:
        raise AdapterError(
            "RankTooLarge", f"rank {largest} must be at most {limits.max_rank}, the pool's `maxRank`"
        )
    tensors = _match(read_header(file), targets, paths, base)
    ranks = [[0] * base.shape.modules for _ in range(base.shape.layers)]
    scales = [[0.0] * base.shape.modules for _ in range(base.shape.layers)]
    for module, lora in targets.items():
        layer, index = paths[module]
        ranks[layer][index], scales[layer][index] = lora.rank, lora.scale
        for entry in tensors[layer, index]:
            if not torch.isfinite(read_tensor(file, entry).to(base.dtype)).all():
                raise AdapterError("InvalidTensors", f"`{module}` must have finite values in {base.dtype}")
    plan = layout(base.shape, ranks, base.page_elems)
    if plan.pages > base.max_pages:
        raise AdapterError(
            "TooLarge",
            f"it needs {plan.pages} pages, more than the {base.max_pages} that this pool can give to one",
        )
    return CheckedAdapter(largest, plan, tuple(map(tuple, scales)), tensors)


def _match(
    entries: dict[str, Entry],
    targets: dict[str, peft_config.ModuleLora],
    paths: dict[str, tuple[int, int]],
    base: Base,
) -> dict[tuple[int, int], tuple[Entry, Entry]]:
    """Every tensor belongs to a targeted module and every targeted module has both of its tensors."""
    halves: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise AdapterError(
                "InvalidTensors", f"`{name}` must be a lora_A or lora_B weight; it would be ignored"
            )
        module = found["module"]
        if module not in paths and module not in _NOT_ADAPTED:
            raise AdapterError(
                "BaseModelMismatch", f"`{name}` must match a module of the base model; none has this name"
            )
        if module not in targets:
            raise AdapterError(
                "InvalidTensors",
                f"`{name}` must be reached by `target_modules` of the configuration; it is not",
            )
        halves.setdefault(module, {})[found["half"]] = entry
    if not targets:
        raise AdapterError(
            "BaseModelMismatch", "`target_modules` must match a module of the base model; none matches"
        )
    tensors: dict[tuple[int, int], tuple[Entry, Entry]] = {}
    for module, lora in targets.items():
        pair = halves.get(module, {})
        if set(pair) != {"lora_A", "lora_B"}:
            raise AdapterError(
                "InvalidTensors", f"`{module}` is targeted, so it must have lora_A and lora_B weights"
            )
        layer, index = paths[module]
        _check_shape(module, pair, lora.rank, base.shape.in_features[index], base.shape.out_features[index])
        tensors[layer, index] = (pair["lora_A"], pair["lora_B"])
    return tensors


def _check_shape(module: str, pair: dict[str, Entry], rank: int, width_in: int, width_out: int) -> None:
    for half, want in (("lora_A", (rank, width_in)), ("lora_B", (width_out, rank))):
        have = pair[half].shape
        if have == want:
            continue
        rank_axis = 0 if half == "lora_A" else 1
        if len(have) == 2 and have[rank_axis] == rank:
            raise AdapterError(
                "BaseModelMismatch",
                f"`{module}.{half}` must have shape {list(want)} for this base, not {list(have)}",
            )
        raise AdapterError(
            "InvalidTensors",
            f"`{module}.{half}` must have shape {list(want)} by the configuration's rank, not {list(have)}",
        )
