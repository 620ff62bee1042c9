"""The state of one adapter's bytes, whatever names they are served under, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from tenantry_kernels import PagedAdapter

from tenantry_engine.adapters.check import CheckedAdapter
from tenantry_engine.errors import AdapterError


class Report(msgspec.Struct, frozen=True):
    """Where one served name stands (docs/reference/wire.md). Made and sent by the thousand between two steps."""

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
class Artifact:
    """The bytes of one digest."""

    checking: bool = False
    checked: CheckedAdapter | None = None
    problem: AdapterError | None = None  # of bytes that are here, or of those that had to be thrown away
    final: bool = False  # the bytes are right and the problem stays
    paged: PagedAdapter | None = None
    filled: bool = False
    ahead: bool = False  # asked for ahead of its load

    @property
    def servable(self) -> bool:
        """Whether requests may be admitted with it."""
        return self.checked is not None and not self.final

    def state(self, *, leaving: bool, resident: bool) -> str:
        """Of a name with these bytes."""
        if self.final:
            return "Failed"
        if leaving:
            return "Draining"
        if resident:
            return "Resident"
        return "Registered" if self.checked is not None else "Missing"


def as_adapter_error(error: BaseException) -> AdapterError:
    """The error without its traceback, which holds the bytes; any other exception as Corrupt."""
    if isinstance(error, AdapterError):
        return AdapterError(error.reason, error.message)
    return AdapterError("Corrupt", f"it could not be read: {type(error).__name__}")
