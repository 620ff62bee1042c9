"""Qwen3: Llama's shape with an RMSNorm on every head of q and k, before the rotation."""

from __future__ import annotations

from tenantry_engine.models.config import Family

QWEN3 = Family("Qwen3ForCausalLM", qk_norm=True, fixed={"attention_bias": False})
