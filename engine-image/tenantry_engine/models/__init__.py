"""One thin file per model family, all on the same kernels."""

from __future__ import annotations

from tenantry_engine.errors import EngineError
from tenantry_engine.loader import Weights, read_config
from tenantry_engine.models.llama import Llama

_FAMILIES = {"LlamaForCausalLM": Llama}

Model = Llama
"""Every family has the constructor, the properties and the two methods of this one."""


def load_model(weights: Weights) -> Model:
    """The model of a folder. Raises EngineError for a family that this engine does not serve."""
    raw = read_config(weights.folder)
    names = raw.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return _FAMILIES[name](raw, weights)
    raise EngineError(
        f"`architectures` in config.json must name one of {', '.join(_FAMILIES)}, not {names}; "
        "serve this model from an AdapterPool with `spec.engine.type: VLLM`"
    )
