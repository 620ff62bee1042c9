"""Engine replicas as the gateway knows them: address from Kubernetes, load and residency from each replica itself.

Every replica is asked every 250 ms. A replica that does not answer is passed over as soon as a request or two polls
failed there, long before Kubernetes notices, and comes back with its first good answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

import orjson
from tenantry.api import names
from tenantry.api.identity import Signer

from .state import Lane, Pool, State, Target
from .upstream import Upstream, UpstreamError

T = TypeVar("T")
log = logging.getLogger(__name__)
LOAD_PATH = "/admin/v1/load"
MODELS_PATH = "/v1/models"
POLL_SECONDS = 0.25
POLL_TIMEOUT = 1.0
FAILED_POLLS = 2
HEAR_SECONDS = 2.0
MAX_LOAD_BYTES = 4 << 20


@dataclass(frozen=True)
class Load:
    """What a replica says of itself; see docs/reference/wire.md."""

    ready: bool
    draining: bool
    slots: int
    outstanding: int
    registered: frozenset[str]
    in_memory: frozenset[str]

    @classmethod
    def parse(cls, raw: bytes) -> Load:
        """Raises ValueError, KeyError, TypeError."""
        data = orjson.loads(raw)
        resident = frozenset(data["resident"])
        return cls(
            bool(data["ready"]),
            bool(data["draining"]),
            int(data["slots"]),
            int(data["outstandingTokens"]),
            frozenset(data["registered"]) | resident,
            resident,
        )


@dataclass(eq=False)
class Replica:
    """One engine pod. `in_flight` counts sequences that this gateway has there, also by tenant (uid).

    `context` is the model's longest input and output together in tokens, None until the replica told it.
    """

    namespace: str
    pod: str
    audience: str
    host: str = ""
    server: str | None = None
    """Whom its certificate must be for; None: no TLS."""
    ready: bool = False
    load: Load | None = None
    context: int | None = None
    failures: int = 0
    asked: float = -math.inf
    """When the last poll that is over began, whatever came of it, on the monotonic clock."""
    in_flight: int = 0
    by_tenant: dict[str, int] = field(default_factory=dict)
    own_tokens: int = 0

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.pod}"

    @property
    def answers(self) -> bool:
        """Whether its load is known and fresh."""
        return self.load is not None and self.failures < FAILED_POLLS

    @property
    def outstanding(self) -> int:
        """Tokens still to be computed there: by our own count, or by the replica's where that is more."""
        return max(self.own_tokens, self.load.outstanding if self.load else 0)

    def resident(self, served_name: str) -> bool:
        return self.load is not None and served_name in self.load.in_memory

    @property
    def serves_any(self) -> bool:
        """Whether it takes requests at all, by Kubernetes' word and its own."""
        if not self.ready or not self.host or self.failures >= FAILED_POLLS:
            return False
        return self.load is None or (self.load.ready and not self.load.draining)

    def serves(self, target: Target) -> bool:
        """Whether a request for the target may go there. An adapter only where the replica itself lists it."""
        if not self.serves_any:
            return False
        if self.load is None:
            return not target.digest
        return not target.digest or target.served_name in self.load.registered

    def slots(self, lane: Lane) -> int:
        return min(lane.slots, self.load.slots) if self.load else lane.slots

    def fits(self, sequences: int, lane: Lane) -> bool:
        """Whether it runs them at once. What is larger than a whole replica runs alone."""
        return self.in_flight == 0 or self.in_flight + sequences <= self.slots(lane)

    def take(self, uid: str, sequences: int, tokens: int) -> None:
        self.in_flight += sequences
        self.by_tenant[uid] = self.by_tenant.get(uid, 0) + sequences
        self.own_tokens += tokens

    def give(self, uid: str, sequences: int, tokens: int) -> None:
        self.in_flight -= sequences
        self.own_tokens -= tokens
        left = self.by_tenant[uid] - sequences
        if left:
            self.by_tenant[uid] = left
        else:
            del self.by_tenant[uid]


class Replicas:
    """All replicas of all lanes, kept up to date from the state; polls those that routes name."""

    def __init__(
        self,
        state: State,
        signer: Signer,
        upstream: Upstream,
        *,
        port: int,
        admin_port: int,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._state = state
        self._signer = signer
        self._upstream = upstream
        self._port = port
        self._admin_port = admin_port
        self.on_change: Callable[[], None] = lambda: None
        self._poll_seconds = poll_seconds
        self._replicas: dict[tuple[str, str], Replica] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._polling = False
        self._changed = asyncio.Event()
        state.listeners.append(self.sync)

    def of(self, pool: Pool, lane: Lane) -> list[Replica]:
        """The replicas of the lane that serve the tenant, known ones only."""
        found = (self._replicas.get((pool.namespace, pod)) for pod in lane.replicas)
        return [replica for replica in found if replica is not None]

    def context(self, pool: Pool) -> int | None:
        """The model's longest input and output together, as far as any replica of the pool told it."""
        lengths = [
            r.context for lane in pool.lanes.values() for r in self.of(pool, lane) if r.context is not None
        ]
        return min(lengths, default=None)

    async def hear(self, pool: Pool, lanes: Collection[Lane], look: Callable[[], T | None]) -> T | None:
        """What `look` finds, now or once every replica of the lanes was asked after this call; 2 s at most.

        A route may name what a replica has had for less time than a poll takes, or a replica of which Kubernetes has
        not told yet: what the next word may allow is not refused by the last one.
        """
        found = look()
        if found is not None:
            return found
        named = sum(len(lane.replicas) for lane in lanes)
        began = time.monotonic()

        def all_asked() -> bool:
            known = [replica for lane in lanes for replica in self.of(pool, lane)]
            return len(known) == named and all(replica.asked >= began for replica in known)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAR_SECONDS):
                while found is None and not all_asked():
                    await self._changed.wait()
                    found = look()
        return found

    def all(self) -> list[Replica]:
        return list(self._replicas.values())

    def sync(self) -> None:
        """Take addresses and readiness from the state."""
        seen: dict[tuple[str, str], tuple[str, str, bool]] = {}
        for part in self._state.slices.values():
            audience = self._state.audiences.get((part.namespace, part.service))
            if audience is None:
                continue
            for endpoint in part.endpoints:
                seen[(part.namespace, endpoint.pod)] = (audience, endpoint.address, endpoint.ready)
        for key, (audience, address, ready) in seen.items():
            replica = self._replicas.get(key)
            if replica is None:
                replica = self._replicas[key] = Replica(*key, audience)
            if (replica.host, replica.audience) != (address, audience):
                replica.host, replica.audience = address, audience
                replica.load, replica.context, replica.failures = None, None, 0
            replica.ready = ready
            replica.server = names.tls_name(audience) if audience in self._state.secured else None
            if self._polling and key not in self._tasks:
                self._tasks[key] = asyncio.get_running_loop().create_task(self._poll_forever(replica))
        for key in set(self._replicas) - set(seen):
            replica = self._replicas[key]
            replica.ready = False
            if task := self._tasks.pop(key, None):
                task.cancel()
            if replica.in_flight == 0:
                del self._replicas[key]
        self.on_change()
        self._wake()

    def start(self) -> None:
        self._polling = True
        self.sync()

    async def stop(self) -> None:
        self._polling = False
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wake(self) -> None:
        """Whoever waits for news looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _poll_forever(self, replica: Replica) -> None:
        while True:
            started = time.monotonic()
            host = replica.host
            try:
                load = await self._ask(replica)
            except (UpstreamError, TimeoutError, ValueError, KeyError, TypeError) as error:
                replica.failures += 1
                if replica.failures == FAILED_POLLS:
                    log.warning(
                        "replica does not answer", extra={"replica": replica.name, "why": str(error)[:200]}
                    )
                    self.on_change()
            else:
                if host == replica.host:
                    replica.load, replica.failures = load, 0
                    self.on_change()
            replica.asked = started
            self._wake()
            await asyncio.sleep(max(0.0, self._poll_seconds - (time.monotonic() - started)))

    async def _ask(self, replica: Replica) -> Load:
        async with asyncio.timeout(POLL_TIMEOUT):
            if replica.context is None:
                models = orjson.loads(await self._get(replica, self._port, MODELS_PATH, {}))
                replica.context = min(int(model["max_model_len"]) for model in models["data"])
            token = self._signer.sign(replica.audience, LOAD_PATH)
            headers = {"authorization": f"Bearer {token}"}
            return Load.parse(await self._get(replica, self._admin_port, LOAD_PATH, headers))

    async def _get(self, replica: Replica, port: int, path: str, headers: dict[str, str]) -> bytes:
        answer = await self._upstream.request(
            "GET",
            (replica.host, port),
            path,
            headers=headers,
            body=b"",
            head_timeout=POLL_TIMEOUT,
            server=replica.server,
        )
        body = await answer.read_all(POLL_TIMEOUT, MAX_LOAD_BYTES)
        if answer.status != 200:
            raise UpstreamError(f"{path} answered {answer.status}")
        return body
