"""A short prompt through an adapter in vLLM, before a client's request meets it."""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import Any

import aiohttp
import orjson

from tenantry_engine.agent.backend import Backend
from tenantry_engine.agent.vllm import Vllm, gone
from tenantry_engine.errors import RequestError
from tenantry_engine.server.serving import SMOKE_PROMPT, SMOKE_SECONDS


async def smoke(backend: Backend, vllm: Vllm, served: str, digest: str, uid: str) -> int:
    """Run the adapter on a short prompt, past no limit of its tenant; how many tokens came.

    Raises RequestError: it is not served here, nothing came in time, or what came is no number.
    """
    if not backend.holds(served, digest, uid):
        raise RequestError(
            f"the model `{served}` is not served here", status=404, code="model_not_found", param="model"
        )
    body = {
        "model": served,
        "prompt": SMOKE_PROMPT,
        "max_tokens": 2,
        "temperature": 0.0,
        "logprobs": 0,
        "cache_salt": uuid.uuid4().hex,  # nobody finds its blocks, and it finds nobody's
    }
    try:
        async with (
            asyncio.timeout(SMOKE_SECONDS),
            vllm.answer("/v1/completions", orjson.dumps(body)) as answer,
        ):
            content = await answer.read()
    except TimeoutError as error:
        raise RequestError(
            f"the adapter gave no answer within {SMOKE_SECONDS:.0f} s", status=503, code="smoke_late"
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        raise gone() from error
    logprobs = _logprobs(content)
    if not logprobs or not all(isinstance(value, float | int) and math.isfinite(value) for value in logprobs):
        raise RequestError(
            "the adapter's answer has no probabilities: its weights must be finite",
            status=422,
            code="smoke_failed",
        )
    return len(logprobs)


def _logprobs(content: bytes) -> list[Any]:
    """One per token of the answer; empty where the answer has another form (NaN is not JSON)."""
    try:
        values = orjson.loads(content)["choices"][0]["logprobs"]["token_logprobs"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return []
    return values if isinstance(values, list) else []
