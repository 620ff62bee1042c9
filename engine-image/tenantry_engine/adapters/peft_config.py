"""What `adapter_config.json` of PEFT may say, and what it means for each module of the base model.

An allow-list: a field that this engine does not know must be empty, so that nothing that changes the answer is ignored.
Meanings follow PEFT's `LoraConfig`; patterns come from tenants, so they run under a time limit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex  # type: ignore[import-untyped]

from tenantry_engine.errors import AdapterError

_WITHOUT_MEANING = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout",
        "peft_version", "revision", "ensure_weight_tying", "megatron_core", "runtime_config", "qalora_group_size",
        "loftq_config", "lora_ga_config", "eva_config", "corda_config",
    }
)  # fmt: skip
"""Fields that do not change what a trained adapter computes on linear layers. The `*_config` ones are notes of an
initialisation; `init_lora_weights` decides whether that one altered the base model."""

_NEUTRAL_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal", "mica")
_READ = frozenset(
    {
        "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
        "exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
    }
)  # fmt: skip

_MAX_PATTERNS = 4096
_MAX_PATTERN = 1024
_PATTERN_SECONDS = 2.0


@dataclass(frozen=True)
class ModuleLora:
    """What the configuration says about one module."""

    rank: int
    scale: float


def parse(raw: bytes) -> dict[str, Any]:
    """The configuration as a mapping, every field checked. Raises AdapterError UnsupportedConfig naming the field."""
    try:
        config = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _unsupported("the file must be JSON without NaN or Infinity") from error
    if not isinstance(config, dict):
        raise _unsupported("the file must hold a JSON object")
    if config.get("peft_type") != "LORA":
        raise _unsupported(f"`peft_type` must be LORA, not {_show(config.get('peft_type'))}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _unsupported(f"`task_type` must be CAUSAL_LM, not {_show(config['task_type'])}")
    if config.get("bias", "none") != "none":
        raise _unsupported(f"`bias` must be none, not {_show(config['bias'])}: trained biases are not served")
    initial = config.get("init_lora_weights", True)
    if not any(
        initial is known or (initial == known and known not in (True, False))
        for known in _NEUTRAL_INITIALISATIONS
    ):
        raise _unsupported(
            f"`init_lora_weights` {_show(initial)} alters the base model: convert the adapter first "
            "(PEFT's save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for name, value in config.items():
        if name not in _READ and name not in _WITHOUT_MEANING and value not in (None, False, "", [], {}):
            raise _unsupported(
                f"`{str(name)[:80]}` must be left at its default: {_show(value)} is not served"
            )
    if not isinstance(config.get("use_rslora", False), bool):
        raise _unsupported("`use_rslora` must be true or false")
    _rank("r", config.get("r", 8))
    _alpha("lora_alpha", config.get("lora_alpha", 8))
    for name, check in (("rank_pattern", _rank), ("alpha_pattern", _alpha)):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            raise _unsupported(f"`{name}` must be an object")
        for key, value in pattern.items():
            check(f"{name}.{key[:80]}", value)
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(name)
        if value is not None and not isinstance(value, str) and not _strings(value):
            raise _unsupported(f"`{name}` must be a string or a list of strings")
    if not config.get("target_modules"):
        raise _unsupported("`target_modules` must name at least one module")
    layers = config.get("layers_to_transform")
    if (
        layers is not None
        and not _integer(layers)
        and not (isinstance(layers, list) and all(_integer(n) for n in layers))
    ):
        raise _unsupported("`layers_to_transform` must be an integer or a list of integers")
    return config


def resolve(config: Mapping[str, Any], modules: Sequence[str]) -> dict[str, ModuleLora]:
    """Which of the base model's `modules` (full paths) the configuration targets, each with its rank and scale.

    `config` comes from `parse`. Raises AdapterError UnsupportedConfig for patterns that are invalid or take too long.
    """
    patterns = _Patterns()
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


def _targets(config: Mapping[str, Any], patterns: _Patterns) -> Callable[[str], bool]:
    target, exclude = config["target_modules"], config.get("exclude_modules")
    layers, names = config.get("layers_to_transform"), config.get("layers_pattern")
    layers = [layers] if isinstance(layers, int) else layers
    names = [names] if isinstance(names, str) and names else names

    if isinstance(target, str) and target == "all-linear":
        hit: Callable[[str], bool] = lambda module: module.endswith("_proj")  # noqa: E731
        layers = None
    elif isinstance(target, str):
        hit = patterns.full("target_modules", target)
        layers = None
    else:
        hit = _suffix(target)
    if isinstance(exclude, str) and exclude:
        miss = patterns.full("exclude_modules", exclude)
    else:
        miss = _suffix(exclude or [])
    # the first number of a path is its layer, unless a pattern says which
    layer_patterns = [
        patterns.compile("layers_pattern", text)
        for text in (
            [rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\." for name in names]
            if names
            else [r".*?\.[^.]*\.(?P<idx>\d+)\."]
        )
    ]

    def in_layers(module: str) -> bool:
        if not layers:
            return True
        for pattern in layer_patterns:
            found = patterns.match(pattern, module)
            if found is not None:
                return int(found.group("idx")) in layers
        return False

    return lambda module: hit(module) and not miss(module) and in_layers(module)


def _suffix(names: Sequence[str]) -> Callable[[str], bool]:
    exact = set(names)
    endings = tuple(f".{name}" for name in names)
    return lambda module: module in exact or module.endswith(endings)


class _Patterns:
    """Regular expressions of one configuration under one time limit."""

    def __init__(self) -> None:
        self._until = time.monotonic() + _PATTERN_SECONDS
        self._count = 0

    def compile(self, field: str, text: str) -> Any:
        self._count += 1
        if len(text) > _MAX_PATTERN or self._count > _MAX_PATTERNS:
            raise _unsupported(
                f"`{field}` must have at most {_MAX_PATTERNS} patterns of at most {_MAX_PATTERN} characters"
            )
        try:
            return regex.compile(text)
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise _unsupported(f"`{field}` must be a valid regular expression: {_show(text)}") from error

    def match(self, pattern: Any, text: str, whole: bool = False) -> Any:
        left = self._until - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            return (pattern.fullmatch if whole else pattern.match)(text, timeout=left)
        except TimeoutError as error:
            raise _unsupported(
                f"its patterns must match within {_PATTERN_SECONDS:g} s: write simpler ones"
            ) from error

    def full(self, field: str, text: str) -> Callable[[str], bool]:
        pattern = self.compile(field, text)
        return lambda module: self.match(pattern, module, whole=True) is not None

    def lookup(self, field: str, keys: Sequence[str]) -> Callable[[str], str | None]:
        """The first key that matches the end of a module's path."""
        compiled = [(key, self.compile(field, rf"(.*\.)?({key})$")) for key in keys]

        def find(module: str) -> str | None:
            return next((key for key, pattern in compiled if self.match(pattern, module) is not None), None)

        return find


def _rank(field: str, value: object) -> None:
    if not _integer(value) or not 1 <= value < 1 << 16:  # type: ignore[operator]
        raise _unsupported(f"`{field}` must be an integer of at least 1, not {_show(value)}")


def _alpha(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e9:
        raise _unsupported(f"`{field}` must be a number, not {_show(value)}")


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _show(value: object) -> str:
    return repr(value)[:60]


def _unsupported(message: str) -> AdapterError:
    return AdapterError("UnsupportedConfig", f"`adapter_config.json`: {message}")
