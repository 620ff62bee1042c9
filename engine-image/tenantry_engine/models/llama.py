"""Llama and what shares its shape: Llama 3, SmolLM2."""

from __future__ import annotations

from tenantry_engine.models.config import Family

LLAMA = Family("LlamaForCausalLM", fixed={"attention_bias": False, "mlp_bias": False})
"""Biases are refused: no released Llama has any."""
