"""What every engine driver offers: declare a replica's adapters, observe it, drain it. Types, no I/O."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Protocol

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass

Shared = Annotated[str, AfterValidator(sys.intern)]
"""A text that many reports hold, and the store's objects too: it lies in memory once."""
WIRE = ConfigDict(alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, extra="ignore")

UNREACHABLE = "unreachable"
TIMEOUT = "timeout"
INVALID_ANSWER = "invalid_answer"
FENCED = "fenced"
NAME_TAKEN = "name_taken"


class EngineError(Exception):
    """A call that did not do what it should.

    `status` is the HTTP status, or None when no answer came. `code` is a word to decide by: the peer's own
    code where it sent one (`fenced`, `name_taken`, ...), else `unreachable`, `timeout`, `invalid_answer` or
    `http_<status>`. The text names call, peer, status and cause: it can stand in a condition as it is.
    """

    def __init__(self, call: str, peer: str, status: int | None, code: str, cause: str) -> None:
        self.call = call
        self.peer = peer
        self.status = status
        self.code = code
        self.cause = cause
        answered = f"HTTP {status} " if status is not None else ""
        super().__init__(f"{call} at {peer}: {answered}{code}: {cause}")

    @property
    def answered(self) -> bool:
        """Whether the peer answered at all; without an answer its state is unknown."""
        return self.status is not None


@dataclass(frozen=True)
class Replica:
    """One engine pod: `name` is `<namespace>/<pod>`, `url` its admin port, `audience` the uid of its pool."""

    name: str
    url: str
    audience: str


@dataclass(frozen=True, config=WIRE, order=True)
class Fence:
    """Orders writers; a replica refuses a pair lower than one it saw.

    `epoch` counts changes of leadership, `counter` the writes under it.
    """

    epoch: Annotated[int, Field(ge=0)] = 0
    counter: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, config=WIRE)
class AdapterDeclaration:
    """An adapter that a replica must know: `name` is the served name, `tenant` the Tenant's uid."""

    name: str
    digest: str
    tenant: str
    pinned: bool = False


class AdapterState(StrEnum):
    MISSING = "Missing"
    REGISTERED = "Registered"
    RESIDENT = "Resident"
    DRAINING = "Draining"
    FAILED = "Failed"

    @property
    def verified(self) -> bool:
        """Whether the replica holds the verified bytes and may be sent requests for them."""
        return self in (AdapterState.REGISTERED, AdapterState.RESIDENT)


@dataclass(frozen=True, slots=True, config=WIRE)
class AdapterReport:
    """An adapter as the replica itself reports it. `pages` are pages of its unified pool."""

    name: Shared
    digest: Shared
    state: AdapterState
    tenant: Shared = ""
    pinned: bool = False
    reason: str = ""
    message: str = ""
    rank: Annotated[int, Field(ge=0)] | None = None
    pages: Annotated[int, Field(ge=0)] = 0
    requests: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, config=WIRE)
class ModelReport:
    """The base model that the replica runs."""

    name: str
    digest: str = ""


@dataclass(frozen=True, config=WIRE)
class Pages:
    """How the replica's unified pool is used, in pages."""

    total: int = 0
    free: int = 0
    kv: int = 0
    adapter: int = 0
    cached: int = 0


@dataclass(frozen=True, config=WIRE)
class Capacity:
    """What the replica can hold. `slots` bounds the sequences decoded at once."""

    max_rank: int
    max_registered: int
    slots: int
    pages: Pages = Pages()


@dataclass(frozen=True, config=WIRE)
class SeparationReport:
    """Whom the replica served since it began, and what of their prompts came from its cache.

    `tenants`: uids, the first ones of `tenant_count`. `crossed_tokens`: cached tokens that were computed for another
    tenant than the one they were used for.
    """

    tenants: tuple[str, ...]
    tenant_count: Annotated[int, Field(ge=0)]
    prompt_tokens: Annotated[int, Field(ge=0)]
    cached_tokens: Annotated[int, Field(ge=0)]
    crossed_tokens: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=WIRE)
class ReplicaReport:
    """What a replica says about itself, in answer to a declaration or an observation.

    `requests`: those that run or wait there, None where it does not tell.
    """

    fence: Fence
    ready: bool
    draining: bool
    model: ModelReport
    capacity: Capacity
    adapters: tuple[AdapterReport, ...] = ()
    requests: Annotated[int, Field(ge=0)] | None = None
    separation: SeparationReport | None = None

    def adapter(self, name: str) -> AdapterReport | None:
        """The report of one served name, or None when the replica does not know it (any more)."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, AdapterReport]:
        """A replica may know thousands, and every tenant on it asks."""
        return {adapter.name: adapter for adapter in self.adapters}

    def serves(self, name: str, digest: str) -> bool:
        """Whether the replica reports exactly these bytes verified under exactly this name."""
        report = self.adapter(name)
        return report is not None and report.digest == digest and report.state.verified


class EngineDriver(Protocol):
    """One kind of engine. Every method raises EngineError, and only that, when the replica did not do it."""

    async def declare(
        self, replica: Replica, adapters: Sequence[AdapterDeclaration], fence: Fence, drain_seconds: int
    ) -> ReplicaReport:
        """Tell the replica its whole set; all else drains for at most `drain_seconds`, then is gone."""
        ...

    async def observe(self, replica: Replica) -> ReplicaReport:
        """What the replica reports now. Changes nothing."""
        ...

    async def smoke(self, replica: Replica, name: str, digest: str, tenant: str) -> None:
        """Have the replica answer a short prompt under the served name, for the tenant's uid. Changes nothing."""
        ...

    async def drain(self, replica: Replica) -> None:
        """Let running requests end and take no new ones."""
        ...
