"""Which module each tensor of an adapter's file belongs to, by the names that PEFT writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tenantry_engine.adapters.hostile import invalid, shown
from tenantry_engine.adapters.safetensors_file import Entry
from tenantry_engine.errors import AdapterError

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

_HALF = re.compile(r"base_model\.model\.(?P<module>.+)\.(?P<half>lora_[AB])\.weight", re.ASCII)
_EMBEDDING_HALF = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_embedding_(?P<half>[AB])", re.ASCII)
_BASE = re.compile(r"base_model\.model\.(?P<module>.+)\.base_layer\.weight", re.ASCII)
_WHOLE = re.compile(r"base_model\.model\.(?P<module>model\.embed_tokens|lm_head)\.weight", re.ASCII)


@dataclass
class Tensors:
    """The tensors of one file by module: both halves of its LoRA, and copies of base weights that came along."""

    pairs: dict[str, tuple[Entry, Entry]] = field(default_factory=dict)  # A, B
    base: dict[str, Entry] = field(default_factory=dict)


def sort(entries: Mapping[str, Entry], targets: Iterable[str], modules: Iterable[str]) -> Tensors:
    """Every tensor belongs to a targeted module of the base, and every targeted module has both of its tensors.

    Raises AdapterError: nothing is left over, so nothing falls back to the base in silence.
    """
    wanted, known = set(targets), set(modules)
    halves: dict[str, dict[str, Entry]] = {}
    found = Tensors()
    for name, entry in entries.items():
        if _WHOLE.fullmatch(name):
            raise invalid(
                f"`{name}` must not be there: an added or whole vocabulary is not served, "
                "only LoRA of the base's own"
            )
        match = _EMBEDDING_HALF.fullmatch(name) or _HALF.fullmatch(name) or _BASE.fullmatch(name)
        if match is None:
            raise invalid(f"`{shown(name)}` must be a lora_A or lora_B weight; it would be ignored")
        module = match["module"]
        if module not in known:
            raise AdapterError(
                "BaseModelMismatch",
                f"`{shown(name)}` must match a module of the base model; none has this name",
            )
        if match.re is _BASE:
            found.base[module] = entry
            continue
        if (match.re is _EMBEDDING_HALF) != (module == EMBEDDING):
            raise invalid(
                f"`{name}` must be named as PEFT does: lora_embedding_A and _B for {EMBEDDING}, "
                "lora_A.weight and lora_B.weight for others"
            )
        if module not in wanted:
            raise invalid(f"`{name}` must be reached by `target_modules` of the configuration; it is not")
        halves.setdefault(module, {})[match["half"][-1]] = entry
    for module in wanted:
        pair = halves.get(module, {})
        if set(pair) != {"A", "B"}:
            raise invalid(f"`{module}` is targeted, so it must have lora_A and lora_B weights")
        found.pairs[module] = (pair["A"], pair["B"])
    return found


def check_shape(module: str, pair: tuple[Entry, Entry], rank: int, width_in: int, width_out: int) -> None:
    """A is `[rank, in]` and B `[out, rank]`. Raises AdapterError."""
    for half, entry, want in (("lora_A", pair[0], (rank, width_in)), ("lora_B", pair[1], (width_out, rank))):
        if entry.shape == want:
            continue
        rank_axis = 0 if half == "lora_A" else 1
        if len(entry.shape) == 2 and entry.shape[rank_axis] == rank:
            raise AdapterError(
                "BaseModelMismatch",
                f"`{module}.{half}` must have shape {list(want)} for this base, not {list(entry.shape)}"
                + (": an added vocabulary is not served" if module in (EMBEDDING, HEAD) else ""),
            )
        raise invalid(
            f"`{module}.{half}` must have shape {list(want)} by the configuration's rank, not {list(entry.shape)}"
        )
