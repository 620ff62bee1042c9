"""vLLM as a replica of ours: the declared set, what of it vLLM lists, and what the admin port asks.

Nothing is taken for loaded but what vLLM itself lists under the folder of its digest. When vLLM restarts, the list is
empty and everything is loaded again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tenantry_engine.adapters.declared import Declaration, DeclaredSet
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.agent.caps import Caps
from tenantry_engine.agent.flights import Flights
from tenantry_engine.agent.folders import Folders
from tenantry_engine.agent.vllm import Vllm, VllmError
from tenantry_engine.errors import AdapterError, RequestError
from tenantry_engine.identity import Identity
from tenantry_engine.ipc.messages import Facts

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
STUCK_SECONDS = 300.0
"""Longer than any one look, a load of an adapter included: beyond it the agent itself is at fault."""


class Backend:
    """One replica. `run` keeps vLLM at what is declared; everything else answers from what it saw last."""

    def __init__(self, vllm: Vllm, facts: Facts, modules: frozenset[str]) -> None:
        self.facts = facts
        self.draining = False
        self.lost = asyncio.Event()  # vLLM's end is not ours: it is started again beside us
        self.caps = Caps(facts.max_waiting)
        self.flights = Flights()
        self.max_model_len = 0
        self.special_tokens: frozenset[str] = frozenset()
        self._vllm = vllm
        self._declared = DeclaredSet(facts.model_name, facts.max_registered)
        self._store = BlobStore(Path(facts.data_dir))
        self._folders = Folders(Path(facts.data_dir), self._store, facts.max_rank, modules)
        self._problems: dict[str, AdapterError] = {}
        self._ranks: dict[str, int] = {}
        self._listed: dict[str, str] = {}  # what vLLM lists: name -> folder
        self._up = False
        self._dirty = asyncio.Event()
        self._looked = time.monotonic()
        self._questions: dict[str, Callable[..., Awaitable[Any]]] = {
            "declare": self._declare,
            "report": self._report,
            "wants": self._wants,
            "stored": self._stored,
            "load": self._load,
            "drain": self._drain,
            "numbers": self._numbers,
        }

    @property
    def serves(self) -> bool:
        """Whether vLLM answers and serves the base model."""
        return self._up

    @property
    def healthy(self) -> bool:
        """Whether this process does its work. vLLM has a probe of its own."""
        return time.monotonic() - self._looked < STUCK_SECONDS

    async def ask(self, what: str, **arguments: Any) -> Any:
        """What the admin port asks. Raises RequestError."""
        return await self._questions[what](**arguments)

    def check(self, identity: Identity) -> None:
        """That this very name, with this very digest, is served to this tenant. Raises RequestError 404, 503."""
        if not self._up:
            raise RequestError(
                "vLLM is not ready; it starts or restarts", status=503, code="engine_gone", retry_after=1
            )
        if self.draining:
            raise RequestError("this replica is draining", status=503, code="draining", retry_after=1)
        if identity.model == self.facts.model_name and not identity.digest:
            return
        if not self.holds(identity.model, identity.digest, identity.uid):
            raise RequestError(
                f"the model `{identity.model}` is not served here",
                status=404,
                code="model_not_found",
                param="model",
            )

    def holds(self, name: str, digest: str, uid: str) -> bool:
        """Whether vLLM lists these very bytes under this very name, and they are this tenant's."""
        declared = self._declared.live(name)
        return (
            declared is not None
            and declared.digest == digest
            and declared.tenant == uid
            and self._loaded(declared)
        )

    # the work

    async def run(self) -> None:
        """Until it is cancelled. No fault of vLLM or of an adapter ends it."""
        while True:
            try:
                await self._look()
            except VllmError as error:
                if self._up:
                    log.warning("vLLM: %s", error)
                self._up, self._listed = False, {}
            except Exception:
                log.exception("the agent failed; it goes on")
            self._looked = time.monotonic()
            self._dirty.clear()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._dirty.wait()
            except TimeoutError:
                continue

    async def _look(self) -> None:
        await self._see()
        for declaration in list(self._declared):
            if self._declared.live(declaration.name) is not None:
                await self._bring(declaration)
        for declaration, until in self._declared.leaving():
            await self._take_away(declaration, until)
        if self._declared.fence > (0, 0):  # before the first declaration nobody knows what is to stay
            for name in set(self._listed) - {declaration.name for declaration in self._declared}:
                await self._unload(name)
            kept = {declaration.digest for declaration in self._declared}
            self._problems = {digest: p for digest, p in self._problems.items() if digest in kept}
            self._ranks = {digest: rank for digest, rank in self._ranks.items() if digest in kept}
            self._store.prune(kept)
            self._folders.prune(kept)

    async def _see(self) -> None:
        """What vLLM says of itself. Raises VllmError."""
        models = await self._vllm.models()
        base = next((model for model in models if model["id"] == self.facts.model_name), None)
        if base is None or not isinstance(base.get("max_model_len"), int):
            raise VllmError(200, f"it must serve `{self.facts.model_name}` and tell its `max_model_len`")
        if not self._up:
            self.special_tokens = await self._vllm.special_tokens()
            if not self.special_tokens:
                raise VllmError(
                    200, "`/tokenizer_info` must name the special tokens: nothing is served without them"
                )
            log.info("vLLM serves `%s`, %d tokens at most", self.facts.model_name, base["max_model_len"])
        self.max_model_len = base["max_model_len"]
        self._listed = {
            str(model["id"]): str(model.get("root", "")) for model in models if model["id"] != base["id"]
        }
        self._up = True

    async def _bring(self, declaration: Declaration) -> None:
        digest = declaration.digest
        if digest in self._problems or self._loaded(declaration) or not self._store.has(digest):
            return
        if declaration.name in self._listed:
            await self._unload(declaration.name)  # of another folder: bytes that were there before us
        try:
            if digest not in self._ranks:
                self._ranks[digest] = await asyncio.to_thread(self._folders.make, digest)
            await self._vllm.load(declaration.name, str(self._folders.path(digest)))
        except AdapterError as error:
            if error.reason != "Corrupt" or self._store.has(digest):  # else the bytes are wanted anew
                self._problems[digest] = error
        except VllmError as error:
            if error.status is None or error.status >= 500:
                raise
            self._problems[digest] = AdapterError(
                "InvalidTensors", f"vLLM refuses it: HTTP {error.status}: {error.message}"
            )
        else:
            self._listed[declaration.name] = str(self._folders.path(digest))
            log.info("adapter: %s %s", declaration.name, digest)

    async def _take_away(self, declaration: Declaration, until: float) -> None:
        name = declaration.name
        if self.flights.of(name):
            if time.monotonic() < until:
                return
            self.flights.abort(name)
        await self._unload(name)
        self._declared.remove(name)

    async def _unload(self, name: str) -> None:
        if name in self._listed:
            await self._vllm.unload(name)
            del self._listed[name]

    def _loaded(self, declaration: Declaration) -> bool:
        """Whether vLLM lists exactly these bytes under exactly this name."""
        return self._listed.get(declaration.name) == str(self._folders.path(declaration.digest))

    # what the admin port asks

    async def _declare(
        self, fence: tuple[int, int], wanted: list[dict[str, Any]], drain_seconds: float
    ) -> dict[str, Any]:
        declarations = [Declaration(**item) for item in wanted]
        self._declared.replace((fence[0], fence[1]), declarations, time.monotonic() + drain_seconds)
        self._dirty.set()
        return await self._report()

    async def _report(self) -> dict[str, Any]:
        return {
            "fence": self._declared.fence,
            "pages": {"total": 0, "free": 0, "kv": 0, "adapter": 0, "cached": 0},  # vLLM tells no pages
            "adapters": [self._state(declaration) for declaration in self._declared],
            "requests": self.caps.running + self.caps.waiting,
            "separation": None,  # vLLM does not tell whose blocks it reused
        }

    def _state(self, declaration: Declaration) -> dict[str, Any]:
        problem = self._problems.get(declaration.digest)
        if problem is not None:
            state = "Failed"
        elif self._declared.is_leaving(declaration.name):
            state = "Draining"
        else:
            state = "Registered" if self._loaded(declaration) else "Missing"
        return {
            "name": declaration.name,
            "digest": declaration.digest,
            "tenant": declaration.tenant,
            "pinned": False,  # vLLM decides
            "state": state,
            "reason": problem.reason if problem is not None else "",
            "message": problem.message if problem is not None else "",
            "rank": self._ranks.get(declaration.digest, 0),
            "pages": 0,
            "requests": len(self.flights.of(declaration.name)),
        }

    async def _wants(self, digest: str) -> bool:
        return any(declaration.digest == digest for declaration in self._declared)

    async def _stored(self, digest: str) -> None:
        self._problems.pop(digest, None)
        self._dirty.set()

    async def _load(self) -> dict[str, Any]:
        registered = [d.name for d in self._declared if self._declared.live(d.name) and self._loaded(d)]
        return {
            "running": self.caps.running,
            "waiting": self.caps.waiting,
            "outstandingTokens": self.flights.outstanding,
            "registered": registered,
            "resident": [],  # vLLM does not tell
        }

    async def _drain(self) -> dict[str, Any]:
        self.draining = True
        return await self._report()

    async def _numbers(self) -> dict[str, Any]:
        try:
            return {"text": await self._vllm.metrics()}
        except VllmError as error:
            raise RequestError(str(error), status=503, code="engine_gone", retry_after=1) from error
