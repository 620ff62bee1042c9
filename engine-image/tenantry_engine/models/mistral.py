"""Mistral: Llama's shape; releases before v0.2 let a token see only a window of the tokens before it."""

from __future__ import annotations

from tenantry_engine.models.config import Family

MISTRAL = Family("MistralForCausalLM", window_by_default=True)
