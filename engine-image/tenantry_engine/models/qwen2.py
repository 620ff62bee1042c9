"""Qwen2 and Qwen2.5: Llama's shape with biases on q, k and v."""

from __future__ import annotations

from tenantry_engine.models.config import Family

QWEN2 = Family("Qwen2ForCausalLM", qkv_bias=True)
