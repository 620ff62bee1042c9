"""Which adapters this replica knows, by served name and by digest, and where each stands.

Registered is not resident: a registered adapter's bytes are on disk, verified and checked against the base model; its
pages are filled when a request needs it and taken back when the pool needs room. Everything here runs on the engine's
thread; only checking and filling run in the background, on bytes and pages that nobody else touches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tenantry_kernels import PagedAdapter, place, write_adapter
from torch import Tensor

from tenantry_engine.adapters.check import Base, CheckedAdapter, check
from tenantry_engine.adapters.safetensors_file import read_tensor
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.config import LoraConfig
from tenantry_engine.digest import is_digest, split_blob
from tenantry_engine.errors import AdapterError, RequestError
from tenantry_engine.pages import PagePool

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,252}")

Fence = tuple[int, int]
T = TypeVar("T")


class Background(Protocol):
    """Runs `job` elsewhere, then `done` on the engine's thread with its result or its exception."""

    def __call__(self, job: Callable[[], T], done: Callable[[T | BaseException], None]) -> None: ...


@dataclass(frozen=True)
class Declaration:
    """One adapter that this replica should have. `tenant` is a uid; empty = any tenant (development)."""

    name: str
    digest: str
    tenant: str = ""
    pinned: bool = False


@dataclass(frozen=True)
class Report:
    """Where one served name stands."""

    name: str
    digest: str
    tenant: str
    pinned: bool
    state: str
    reason: str
    message: str
    rank: int
    pages: int
    requests: int


@dataclass
class _Entry:
    declaration: Declaration
    leaves_at: float | None = None  # not declared any more; its requests may run until then


@dataclass
class _Artifact:
    """The bytes of one digest, whatever they are called."""

    checking: bool = False
    checked: CheckedAdapter | None = None
    failure: AdapterError | None = None
    paged: PagedAdapter | None = None
    filled: bool = False


@dataclass
class Registry:
    """See the module. `loaded` and `failed` are told when pages are filled, or cannot be."""

    base: Base
    limits: LoraConfig | None
    model_name: str
    pool: PagePool
    memory: Tensor  # [pages, page_elems]
    store: BlobStore
    checker: Background
    filler: Background
    loaded: Callable[[str], None]
    failed: Callable[[str], None]
    fence: Fence = (0, 0)
    evictions: int = 0  # adapters whose pages were taken back so far
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _artifacts: dict[str, _Artifact] = field(default_factory=dict)

    # the declared set

    def declare(self, fence: Fence, wanted: list[Declaration], drain_until: float) -> None:
        """Makes `wanted` the whole set. Raises RequestError and changes nothing when the set is not acceptable."""
        if fence < self.fence:
            raise RequestError(
                f"fence {list(fence)} must not be lower than {list(self.fence)}, which was seen before",
                status=409, code="fenced", param="fence",
            )  # fmt: skip
        self._accept(wanted)
        self.fence = fence
        names = {declaration.name for declaration in wanted}
        for name, entry in self._entries.items():
            if name not in names and entry.leaves_at is None:
                entry.leaves_at = drain_until
        for declaration in wanted:
            self._entries[declaration.name] = _Entry(declaration)
            artifact = self._artifacts.setdefault(declaration.digest, _Artifact())
            self.pool.keep(declaration.digest)
            if artifact.checked is None and artifact.failure is None and self.store.has(declaration.digest):
                self._check(declaration.digest, artifact, lambda: None)
        self._apply_pins()

    def _accept(self, wanted: list[Declaration]) -> None:
        limit = self.limits.max_registered if self.limits else 0
        if len(wanted) > limit:
            raise RequestError(
                f"`adapters` must have at most {limit} entries (`maxRegistered`), not {len(wanted)}",
                code="too_many_adapters", param="adapters",
            )  # fmt: skip
        seen: set[str] = set()
        for declaration in wanted:
            name, digest = declaration.name, declaration.digest
            if not _NAME.fullmatch(name) or name == self.model_name or name in seen:
                raise RequestError(
                    f"`adapters[].name` must be a word of letters, digits and . _ + -, used once and not the base "
                    f"model's name: {name[:80]!r}",
                    param="adapters",
                )
            if not is_digest(digest):
                raise RequestError("`adapters[].digest` must be sha256: and 64 hex digits", param="adapters")
            known = self._entries.get(name)
            if known is not None and known.declaration.digest != digest:
                raise RequestError(
                    f"`{name}` must keep its digest {known.declaration.digest}: new bytes need a new name",
                    status=409, code="name_taken", param="adapters",
                )  # fmt: skip
            seen.add(name)

    def wants(self, digest: str) -> bool:
        """Whether a declared adapter lacks the bytes of the digest."""
        artifact = self._artifacts.get(digest)
        return (
            artifact is not None
            and artifact.checked is None
            and not artifact.checking
            and artifact.failure is None
        )

    def blob_stored(self, digest: str, then: Callable[[], None]) -> None:
        """The bytes are in the store: check them, then call `then`."""
        artifact = self._artifacts.get(digest)
        if artifact is None:
            self.store.remove([digest])
            then()
        elif artifact.checked is None and not artifact.checking:
            self._check(digest, artifact, then)
        else:
            then()

    def sweep(self, now: float, in_flight: Mapping[str, int]) -> list[str]:
        """Lets names go whose requests have ended; returns those whose time is over: abort their requests."""
        overdue: list[str] = []
        for name, entry in list(self._entries.items()):
            if entry.leaves_at is None:
                continue
            if in_flight.get(name, 0):
                if now >= entry.leaves_at:
                    overdue.append(name)
                continue
            digest = entry.declaration.digest
            if not self._used_by_others(digest, name):
                self.pool.drop(digest)
                if self.pool.holds(digest) or self._artifacts[digest].checking:
                    continue  # still being filled or checked: gone when that has ended
                del self._artifacts[digest]
                self.store.remove([digest])
            del self._entries[name]
        return overdue

    def prune_store(self) -> None:
        """Deletes blobs that nothing declared, e.g. those of an earlier life of this replica."""
        self.store.prune(self._artifacts.keys())

    # requests

    def resolve(self, name: str, digest: str | None, uid: str | None) -> str:
        """The digest to serve `name` with. `digest` and `uid` None = not bound (development).

        Raises RequestError 404 unless the name is declared for that tenant with exactly that digest and registered.
        """
        entry = self._entries.get(name)
        if entry is not None and entry.leaves_at is None:
            declared = entry.declaration
            artifact = self._artifacts[declared.digest]
            right = digest in (None, declared.digest) and (uid is None or declared.tenant in ("", uid))
            if right and artifact.checked is not None and artifact.failure is None:
                return declared.digest
        raise model_not_found(name)

    def paged(self, digest: str) -> PagedAdapter:
        """The resident adapter. Asking for one that is not resident is a fault of the engine."""
        artifact = self._artifacts[digest]
        assert artifact.paged is not None, "an adapter runs without pages"
        assert artifact.filled, "an adapter runs before its pages are filled"
        return artifact.paged

    def pages_needed(self, digest: str) -> int:
        checked = self._artifacts[digest].checked
        assert checked is not None, "an adapter was admitted before it was checked"
        return checked.plan.pages

    def ready(self, digest: str) -> bool:
        return self._artifacts[digest].filled

    def load(self, digest: str) -> None:
        """Fills pages that were just reserved. Holds its own reference, so that they stay while it writes."""
        artifact = self._artifacts[digest]
        checked = artifact.checked
        assert checked is not None, "an adapter is loaded before it was checked"
        self.pool.reserve(0, digest)
        paged = artifact.paged = place(checked.plan, self.pool.pages_of(digest), checked.scales)

        def fill() -> None:
            _fill(memoryview(self.store.verified(digest)), checked, self.memory, paged)

        def done(result: BaseException | None) -> None:
            if isinstance(result, BaseException):
                artifact.failure = _as_adapter_error(result)
                self.pool.drop(digest)
                self.failed(digest)
                self.pool.release((), digest)
            else:
                artifact.filled = True
                self.loaded(digest)
                self.pool.release((), digest)
                self._apply_pins()

        self.filler(fill, done)

    def on_evicted(self, digest: object) -> None:
        """The pool took the pages back."""
        self.evictions += 1
        artifact = self._artifacts.get(str(digest))
        if artifact is not None:
            artifact.paged, artifact.filled = None, False

    # what is told

    def reports(self, in_flight: Mapping[str, int]) -> list[Report]:
        """Every name that is declared or still draining."""
        return [self._report(entry, in_flight) for entry in self._entries.values()]

    def names(self) -> tuple[list[str], list[str]]:
        """Served names that are registered, and those of them that are resident."""
        registered = [
            name
            for name, entry in self._entries.items()
            if entry.leaves_at is None
            and self._artifacts[entry.declaration.digest].checked is not None
            and self._artifacts[entry.declaration.digest].failure is None
        ]
        return registered, [
            n for n in registered if self._artifacts[self._entries[n].declaration.digest].filled
        ]

    def _report(self, entry: _Entry, in_flight: Mapping[str, int]) -> Report:
        declared = entry.declaration
        artifact = self._artifacts[declared.digest]
        failure = artifact.failure
        if failure is not None:
            state = "Failed"
        elif entry.leaves_at is not None:
            state = "Draining"
        elif artifact.filled:
            state = "Resident"
        else:
            state = "Registered" if artifact.checked is not None else "Missing"
        return Report(
            name=declared.name,
            digest=declared.digest,
            tenant=declared.tenant,
            pinned=declared.pinned,
            state=state,
            reason=failure.reason if failure else "",
            message=failure.message if failure else "",
            rank=artifact.checked.rank if artifact.checked else 0,
            pages=len(self.pool.pages_of(declared.digest)),
            requests=in_flight.get(declared.name, 0),
        )

    # inside

    def _check(self, digest: str, artifact: _Artifact, then: Callable[[], None]) -> None:
        limits = self.limits
        assert limits is not None, "an engine without LoRA has no adapters"
        artifact.checking = True

        def job() -> CheckedAdapter:
            # Not closed by hand: an error's traceback holds views of the bytes, and closing would hide the error.
            return check(memoryview(self.store.verified(digest)), self.base, limits)

        def done(result: CheckedAdapter | BaseException) -> None:
            artifact.checking = False
            if not isinstance(result, BaseException):
                artifact.checked = result
                self._apply_pins()
            elif self.store.has(digest):
                artifact.failure = _as_adapter_error(result)
            then()  # a file that was damaged on disk is gone: the bytes are wanted again

        self.checker(job, done)

    def _apply_pins(self) -> None:
        """Pinned adapters are loaded ahead of any request, as long as enough of the pool stays for requests."""
        pinned = {
            e.declaration.digest
            for e in self._entries.values()
            if e.declaration.pinned and e.leaves_at is None
        }
        budget = self.base.max_pages
        for digest, artifact in self._artifacts.items():
            if digest not in pinned or artifact.checked is None or artifact.failure is not None:
                self.pool.pin(digest, False)
                continue
            budget -= artifact.checked.plan.pages
            if budget < 0:
                self.pool.pin(digest, False)
                continue
            if not self.pool.holds(digest):
                if self.pool.reserve(0, digest, artifact.checked.plan.pages) is None:
                    continue
                self.load(digest)
                self.pool.release((), digest)
            self.pool.pin(digest, True)

    def _used_by_others(self, digest: str, name: str) -> bool:
        return any(e.declaration.digest == digest for n, e in self._entries.items() if n != name)


def model_not_found(name: str) -> RequestError:
    """The one answer for a model that is unknown, of another tenant, or not ready."""
    return RequestError(
        f"the model `{name[:200]}` does not exist here", status=404, code="model_not_found", param="model"
    )


def _fill(blob: memoryview, checked: CheckedAdapter, memory: Tensor, paged: PagedAdapter) -> None:
    _, file = split_blob(blob)
    for (layer, module), (a, b) in checked.tensors.items():
        write_adapter(memory, paged, layer, module, read_tensor(file, a), read_tensor(file, b))


def _as_adapter_error(error: BaseException) -> AdapterError:
    if isinstance(error, AdapterError):
        return AdapterError(error.reason, error.message)  # without its traceback, which holds the bytes
    return AdapterError("Corrupt", f"it could not be read: {type(error).__name__}")
