"""Model families: one thin file each, all made of the same layers on the same kernels."""

from __future__ import annotations

from tenantry_engine.errors import EngineError
from tenantry_engine.loader import Weights, read_config
from tenantry_engine.models.config import ELSEWHERE
from tenantry_engine.models.decoder import Decoder
from tenantry_engine.models.llama import LLAMA
from tenantry_engine.models.mistral import MISTRAL
from tenantry_engine.models.qwen2 import QWEN2
from tenantry_engine.models.qwen3 import QWEN3
from tenantry_engine.parallel.group import SOLO, Group

FAMILIES = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}

Model = Decoder


def load_model(weights: Weights, group: Group = SOLO) -> Model:
    """The model of a folder, this rank's part of it. Raises EngineError for a family that is not served here."""
    raw = read_config(weights.folder)
    names = raw.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in FAMILIES:
        return Decoder(FAMILIES[names[0]], raw, weights, group)
    raise EngineError(
        f"`architectures` in config.json must be one of {', '.join(FAMILIES)}, not {repr(names)[:80]}: {ELSEWHERE}"
    )
