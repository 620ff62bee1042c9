"""What tests of promotion share: specs, candidates, and an adapter whose status lives from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tenantry.api import AdapterSpec, AdapterStatus
from tenantry.promotion import machine
from tenantry.promotion.analysis import Counts, Histogram, Window
from tenantry.promotion.machine import (
    Artifact,
    Candidate,
    Decision,
    Fault,
    Held,
    Inputs,
    Memory,
    Release,
    ReplicaView,
)
from tenantry.promotion.memory import recall, written

THREE = {"1.0.0": "a", "2.0.0": "b", "3.0.0": "c"}
SOURCE = "oci://registry/tone:1"


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def release(version: str) -> Release:
    return Release(version, digest(THREE[version]), SOURCE, 8)


def spec(
    stable: str = "2.0.0",
    versions: dict[str, str] = THREE,
    *,
    canary: tuple[str, int] | None = None,
    steps: tuple[tuple[int, int], ...] = (),
    analysis: list[dict[str, Any]] | None = None,
    **rollout: Any,
) -> AdapterSpec:
    """`steps` are (weight, pauseSeconds)."""
    channels: list[dict[str, Any]] = [{"name": "stable", "version": stable}]
    if canary is not None:
        channels.append({"name": "canary", "version": canary[0], "weight": canary[1]})
    listed = [
        {"version": version, "digest": digest(letter), "source": SOURCE, "rank": 8}
        for version, letter in versions.items()
    ]
    how = {
        "steps": [{"weight": weight, "pauseSeconds": pause} for weight, pause in steps],
        "analysis": analysis or [],
        **rollout,
    }
    return AdapterSpec.model_validate(
        {"tenantRef": "acme", "versions": listed, "channels": channels, "rollout": how}
    )


def views(*held: Held, ready: bool = True, answered: bool = True) -> list[ReplicaView]:
    return [
        ReplicaView(f"r{i}", ready, state, answered=answered and state is Held.LOADED)
        for i, state in enumerate(held)
    ]


PROVEN = Candidate(None, Artifact(True), views(Held.LOADED, Held.LOADED))
MISSING = Candidate(None, Artifact(True), views(Held.MISSING, Held.MISSING))
NOBODY = Candidate()
SERVED_ONE = Memory(active=release("1.0.0"), known={"1.0.0": digest("a")})


def window(answered: int, failed: int = 0, seconds: float = 0.1) -> Window:
    """Requests of one version; every answer took `seconds`."""
    bounds = (0.1, 1.0, 10.0, float("inf"))
    counts = tuple(answered if bound == min(b for b in bounds if b >= seconds) else 0 for bound in bounds)
    taken = Histogram(bounds, counts)
    return Window(Counts(answered, failed, taken, taken))


@dataclass
class Adapter:
    """One Adapter under test. Between two steps only its status remains, as it does over a restart."""

    spec: AdapterSpec = field(default_factory=spec)
    status: dict[str, Any] = field(default_factory=lambda: written(SERVED_ONE))
    now: float = 1_000_000.0
    generation: int = 1

    @property
    def memory(self) -> Memory:
        return recall(AdapterStatus.model_validate(self.status))

    def step(
        self,
        stable: Candidate = PROVEN,
        *,
        after: float = 0.0,
        window: Window | None = None,
        canary: Candidate = NOBODY,
    ) -> Decision:
        self.now += after
        decision = machine.step(
            Inputs(self.spec, self.generation, self.memory, stable, canary, window, self.now)
        )
        self.status = written(decision.memory)
        assert self.memory == decision.memory, "a restart must not change anything"
        return decision

    def edit(self, changed: AdapterSpec) -> None:
        self.spec = changed
        self.generation += 1

    @property
    def targets(self) -> dict[str, int]:
        """Version -> percent."""
        return {found.version: weight for found, weight in self.memory.targets}


def fault(reason: str) -> Fault:
    return Fault(reason, f"because of {reason}")
