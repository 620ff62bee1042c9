"""What config.json says of a decoder, by allow-list: what could change the answer is served, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tenantry_kernels import rope_table

from tenantry_engine.errors import EngineError

log = logging.getLogger(__name__)

ELSEWHERE = "serve this model from an AdapterPool with `spec.engine.type: VLLM`"

_WITHOUT_MEANING = frozenset(
    {
        "_attn_implementation_autoset", "_model_name_or_path", "_name_or_path", "architectures", "attention_dropout",
        "bos_token_id", "do_sample", "dtype", "eos_token_id", "id2label", "initializer_range", "is_llama_config",
        "label2id", "max_length", "max_window_layers", "min_length", "model_type", "pad_token_id", "pretraining_tp",
        "repetition_penalty", "return_dict", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype",
        "transformers.js_config", "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version",
        "use_cache",
    }
)  # fmt: skip
"""Fields that say nothing about what the network computes (`max_window_layers` speaks of windows, see `window`)."""

_READ = frozenset(
    {
        "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters",
        "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What sets one family apart from the others. `fixed`: fields that must have this value where they stand."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    window_by_default: bool = False  # `sliding_window` counts without `use_sliding_window`
    fixed: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and rules of one decoder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int  # longest sequence that is served
    eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool


def read_decoder(raw: Mapping[str, Any], family: Family) -> DecoderConfig:
    """From config.json, old and new spelling of the rotary fields. Raises EngineError naming the field at fault."""
    _refuse_unknown(raw, family)
    heads = _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads", heads)
    hidden = _size(raw, "hidden_size")
    head_dim = _size(raw, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise EngineError(
            f"`num_attention_heads` in config.json must be a multiple of `num_key_value_heads` {kv_heads}, not {heads}"
        )
    if head_dim % 2:
        raise EngineError(f"`head_dim` in config.json must be even for rotary positions, not {head_dim}")
    positions = _size(raw, "max_position_embeddings")
    span = window(raw, family)
    if span is not None and span < positions:
        log.warning(
            "`sliding_window` in config.json is %d: sequences of at most so many tokens are served, which see all of "
            "their tokens; for longer ones %s", span, ELSEWHERE,
        )  # fmt: skip
        positions = span
    theta, scaling = _rope(raw, head_dim)
    return DecoderConfig(
        hidden=hidden,
        intermediate=_size(raw, "intermediate_size"),
        layers=_size(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=_size(raw, "vocab_size"),
        positions=positions,
        eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def window(raw: Mapping[str, Any], family: Family) -> int | None:
    """Tokens that a row of some layer sees at most, where the model has sliding windows."""
    kinds = raw.get("layer_types") or []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise EngineError(f"`layer_types` in config.json must not hold {kind!r}: {ELSEWHERE}")
    if kinds:
        slides = "sliding_attention" in kinds
    else:
        slides = bool(raw.get("use_sliding_window", family.window_by_default))
    if not slides or raw.get("sliding_window") is None:
        return None
    return _size(raw, "sliding_window")


def _refuse_unknown(raw: Mapping[str, Any], family: Family) -> None:
    if raw.get("quantization_config"):
        raise EngineError(f"`quantization_config` in config.json must be absent: {ELSEWHERE}")
    for name, want in (("hidden_act", "silu"), *family.fixed.items()):
        if raw.get(name, want) != want:
            raise EngineError(
                f"`{name}` in config.json must be {want!r}, not {_show(raw[name])}: {ELSEWHERE}"
            )
    for name, value in raw.items():
        known = name in _READ or name in _WITHOUT_MEANING or name in family.fixed
        if not known and value not in (None, False, "", [], {}):
            raise EngineError(
                f"`{str(name)[:80]}` in config.json must be absent: {_show(value)} is not known to this engine and "
                f"could change the answer; {ELSEWHERE}, or remove the field if it has no meaning"
            )


def _rope(raw: Mapping[str, Any], head_dim: int) -> tuple[float, Mapping[str, Any] | None]:
    """theta and the scaling rule, tried once so that a rule that is not served is refused here."""
    parameters, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    scaling = parameters or old
    if scaling is not None and not isinstance(scaling, dict):
        name = "rope_parameters" if parameters else "rope_scaling"
        raise EngineError(f"`{name}` in config.json must be an object, not {_show(scaling)}")
    rule: Mapping[str, Any] = scaling or {}
    if rule.get("partial_rotary_factor", 1.0) != 1.0:
        raise EngineError(f"`partial_rotary_factor` in config.json must be 1.0: {ELSEWHERE}")
    theta = _number(rule if "rope_theta" in rule else raw, "rope_theta", 10000.0)
    if theta <= 0:
        raise EngineError(f"`rope_theta` in config.json must be more than 0, not {theta}")
    try:
        rope_table(head_dim, 1, theta, rule)
    except ValueError as error:
        raise EngineError(f"config.json: {error}; {ELSEWHERE}") from error
    return theta, scaling


def _size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EngineError(f"`{name}` in config.json must be a whole number of at least 1, not {_show(value)}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise EngineError(f"`{name}` in config.json must be a number, not {_show(value)}")
    return float(value)


def _show(value: object) -> str:
    return repr(value)[:60]
