"""What replicas and the fetcher were last heard to say. In memory: after a restart everybody is asked again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tenantry.cluster import Key
from tenantry.engines import Pull, ReplicaReport, Transfer
from tenantry.engines.base import AdapterState
from tenantry.promotion.machine import Fault, Held


@dataclass(frozen=True)
class Observation:
    """One replica, as it answered last. `report` None: it did not, and `fault` says how.

    `faults` are served names that cannot get there, with the reason.
    """

    incarnation: str
    report: ReplicaReport | None
    fault: Fault | None = None
    faults: Mapping[str, Fault] = field(default_factory=dict)

    def held(self, name: str, digest: str) -> tuple[Held, Fault | None]:
        """What the replica says of these bytes under this name."""
        if self.report is None:
            return Held.UNKNOWN, self.fault
        if name in self.faults:
            return Held.FAILED, self.faults[name]
        if self.report.serves(name, digest):
            return Held.LOADED, None
        entry = self.report.adapter(name)
        if entry is not None and entry.state is AdapterState.FAILED:
            return Held.FAILED, Fault(entry.reason or "Failed", entry.message)
        return Held.MISSING, None


class Observations:
    """Keyed by `Key(pool, replica)`."""

    def __init__(self) -> None:
        self._seen: dict[Key, Observation] = {}
        self._artifacts: dict[Pull, Transfer] = {}

    def get(self, replica: Key, incarnation: str | None) -> Observation | None:
        """What this very process of the replica said; None when it was not asked yet."""
        seen = self._seen.get(replica)
        return seen if seen is not None and seen.incarnation == incarnation else None

    def put(self, replica: Key, observation: Observation) -> None:
        self._seen[replica] = observation

    def forget(self, replica: Key) -> bool:
        """Whether there was something to forget."""
        return self._seen.pop(replica, None) is not None

    def reported(self, pool: str) -> dict[str, ReplicaReport]:
        """The last report of each replica of a pool that gave one."""
        return {
            key.name: seen.report
            for key, seen in self._seen.items()
            if key.namespace == pool and seen.report is not None
        }

    def artifact(self, pull: Pull) -> Transfer | None:
        """What the fetcher said of the bytes at that source, on those terms; not where it has pushed them."""
        return self._artifacts.get(pull)

    def put_artifact(self, pull: Pull, transfer: Transfer) -> bool:
        """Whether the artifact's state is another than before."""
        before = self._artifacts.get(pull)
        self._artifacts[pull] = replace(transfer, replicas=())
        return before is None or (before.artifact.state, before.artifact.reason) != (
            transfer.artifact.state,
            transfer.artifact.reason,
        )
