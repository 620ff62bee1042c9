"""Which adapters this replica knows and where each stands, by served name and by digest.

Registered is not resident: a registered adapter's bytes are on disk, verified and checked against the base model; its
pages are filled when a request needs it and taken back when the pool needs room. Everything here runs on the engine's
thread; only checking, filling and prefetching run in the background, on bytes and pages that nobody else touches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tenantry_kernels import PagedAdapter

from tenantry_engine.adapters.artifact import Artifact, Report, as_adapter_error
from tenantry_engine.adapters.base import Base
from tenantry_engine.adapters.check import CheckedAdapter, check
from tenantry_engine.adapters.declared import Declaration, DeclaredSet, Fence
from tenantry_engine.adapters.loading import PageLoader
from tenantry_engine.adapters.pins import Pins
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.config import LoraConfig
from tenantry_engine.errors import AdapterError, RequestError
from tenantry_engine.pages import PagePool

__all__ = ["Background", "Declaration", "Registry", "Report", "model_not_found"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Background(Protocol):
    """Runs `job` elsewhere, then `done` on the engine's thread with its result or its exception."""

    def __call__(self, job: Callable[[], T], done: Callable[[T | BaseException], None]) -> None: ...


@dataclass
class Registry:
    """See the module. `loaded` and `failed` are told when pages are filled, or cannot be."""

    base: Base
    limits: LoraConfig | None
    model_name: str
    pool: PagePool
    loader: PageLoader
    store: BlobStore
    checker: Background
    filler: Background
    prefetcher: Background
    loaded: Callable[[str], None]
    failed: Callable[[str], None]
    evictions: int = 0  # adapters whose pages were taken back so far
    _artifacts: dict[str, Artifact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pins = Pins(self.pool, self.base.max_pages, self.load)
        self._declared = DeclaredSet(self.model_name, self.limits.max_registered if self.limits else 0)

    # the declared set

    @property
    def fence(self) -> Fence:
        """The highest that was seen."""
        return self._declared.fence

    def declare(self, fence: Fence, wanted: list[Declaration], drain_until: float) -> None:
        """Makes `wanted` the whole set. Raises RequestError and changes nothing when the set is not acceptable."""
        self._declared.replace(fence, wanted, drain_until)
        for declaration in wanted:
            digest = declaration.digest
            self.pool.keep(digest)
            if digest not in self._artifacts:
                artifact = self._artifacts[digest] = Artifact()
                if self.store.has(digest):  # of an earlier life of this replica
                    self._check(digest, artifact, lambda: None)
        self._pins.keep_only(self._declared.is_pinned)
        self._pin_all()

    def wants(self, digest: str) -> bool:
        """Whether a declared adapter lacks the bytes of the digest."""
        artifact = self._artifacts.get(digest)
        return (
            artifact is not None and artifact.checked is None and not artifact.checking and not artifact.final
        )

    def blob_stored(self, digest: str, then: Callable[[], None]) -> None:
        """The bytes are in the store: check them, then call `then`, whatever comes of it."""
        artifact = self._artifacts.get(digest)
        if artifact is not None and artifact.checked is None and not artifact.checking:
            self._check(digest, artifact, then)
            return
        try:
            if artifact is None:
                self.store.remove([digest])
        finally:
            then()

    def sweep(self, now: float, in_flight: Mapping[str, int]) -> list[str]:
        """Lets names go whose requests have ended; returns those whose time is over: abort their requests."""
        overdue: list[str] = []
        gone = False
        for declaration, until in self._declared.leaving():
            name, digest = declaration.name, declaration.digest
            if in_flight.get(name, 0):
                if now >= until:
                    overdue.append(name)
                continue
            if self._declared.users(digest) == 1:
                self.pool.drop(digest)
                if self.pool.holds(digest) or self._artifacts[digest].checking:
                    continue  # still being filled or checked: gone when that has ended
                del self._artifacts[digest]
                self._pins.forget(digest)
                self.loader.forget(digest)
                self.store.remove([digest])
            self._declared.remove(name)
            gone = True
        if gone:
            self._pin_all()
        return overdue

    def prune_store(self) -> None:
        """Deletes blobs that nothing declared, e.g. those of an earlier life of this replica."""
        self.store.prune(self._artifacts.keys())

    # requests

    def resolve(self, name: str, digest: str | None, uid: str | None) -> str:
        """The digest to serve `name` with. `digest` and `uid` None = not bound (development).

        Raises RequestError 404 unless the name is declared for that tenant with exactly that digest and registered.
        """
        declared = self._declared.live(name)
        if (
            declared is not None
            and digest in (None, declared.digest)
            and (uid is None or declared.tenant in ("", uid))
            and self._artifacts[declared.digest].servable
        ):
            return declared.digest
        raise model_not_found(name)

    def prefetch(self, digest: str) -> None:
        """A request has come that will need the adapter: brings its bytes closer before it is admitted."""
        artifact = self._artifacts[digest]
        if artifact.ahead or artifact.checked is None or self.pool.holds(digest):
            return
        artifact.ahead, checked = True, artifact.checked

        def done(result: BaseException | None) -> None:
            """What went wrong goes wrong again when the pages are filled, and is told then."""
            if digest not in self._artifacts:
                self.loader.forget(digest)  # it left meanwhile

        self.prefetcher(lambda: self.loader.prefetch(digest, checked), done)

    def paged(self, digest: str) -> PagedAdapter:
        """The resident adapter. Asking for one that is not resident is a fault of the engine."""
        artifact = self._artifacts[digest]
        assert artifact.paged is not None, "an adapter runs without pages"
        assert artifact.filled, "an adapter runs before its pages are filled"
        return artifact.paged

    def pages_needed(self, digest: str) -> int:
        """Pages that the adapter takes."""
        checked = self._artifacts[digest].checked
        assert checked is not None, "an adapter was admitted before it was checked"
        return checked.plan.pages

    def ready(self, digest: str) -> bool:
        """Whether its pages are filled."""
        return self._artifacts[digest].filled

    def load(self, digest: str) -> None:
        """Fills pages that were just reserved. Holds its own reference, so that they stay while it writes."""
        artifact = self._artifacts[digest]
        checked = artifact.checked
        assert checked is not None, "an adapter is loaded before it was checked"
        self.pool.reserve(0, digest)
        pages = self.pool.pages_of(digest)
        artifact.paged = self.loader.place(checked, pages)
        after = self.loader.settled()

        def done(result: BaseException | None) -> None:
            try:
                if isinstance(result, BaseException):
                    self._not_filled(digest, artifact, result)
                else:
                    artifact.filled = True
                    self.loaded(digest)
            finally:
                self.pool.release((), digest)
            self._pin(digest)

        self.filler(lambda: self.loader.fill(digest, checked, pages, after), done)

    def on_evicted(self, digest: object) -> None:
        """The pool took the pages back."""
        self.evictions += 1
        artifact = self._artifacts.get(str(digest))
        if artifact is not None:
            artifact.paged, artifact.filled, artifact.ahead = None, False, False

    # what is told

    def reports(self, in_flight: Mapping[str, int]) -> list[Report]:
        """Every name that is declared or still draining."""
        return [self._report(declaration, in_flight) for declaration in self._declared]

    def names(self) -> tuple[list[str], list[str]]:
        """Served names that are registered, and those of them that are resident."""
        registered, resident = [], []
        for declaration in self._declared:
            if self._artifacts[declaration.digest].servable and not self._declared.is_leaving(
                declaration.name
            ):
                registered.append(declaration.name)
                if self._is_resident(declaration.digest):
                    resident.append(declaration.name)
        return registered, resident

    def _is_resident(self, digest: str) -> bool:
        """By the page table: the adapter has pages, and they are filled."""
        return self.pool.holds(digest) and self._artifacts[digest].filled

    def _report(self, declared: Declaration, in_flight: Mapping[str, int]) -> Report:
        artifact, resident = self._artifacts[declared.digest], self._is_resident(declared.digest)
        return Report(
            name=declared.name,
            digest=declared.digest,
            tenant=declared.tenant,
            pinned=declared.pinned,
            state=artifact.state(leaving=self._declared.is_leaving(declared.name), resident=resident),
            reason=artifact.problem.reason if artifact.problem else "",
            message=artifact.problem.message if artifact.problem else "",
            rank=artifact.checked.rank if artifact.checked else 0,
            pages=len(self.pool.pages_of(declared.digest)),
            requests=in_flight.get(declared.name, 0),
        )

    # checking

    def _check(self, digest: str, artifact: Artifact, then: Callable[[], None]) -> None:
        limits = self.limits
        assert limits is not None, "an engine without LoRA has no adapters"
        artifact.checking = True

        def job() -> CheckedAdapter:
            # Not closed by hand: an error's traceback holds views of the bytes, and closing would hide the error.
            return check(memoryview(self.store.verified(digest)), self.base, limits)

        def done(result: CheckedAdapter | BaseException) -> None:
            artifact.checking = False
            try:
                if isinstance(result, BaseException):
                    self._not_checked(digest, artifact, result)
                else:
                    artifact.checked, artifact.problem = result, None
                    self._pin(digest)
            finally:
                then()

        self.checker(job, done)

    def _not_checked(self, digest: str, artifact: Artifact, error: BaseException) -> None:
        if self._is_damage(digest, error):
            self._throw_away(digest, artifact, error)
            return
        if not isinstance(error, AdapterError):
            log.error("checking %s failed", digest, exc_info=error)
        artifact.problem, artifact.final = as_adapter_error(error), True

    def _not_filled(self, digest: str, artifact: Artifact, error: BaseException) -> None:
        """The requests that wait for the adapter end with an error; damaged bytes are wanted again."""
        log.error("filling the pages of %s failed: %s", digest, as_adapter_error(error).message)
        if self._is_damage(digest, error):
            self._throw_away(digest, artifact, error)
        elif not isinstance(error, AdapterError):
            log.error("it is tried again for the next request", exc_info=error)
        self._pins.forget(digest)
        self.pool.drop(digest)
        self.failed(digest)

    def _is_damage(self, digest: str, error: BaseException) -> bool:
        """Whether the file is not what was stored: unreadable, or removed since it did not match its digest."""
        return isinstance(error, OSError) or (isinstance(error, AdapterError) and not self.store.has(digest))

    def _throw_away(self, digest: str, artifact: Artifact, error: BaseException) -> None:
        """Back to Missing: whoever fetches sends the bytes again."""
        self.loader.forget(digest)
        self.store.remove([digest])
        artifact.checked, artifact.problem = None, as_adapter_error(error)

    # pins

    def _pin_all(self) -> None:
        for digest in self._declared.pinned():
            self._pin(digest)

    def _pin(self, digest: str) -> None:
        """Whatever has changed for it: brings it in if a live name pins it, and keeps it in once it is there."""
        if self._declared.is_pinned(digest):
            self._pins.bring(digest, self._artifacts[digest])


def model_not_found(name: str) -> RequestError:
    """The one answer for a model that is unknown, of another tenant, or not ready."""
    return RequestError(
        f"the model `{name[:200]}` does not exist here", status=404, code="model_not_found", param="model"
    )
