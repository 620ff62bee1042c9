"""Decides whether an adapter fits the base model, tensor by tensor, before anything of it is served."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tenantry_kernels import Layout, VocabularyModule, layout

from tenantry_engine.adapters import peft_config, tensors
from tenantry_engine.adapters.base import Base
from tenantry_engine.adapters.hostile import invalid
from tenantry_engine.adapters.safetensors_file import Entry, is_finite, read_header, read_tensor
from tenantry_engine.adapters.tensors import EMBEDDING, HEAD
from tenantry_engine.config import PROJECTIONS, LoraConfig
from tenantry_engine.digest import split_blob
from tenantry_engine.errors import AdapterError

Pair = tuple[Entry, Entry]
"""A and B of one module."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_VOCABULARY = {VocabularyModule.EMBED: EMBEDDING, VocabularyModule.HEAD: HEAD}


@dataclass(frozen=True)
class CheckedAdapter:
    """An adapter that fits: its scales, its place in virtual pages, and where its tensors lie."""

    rank: int
    plan: Layout
    scales: tuple[tuple[float, ...], ...]
    tensors: dict[tuple[int, int], Pair]  # by (layer, module)
    vocabulary_scales: tuple[float, float]
    vocabulary: dict[VocabularyModule, Pair]


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
    modules = [*paths, EMBEDDING, HEAD]
    targets = _tied(peft_config.resolve(config, modules), config, base)
    rank = _check_limits(targets, limits)
    found = tensors.sort(read_header(file), targets, modules)
    shape = base.shape
    ranks = [[0] * shape.modules for _ in range(shape.layers)]
    scales = [[0.0] * shape.modules for _ in range(shape.layers)]
    pairs: dict[tuple[int, int], Pair] = {}
    for module, at in paths.items():
        if module in targets:
            layer, index = at
            lora, pairs[at] = targets[module], found.pairs[module]
            tensors.check_shape(
                module, pairs[at], lora.rank, shape.in_features[index], shape.out_features[index]
            )
            ranks[layer][index], scales[layer][index] = lora.rank, lora.scale
    vocabulary = {key: found.pairs[module] for key, module in _VOCABULARY.items() if module in targets}
    for key, pair in vocabulary.items():
        widths = (shape.vocab, shape.hidden) if key is VocabularyModule.EMBED else (shape.hidden, shape.vocab)
        tensors.check_shape(_VOCABULARY[key], pair, targets[_VOCABULARY[key]].rank, *widths)
    plan = _plan(base, ranks, tuple(targets[m].rank if m in targets else 0 for m in (EMBEDDING, HEAD)))
    _check_values(file, found, base)
    if config.get("ensure_weight_tying") and base.tied and len(vocabulary) == 2:
        _check_tied(file, vocabulary)
    embed, head = (targets[m].scale if m in targets else 0.0 for m in (EMBEDDING, HEAD))
    return CheckedAdapter(rank, plan, tuple(map(tuple, scales)), pairs, (embed, head), vocabulary)


def _tied(
    targets: dict[str, peft_config.ModuleLora], config: dict[str, object], base: Base
) -> dict[str, peft_config.ModuleLora]:
    """With `ensure_weight_tying`, PEFT gives a tied head the LoRA of the embeddings, turned round."""
    if config.get("ensure_weight_tying") and base.tied and not targets.keys().isdisjoint({EMBEDDING, HEAD}):
        every = peft_config.resolve({**config, "target_modules": [EMBEDDING, HEAD]}, [EMBEDDING, HEAD])
        return {**targets, **every}
    return targets


def _check_limits(targets: dict[str, peft_config.ModuleLora], limits: LoraConfig) -> int:
    """The largest rank."""
    if not targets:
        raise AdapterError(
            "BaseModelMismatch", "`target_modules` must match a module of the base model; none matches"
        )
    for module in targets:
        if module.rpartition(".")[2] not in limits.target_modules:
            raise AdapterError(
                "UnsupportedConfig",
                f"`target_modules` must stay within {', '.join(limits.target_modules)} on this pool, not {module}",
            )
    largest = max(t.rank for t in targets.values())
    if largest > limits.max_rank:
        raise AdapterError(
            "RankTooLarge", f"rank {largest} must be at most {limits.max_rank}, the pool's `maxRank`"
        )
    return largest


def _plan(base: Base, ranks: list[list[int]], vocabulary: tuple[int, ...]) -> Layout:
    embed, head = vocabulary
    plan = layout(base.held, ranks, base.page_elems, (embed, head))
    if plan.pages > base.max_pages:
        raise AdapterError(
            "TooLarge",
            f"it needs {plan.pages} pages, more than the {base.max_pages} that this pool can give to one",
        )
    return plan


def _check_values(file: memoryview, found: tensors.Tensors, base: Base) -> None:
    for module, pair in found.pairs.items():
        for entry in pair:
            if not is_finite(read_tensor(file, entry), base.dtype):
                raise invalid(f"`{module}` must have finite values in {base.dtype}")
    for module, entry in found.base.items():
        ours = base.weight(module)
        if ours is None or tuple(ours.shape) != entry.shape:
            raise AdapterError(
                "BaseModelMismatch",
                f"`{module}.base_layer.weight` must have the shape of the base model's weight",
            )
        theirs = read_tensor(file, entry)
        same = torch.equal(theirs, ours.to(theirs.dtype)) or torch.equal(
            theirs.to(base.dtype), ours.to(base.dtype)
        )
        if not same:
            raise AdapterError(
                "BaseModelMismatch",
                f"`{module}.base_layer.weight` must equal the base model's own weight: a changed base is not served",
            )


def _check_tied(file: memoryview, vocabulary: dict[VocabularyModule, Pair]) -> None:
    embed, head = (
        [read_tensor(file, entry) for entry in vocabulary[key]]
        for key in (VocabularyModule.EMBED, VocabularyModule.HEAD)
    )
    if not (torch.equal(head[0], embed[1].t()) and torch.equal(head[1], embed[0].t())):
        raise invalid(
            f"with `ensure_weight_tying`, `{HEAD}` must have the weights of `{EMBEDDING}`, transposed"
        )
