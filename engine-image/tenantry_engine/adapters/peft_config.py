"""What `adapter_config.json` of PEFT may say, and what it means for each module of the base model.

An allow-list: a field that this engine does not know must be empty, so that nothing that changes the answer is ignored.
Meanings follow PEFT's `LoraConfig`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenantry_engine.adapters.hostile import shown, unsupported
from tenantry_engine.adapters.patterns import Match, Patterns, suffix

_WITHOUT_MEANING = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout",
        "peft_version", "revision", "megatron_core", "runtime_config", "qalora_group_size", "loftq_config",
        "lora_ga_config", "eva_config", "corda_config",
    }
)  # fmt: skip
"""Fields that do not change what a trained adapter computes on these layers (`fan_in_fan_out` speaks of how a base
layer's weight lies; on linear layers and embeddings PEFT takes no notice of it). The `*_config` ones are notes of an
initialisation; `init_lora_weights` decides whether that one altered the base model."""

_NEUTRAL_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal", "mica")
_READ = frozenset(
    {
        "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
        "exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights", "ensure_weight_tying",
    }
)  # fmt: skip
_REFUSED = {
    "use_dora": "DoRA is not served: merge its magnitudes away or train without",
    "lora_bias": "trained biases are not served",
    "modules_to_save": "whole layers are not served: train them with LoRA",
    "trainable_token_indices": "added or retrained tokens are not served",
    "layer_replication": "replicated layers are not served",
    "alora_invocation_tokens": "activated LoRA (aLoRA) is not served",
    "target_parameters": "LoRA of single parameters is not served",
}
"""What to say of fields that mean a method by name; any other unknown field is refused as such."""


@dataclass(frozen=True)
class ModuleLora:
    """What the configuration says about one module."""

    rank: int
    scale: float


def parse(raw: bytes) -> dict[str, Any]:
    """The configuration as a mapping, every field checked. Raises AdapterError UnsupportedConfig naming the field."""
    config = _read(raw)
    if config.get("peft_type") != "LORA":
        raise unsupported(f"`peft_type` must be LORA, not {shown(config.get('peft_type'))}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise unsupported(f"`task_type` must be CAUSAL_LM, not {shown(config['task_type'])}")
    if config.get("bias", "none") != "none":
        raise unsupported(f"`bias` must be none, not {shown(config['bias'])}: trained biases are not served")
    initial = config.get("init_lora_weights", True)
    if not any(
        initial is known or (initial == known and known not in (True, False))
        for known in _NEUTRAL_INITIALISATIONS
    ):
        raise unsupported(
            f"`init_lora_weights` {shown(initial)} alters the base model: convert the adapter first "
            "(PEFT's save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for name, value in config.items():
        if name not in _READ and name not in _WITHOUT_MEANING and not _empty(value):
            why = _REFUSED.get(name, f"{shown(value)} is not served")
            raise unsupported(f"`{shown(name)}` must be left at its default: {why}")
    for name in ("use_rslora", "ensure_weight_tying"):
        if not isinstance(config.get(name, False), bool):
            raise unsupported(f"`{name}` must be true or false")
    _rank("r", config.get("r", 8))
    _alpha("lora_alpha", config.get("lora_alpha", 8))
    for name, check in (("rank_pattern", _rank), ("alpha_pattern", _alpha)):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            raise unsupported(f"`{name}` must be an object")
        for key, value in pattern.items():
            check(f"{name}.{shown(key)}", value)
    _check_targets(config)
    return config


def resolve(config: Mapping[str, Any], modules: Sequence[str]) -> dict[str, ModuleLora]:
    """Which of the base model's `modules` (full paths) the configuration targets, each with its rank and scale.

    `config` comes from `parse`. Raises AdapterError UnsupportedConfig for patterns that are invalid or take too long.
    """
    patterns = Patterns()
    targets = _targets(config, patterns)
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    rank_of = patterns.lookup("rank_pattern", list(ranks))
    alpha_of = patterns.lookup("alpha_pattern", list(alphas))
    result: dict[str, ModuleLora] = {}
    for module in modules:
        if not targets(module):
            continue
        rank_key, alpha_key = rank_of(module), alpha_of(module)
        rank = int(config.get("r", 8) if rank_key is None else ranks[rank_key])
        alpha = float(config.get("lora_alpha", 8) if alpha_key is None else alphas[alpha_key])
        divisor = math.sqrt(rank) if config.get("use_rslora", False) else rank
        result[module] = ModuleLora(rank, alpha / divisor)
    return result


def _read(raw: bytes) -> dict[str, Any]:
    try:
        config = json.loads(raw, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise unsupported("the file must be JSON without NaN, Infinity and names that stand twice") from error
    if not isinstance(config, dict):
        raise unsupported("the file must hold a JSON object")
    return config


def _check_targets(config: Mapping[str, Any]) -> None:
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(name)
        if value is not None and not isinstance(value, str) and not _strings(value):
            raise unsupported(f"`{name}` must be a string or a list of strings")
    if not config.get("target_modules"):
        raise unsupported("`target_modules` must name at least one module")
    layers = config.get("layers_to_transform")
    if layers is None:
        return
    if not _integer(layers) and not (isinstance(layers, list) and all(_integer(n) for n in layers)):
        raise unsupported("`layers_to_transform` must be an integer or a list of integers")
    if isinstance(config["target_modules"], str) and layers != []:
        raise unsupported(
            "`layers_to_transform` must be absent when `target_modules` is a string, as in PEFT"
        )


def _targets(config: Mapping[str, Any], patterns: Patterns) -> Match:
    target, exclude = config["target_modules"], config.get("exclude_modules")
    if isinstance(exclude, str) and exclude:
        miss = patterns.full("exclude_modules", exclude)
    else:
        miss = suffix(exclude or [])
    if isinstance(target, str):
        # PEFT's shorthand: every linear layer but the head
        every: Match = lambda module: module.endswith("_proj")  # noqa: E731
        hit = every if target.lower() == "all-linear" else patterns.full("target_modules", target)
    else:
        hit = _listed(target, config, patterns)
    return lambda module: not miss(module) and hit(module)


def _listed(target: Sequence[str], config: Mapping[str, Any], patterns: Patterns) -> Match:
    """A list of targets: a full path is taken as it stands, an ending within the layers that are asked for."""
    exact, ends = set(target), suffix(target)
    layers, names = config.get("layers_to_transform"), config.get("layers_pattern")
    layers = [layers] if isinstance(layers, int) else layers
    names = [names] if isinstance(names, str) and names else names
    # the first number of a path is its layer, unless a pattern says which
    texts = [rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\." for name in names or ()] or [r".*?\.[^.]*\.(?P<idx>\d+)\."]
    compiled = [patterns.compile("layers_pattern", text) for text in texts] if layers else []

    def in_layers(module: str) -> bool:
        if not layers:
            return True
        for pattern in compiled:
            found = patterns.match(pattern, module)
            if found is not None:
                number = found.group("idx")
                return number is not None and number.isdecimal() and int(number) in layers
        return False

    return lambda module: module in exact or (ends(module) and in_layers(module))


def _empty(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _rank(field: str, value: object) -> None:
    if not _integer(value) or not 1 <= value < 1 << 16:  # type: ignore[operator]
        raise unsupported(f"`{field}` must be an integer of at least 1, not {shown(value)}")


def _alpha(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e9:
        raise unsupported(f"`{field}` must be a number, not {shown(value)}")


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result
