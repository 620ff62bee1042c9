"""vLLM's endpoints that load and unload an adapter, for clients that know those.

They serve on a developer's machine alone: where tenants have identities, the operator declares adapters, by digest. A
path must lie in the folder of `--adapters`, whatever it says of links and `..`; anything else is not found, so that
nobody learns what else the disk holds.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tenantry_engine.adapters.store import BlobStore, TooLargeError
from tenantry_engine.digest import CONFIG_FILE, WEIGHTS_FILE, folder_blob, folder_digest, most_blob_bytes
from tenantry_engine.errors import RequestError
from tenantry_engine.ipc.link import EngineLink
from tenantry_engine.server.http import read_body
from tenantry_engine.server.schemas import LoadBody, UnloadBody, parse

_DRAIN_SECONDS = 60.0


class LoraEndpoints:
    """`root` is the folder of `--adapters`; `open_to_all` whether the replica serves without identities."""

    def __init__(self, engine: EngineLink, root: Path | None, *, open_to_all: bool) -> None:
        self._engine = engine
        self._root = root.resolve() if root is not None else None
        self._open = open_to_all
        self._one_at_a_time = asyncio.Lock()

    async def load(self, request: Request) -> Response:
        """Declares one adapter more, and answers when it is checked against the base model."""
        self._refuse_unless_open()
        body = parse(LoadBody, await read_body(request))
        async with self._one_at_a_time:
            folder = await asyncio.to_thread(self._find, body.lora_path)
            digest = await asyncio.to_thread(folder_digest, folder)
            before = await self._declared()
            taken = next((item for item in before if item["name"] == body.lora_name), None)
            if taken is not None and taken["digest"] == digest:
                return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' is loaded already.")
            new = {"name": body.lora_name, "digest": digest, "tenant": "", "pinned": False}
            await self._declare([*(item for item in before if item is not taken), new])
            try:
                await asyncio.to_thread(self._store, folder, digest)
                await self._engine.ask("stored", digest=digest)
                await self._check(body.lora_name)
            except BaseException:
                await asyncio.shield(self._declare(before))
                raise
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Withdraws one adapter; its running requests may end."""
        self._refuse_unless_open()
        body = parse(UnloadBody, await read_body(request))
        async with self._one_at_a_time:
            before = await self._declared()
            after = [item for item in before if item["name"] != body.lora_name]
            if len(after) == len(before):
                raise RequestError(
                    "`lora_name` must be an adapter that is loaded",
                    status=404, code="adapter_not_found", param="lora_name",
                )  # fmt: skip
            await self._declare(after)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _refuse_unless_open(self) -> None:
        if not self._open:
            raise RequestError(
                "adapters are declared by the operator here: create an Adapter object (this endpoint serves with"
                " `--dev-open` alone)",
                status=403, code="not_served_here",
            )  # fmt: skip
        if self._root is None or not self._engine.facts.max_rank:
            raise RequestError(
                "the engine must be started with `--adapters` (and without `--no-lora`): paths must lie in that folder",
                status=403,
                code="not_served_here",
            )

    def _find(self, path: str) -> Path:
        assert self._root is not None
        found = False
        folder = self._root
        if "\0" not in path:
            folder = (self._root / path).resolve()
            files = [(folder / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE)]
            found = all(file.is_relative_to(self._root) and file.is_file() for file in files)
        if not found:
            raise RequestError(
                "`lora_path` must be a PEFT folder below the folder of `--adapters`",
                status=404, code="adapter_not_found", param="lora_path",
            )  # fmt: skip
        return folder

    async def _declared(self) -> list[dict[str, Any]]:
        report = await self._engine.ask("report")
        keys = ("name", "digest", "tenant", "pinned")
        return [
            {key: item[key] for key in keys} for item in report["adapters"] if item["state"] != "Draining"
        ]

    async def _declare(self, wanted: list[dict[str, Any]]) -> None:
        fence = (await self._engine.ask("report"))["fence"]
        await self._engine.ask("declare", fence=fence, wanted=wanted, drain_seconds=_DRAIN_SECONDS)

    def _store(self, folder: Path, digest: str) -> None:
        facts = self._engine.facts
        store = BlobStore(Path(facts.data_dir))
        limit = most_blob_bytes(facts.max_adapter_bytes)
        if store.has(digest):
            return
        with store.receive(digest, limit) as incoming:
            try:
                for piece in folder_blob(folder):
                    incoming.write(piece)
                incoming.commit()
            except TooLargeError as error:
                raise RequestError(
                    f"an adapter must be at most {limit} bytes",
                    status=413,
                    code="too_large",
                    param="lora_path",
                ) from error

    async def _check(self, name: str) -> None:
        report = await self._engine.ask("report")
        state = next((item for item in report["adapters"] if item["name"] == name), None)
        if state is not None and state["state"] == "Failed":
            raise RequestError(
                f"`lora_path` must hold an adapter of this base model: {state['reason']}: {state['message']}",
                code="invalid_adapter",
                param="lora_path",
            )
