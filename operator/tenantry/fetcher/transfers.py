"""What the operator asked for, what runs and when to try again. Lost with the process, and then asked for again.

A transfer is a digest, its source and the terms on which it is to be had (`Pull`). Its pull runs once for all who ask;
each replica has a push of its own. A failed part is tried again by the first call after its back-off, so a fetcher that
nobody asks does nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenantry.engines.base import Replica
from tenantry.engines.fetcher import (
    AdapterFacts,
    ArtifactReport,
    ArtifactState,
    Pull,
    PushReport,
    PushState,
    SignatureReport,
    Transfer,
)

from . import metrics
from .artifact import read_facts
from .cache import Cache
from .errors import FetchError, Reason
from .push import Pusher, PushError
from .sources import Sources

log = logging.getLogger(__name__)

FORGET_SECONDS = 3600.0
REPUSH_SECONDS = 5.0
PULL_BACKOFF = (2.0, 120.0)
PUSH_BACKOFF = (0.5, 30.0)


@dataclass
class _Push:
    """One replica at one address. A new address is a new pod, which has nothing."""

    replica: Replica
    state: PushState = PushState.WAITING
    reason: str = ""
    message: str = ""
    failures: int = 0
    retry_at: float = 0.0


@dataclass
class _Work:
    pull: Pull
    state: ArtifactState = ArtifactState.PULLING
    reason: str = ""
    message: str = ""
    bytes: int = 0
    facts: AdapterFacts | None = None
    signature: SignatureReport | None = None
    failures: int = 0
    retry_at: float = 0.0
    asked_at: float = 0.0
    running: bool = False
    pushes: dict[str, _Push] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return self.pull.digest

    @property
    def place(self) -> str:
        """Whence the bytes come, and with whose credentials: what one Secret opens stays shut to others."""
        if not self.pull.secret_ref:
            return self.pull.source
        return f"{self.pull.source} {self.pull.namespace}/{self.pull.secret_ref}"


class Transfers:
    """Bounded work: at most `pulls` downloads and `pushes` uploads at once, the rest waits its turn."""

    def __init__(
        self,
        sources: Sources,
        pusher: Pusher,
        cache: Cache,
        *,
        pulls: int = 4,
        pushes: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._pusher = pusher
        self._cache = cache
        self._pull_slots = asyncio.Semaphore(pulls)
        self._push_slots = asyncio.Semaphore(pushes)
        self._clock = clock
        self._works: dict[Pull, _Work] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, pull: Pull, replicas: Iterable[Replica]) -> Transfer:
        """Start or join the work and say where it stands. Returns at once."""
        now = self._clock()
        self._forget(now)
        work = self._works.setdefault(pull, _Work(pull))
        work.asked_at = now
        asked = [self._push_of(work, replica, now) for replica in replicas]
        if not work.running and self._pull_due(work, now):
            work.state, work.running = ArtifactState.PULLING, True
            self._spawn(self._pull(work))
        elif work.state is ArtifactState.VERIFIED:
            self._start_pushes(work)
        return _report(work, asked)

    async def close(self) -> None:
        """Stop all work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sources.close()

    def _pull_due(self, work: _Work, now: float) -> bool:
        if work.state is ArtifactState.FAILED:
            return now >= work.retry_at
        if work.state is ArtifactState.VERIFIED:
            # Evicted meanwhile, or found damaged by a receiver: the bytes are had again before they are promised.
            wanted = any(push.state is PushState.WAITING for push in work.pushes.values())
            return wanted and self._cache.find(work.digest, work.place) is None
        return True

    def _push_of(self, work: _Work, replica: Replica, now: float) -> _Push:
        """The push for a replica; put back to Waiting where a new attempt is due."""
        push = work.pushes.get(replica.name)
        if push is None or push.replica != replica:
            push = work.pushes[replica.name] = _Push(replica)
        elif push.state in (PushState.PUSHED, PushState.FAILED) and now >= push.retry_at:
            # Asked again long after Pushed: the replica lost the bytes, e.g. its container restarted.
            push.state = PushState.WAITING
        return push

    async def _pull(self, work: _Work) -> None:
        started = self._clock()
        try:
            async with self._pull_slots:
                await self._obtain(work)
        except FetchError as error:
            work.state, work.reason, work.message = ArtifactState.FAILED, error.reason.value, error.message
        except OSError as error:
            work.state, work.reason = ArtifactState.FAILED, Reason.SOURCE_UNAVAILABLE.value
            work.message = f"the cache cannot be written: {error.strerror or type(error).__name__}"
        except Exception as error:
            # What comes from outside must not leave a transfer that is neither done nor failed.
            log.error("pull of %s crashed", work.digest, exc_info=error)
            work.state, work.reason = ArtifactState.FAILED, Reason.SOURCE_UNAVAILABLE.value
            work.message = "the fetcher failed at it; its log says why"
        finally:
            work.running = False
        if work.state is ArtifactState.FAILED:
            work.failures += 1
            work.retry_at = self._clock() + _back_off(work.failures, PULL_BACKOFF)
            metrics.pulls.labels(work.reason).inc()
            log.warning("pull of %s failed: %s: %s", work.digest, work.reason, work.message)
            return
        metrics.pulls.labels("ok").inc()
        metrics.pull_seconds.observe(self._clock() - started)
        log.info("%s verified, %d bytes", work.digest, work.bytes)
        self._start_pushes(work)

    async def _obtain(self, work: _Work) -> None:
        blob = self._cache.find(work.digest, work.place)
        if blob is not None and await asyncio.to_thread(_digest_of, blob) != work.digest:
            log.error("%s is damaged on disk; pulling it again", work.digest)
            self._cache.drop(work.digest)
            blob = None
        if blob is None:
            scratch = self._cache.scratch()
            try:
                receipt = await self._sources.pull(work.pull, scratch)
                await asyncio.to_thread(read_facts, scratch)
                blob = self._cache.add(scratch, work.digest, work.place, receipt.subject)
            finally:
                scratch.unlink(missing_ok=True)
            metrics.cache_bytes.set(self._cache.size())
        work.signature = await self._sources.signature(
            work.pull, self._cache.subject(work.digest, work.place)
        )
        facts = await asyncio.to_thread(read_facts, blob)
        work.facts = AdapterFacts(facts.rank, facts.base_model, facts.target_modules)
        work.bytes = blob.stat().st_size
        work.state, work.reason, work.message, work.failures = ArtifactState.VERIFIED, "", "", 0

    def _start_pushes(self, work: _Work) -> None:
        for push in work.pushes.values():
            if push.state is PushState.WAITING:
                push.state = PushState.PUSHING
                self._spawn(self._push(work, push))

    async def _push(self, work: _Work, push: _Push) -> None:
        replica = push.replica
        try:
            async with self._push_slots:
                with self._cache.hold(work.digest):
                    blob = self._cache.find(work.digest, work.place)
                    if blob is None:
                        raise PushError("Evicted", "the bytes left the cache; they are pulled again")
                    await self._pusher.push(replica.url, replica.audience, work.digest, blob)
        except PushError as error:
            push.state, push.reason, push.message = PushState.FAILED, error.reason, error.message
            push.failures += 1
            push.retry_at = self._clock() + _back_off(push.failures, PUSH_BACKOFF)
            metrics.pushes.labels(error.reason).inc()
            log.warning("push of %s to %s failed: %s", work.digest, replica.name, error)
            if error.reason == "DigestMismatch":
                self._cache.drop(work.digest)
        else:
            push.state, push.reason, push.message, push.failures = PushState.PUSHED, "", "", 0
            push.retry_at = self._clock() + REPUSH_SECONDS
            metrics.pushes.labels("ok").inc()

    def _forget(self, now: float) -> None:
        """Drop what nobody has asked for in an hour."""
        idle = [
            key
            for key, work in self._works.items()
            if not work.running and now - work.asked_at > FORGET_SECONDS
        ]
        for key in idle:
            del self._works[key]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a transfer crashed", exc_info=error)


def _report(work: _Work, asked: list[_Push]) -> Transfer:
    verified = work.state is ArtifactState.VERIFIED
    return Transfer(
        digest=work.digest,
        artifact=ArtifactReport(
            work.state,
            work.reason,
            work.message,
            work.bytes if verified else 0,
            work.signature if verified else None,
        ),
        adapter=work.facts if verified else None,
        replicas=tuple(PushReport(p.replica.name, p.state, p.reason, p.message) for p in asked),
    )


def _digest_of(blob: Path) -> str:
    with blob.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _back_off(failures: int, bounds: tuple[float, float]) -> float:
    """Doubling, with jitter, so that many failures do not come back together."""
    first, last = bounds
    return min(last, first * 2.0 ** min(failures - 1, 16)) * random.uniform(0.75, 1.25)  # noqa: S311
