"""What the agent asks of vLLM, over the pod's loopback. Decides by status and structure, never by vLLM's prose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from tenantry_engine.errors import RequestError

ASK_SECONDS = 10.0
LOAD_SECONDS = 120.0
_MAX_ERROR_BYTES = 1 << 16


class VllmError(Exception):
    """vLLM did not do it. `status` is its HTTP status, None when no answer came."""

    def __init__(self, status: int | None, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}" if status is not None else message)
        self.status = status
        self.message = message


class Vllm:
    """A client of one vLLM server. To be closed."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # no limit: how many run at once is decided where tenants' caps are known
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), trust_env=False, auto_decompress=False
        )

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self) -> bool:
        try:
            await self._ask("GET", "/health", seconds=ASK_SECONDS)
        except VllmError:
            return False
        return True

    async def models(self) -> list[dict[str, Any]]:
        """What it serves: the base model with `max_model_len`, adapters with `root`, their folder. Raises VllmError."""
        listed = _json(await self._ask("GET", "/v1/models", seconds=ASK_SECONDS))
        models = listed.get("data")
        if not isinstance(models, list) or not all(
            isinstance(model, dict) and "id" in model for model in models
        ):
            raise VllmError(200, "`/v1/models` must list objects with `id`")
        return models

    async def special_tokens(self) -> frozenset[str]:
        """The texts that its tokenizer takes for special tokens wherever they stand. Raises VllmError."""
        info = _json(await self._ask("GET", "/tokenizer_info", seconds=ASK_SECONDS))
        added = info.get("added_tokens_decoder") or {}
        found = [token if isinstance(token, str) else token.get("content", "") for token in added.values()]
        found += [value for name, value in info.items() if name.endswith("_token") and isinstance(value, str)]
        for more in (info.get("additional_special_tokens"), info.get("extra_special_tokens")):
            found += [token for token in more or [] if isinstance(token, str)]
        return frozenset(token for token in found if token.strip())

    async def load(self, name: str, folder: str) -> None:
        """Raises VllmError: below 500 the adapter is at fault, else vLLM."""
        body = orjson.dumps({"lora_name": name, "lora_path": folder})
        await self._ask("POST", "/v1/load_lora_adapter", body, seconds=LOAD_SECONDS)

    async def unload(self, name: str) -> None:
        """Fine when it is not there. Raises VllmError."""
        try:
            body = orjson.dumps({"lora_name": name})
            await self._ask("POST", "/v1/unload_lora_adapter", body, seconds=ASK_SECONDS)
        except VllmError as error:
            if error.status not in (400, 404):
                raise

    async def metrics(self) -> str:
        """Its own series, without those that name adapters. Raises VllmError."""
        text = (await self._ask("GET", "/metrics", seconds=ASK_SECONDS)).decode(errors="replace")
        return "\n".join(line for line in text.splitlines() if "lora_requests_info" not in line) + "\n"

    @asynccontextmanager
    async def answer(self, path: str, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a tenant's request, its head read. Leaving the block ends the request in vLLM too.

        Raises RequestError for an error that vLLM answers with, and when it does not answer.
        """
        try:
            response = await self._session.post(
                self._url + path,
                data=body,
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None),
            )
        except (aiohttp.ClientError, OSError) as error:
            raise gone() from error
        try:
            if response.status != 200:
                raise _refusal(response.status, await response.content.read(_MAX_ERROR_BYTES))
            yield response
        finally:
            response.close()  # not `release`: an answer that nobody reads to its end must not be computed on

    async def _ask(self, method: str, path: str, body: bytes | None = None, *, seconds: float) -> bytes:
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            async with asyncio.timeout(seconds):
                async with self._session.request(
                    method, self._url + path, data=body, headers=headers
                ) as response:
                    content = await response.read()
        except TimeoutError as error:
            raise VllmError(None, f"{path}: no answer within {seconds:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise VllmError(None, f"{path}: {type(error).__name__}") from error
        if response.status != 200:
            raise VllmError(response.status, _said(content))
        return content


def gone() -> RequestError:
    """What a client hears when vLLM cannot be reached."""
    return RequestError("vLLM does not answer; it restarts", status=503, code="engine_gone", retry_after=1)


def _json(content: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise VllmError(200, "the answer must be JSON") from error
    if not isinstance(value, dict):
        raise VllmError(200, "the answer must be a JSON object")
    return value


def _said(content: bytes) -> str:
    """vLLM's own words, for a person."""
    try:
        value = orjson.loads(content)
        message = value["error"]["message"] if "error" in value else value["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = content[:512].decode(errors="replace")
    return str(message)[:512]


def _refusal(status: int, content: bytes) -> RequestError:
    """In the form of every interface of ours. Faults of vLLM say no detail."""
    if status >= 500:
        return RequestError("vLLM failed", status=500, code="internal_error")
    code = "model_not_found" if status == 404 else "invalid_value"
    return RequestError(_said(content), status=status, code=code)
