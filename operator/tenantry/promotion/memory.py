"""What a promotion remembers from one step to the next. All of it is the Adapter's status, so a restart resumes.

`recall` and `written` are each other's inverse on what a status can hold. Times are Unix seconds here, RFC 3339 there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from tenantry.api.adapter import AdapterSpec, AdapterStatus, ChannelName, ChannelStatus, Phase

from .analysis import Tally
from .facts import Release

HISTORY: Final = 10
FAILURES: Final = 10
_MESSAGE: Final = 512


@dataclass(frozen=True)
class Rollout:
    """One attempt to promote a release. `weight` in percent, times in Unix seconds."""

    revision: str
    attempt: int
    phase: Phase
    release: Release
    started_at: float
    step_started_at: float
    step: int = 0
    weight: int = 0
    start_weight: int = 0
    reason: str = ""
    tallies: tuple[Tally, ...] = ()

    @property
    def shifting(self) -> bool:
        """Whether the release has a part of the traffic and not yet all of it."""
        return self.weight > 0 and self.phase is not Phase.PROMOTED


@dataclass(frozen=True)
class Promoted:
    """The release that was promoted last, and by which generation of the spec."""

    release: Release
    generation: int
    time: float


@dataclass(frozen=True)
class Replaced:
    """A release that was served before."""

    release: Release
    at: float


@dataclass(frozen=True)
class Failed:
    """A rollout that failed."""

    revision: str
    attempt: int
    release: Release
    reason: str
    message: str
    time: float


@dataclass(frozen=True)
class Memory:
    """`active` answers what no other does. `canary` is the canary channel's release while it is served."""

    active: Release | None = None
    canary: Release | None = None
    canary_weight: int = 0
    rollout: Rollout | None = None
    promoted: Promoted | None = None
    history: tuple[Replaced, ...] = ()
    failed: tuple[Failed, ...] = ()
    known: Mapping[str, str] = field(default_factory=dict)

    @property
    def targets(self) -> tuple[tuple[Release, int], ...]:
        """Whom routes name, with percents that add up to 100: the active release first, at most one beside it."""
        if self.active is None:
            return ()
        rollout = self.rollout
        if rollout is not None and rollout.shifting:
            return ((self.active, 100 - rollout.weight), (rollout.release, rollout.weight))
        if self.canary is not None and not self.canary.same(self.active):
            return ((self.active, 100 - self.canary_weight), (self.canary, self.canary_weight))
        return ((self.active, 100),)

    def ended(self) -> bool:
        """Whether the present attempt failed: only another spec begins a new one."""
        last = self.failed[-1] if self.failed else None
        return (
            self.rollout is not None
            and last is not None
            and (last.attempt, last.revision) == (self.rollout.attempt, self.rollout.revision)
        )

    def promote(self, release: Release, generation: int, now: float) -> Memory:
        """The same with another active release; the one before becomes history."""
        history = tuple(past for past in self.history if not past.release.same(release))
        if self.active is not None and not self.active.same(release):
            history = (Replaced(self.active, now), *history)
        return replace(
            self,
            active=release,
            promoted=Promoted(release, generation, now),
            history=history[:HISTORY],
        )

    def fail(self, reason: str, message: str, now: float) -> Memory:
        """The same with the present rollout among the failed ones."""
        assert self.rollout is not None
        rollout = self.rollout
        entry = Failed(
            rollout.revision, rollout.attempt, rollout.release, reason, shorten(message), round(now, 6)
        )
        return replace(self, failed=(*self.failed, entry)[-FAILURES:])


def revision(spec: AdapterSpec, release: Release) -> str:
    """What a rollout is about: the release, and how it is to take over. The same is not tried again once it failed."""
    how = spec.rollout.model_dump(mode="json", by_alias=True, exclude={"paused", "drain_seconds"})
    asked = [release.version, release.digest, how]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def recall(status: AdapterStatus) -> Memory:
    """The memory that a status holds."""
    channels = {channel.name: channel for channel in status.channels}
    stable, canary = channels.get(ChannelName.STABLE), channels.get(ChannelName.CANARY)
    found = status.rollout
    return Memory(
        active=_active(stable),
        canary=_active(canary),
        canary_weight=canary.weight if canary is not None else 0,
        rollout=None
        if found is None
        else Rollout(
            revision=found.revision,
            attempt=found.attempt,
            phase=found.phase,
            release=Release.of(found),
            started_at=seconds(found.started_at),
            step_started_at=seconds(found.step_started_at),
            step=found.step,
            weight=found.weight,
            start_weight=found.start_weight,
            reason=found.reason,
            tallies=tuple(
                Tally(entry.metric, entry.value, entry.samples, entry.failures, entry.passed)
                for entry in found.analysis
            ),
        ),
        promoted=None
        if status.last_promoted is None
        else Promoted(
            Release.of(status.last_promoted),
            status.last_promoted.generation,
            seconds(status.last_promoted.time),
        ),
        history=tuple(Replaced(Release.of(past), seconds(past.replaced_at)) for past in status.history),
        failed=tuple(
            Failed(
                entry.revision,
                entry.attempt,
                Release.of(entry),
                entry.reason,
                entry.message,
                seconds(entry.time),
            )
            for entry in status.failed_revisions
        ),
        known={entry.version: entry.digest for entry in status.known},
    )


def written(memory: Memory) -> dict[str, Any]:
    """The part of a status that `recall` reads, without what channels say of replicas."""
    wire: dict[str, Any] = {
        "channels": [_channel(ChannelName.STABLE, memory.active, _weight(memory))],
        "known": [{"version": name, "digest": digest} for name, digest in sorted(memory.known.items())],
        "history": [{**_wire(past.release), "replacedAt": moment(past.at)} for past in memory.history],
        "failedRevisions": [
            {
                **_wire(entry.release),
                "revision": entry.revision,
                "attempt": entry.attempt,
                "reason": entry.reason,
                "message": entry.message,
                "time": moment(entry.time),
            }
            for entry in memory.failed
        ],
    }
    if memory.canary is not None:
        wire["channels"].append(_channel(ChannelName.CANARY, memory.canary, memory.canary_weight))
    if memory.promoted is not None:
        wire["lastPromoted"] = {
            **_wire(memory.promoted.release),
            "generation": memory.promoted.generation,
            "time": moment(memory.promoted.time),
        }
    rollout = memory.rollout
    if rollout is not None:
        wire["rollout"] = {
            **_wire(rollout.release),
            "revision": rollout.revision,
            "attempt": rollout.attempt,
            "phase": rollout.phase.value,
            "step": rollout.step,
            "weight": rollout.weight,
            "startWeight": rollout.start_weight,
            "startedAt": moment(rollout.started_at),
            "stepStartedAt": moment(rollout.step_started_at),
            "reason": rollout.reason,
            "analysis": [
                {
                    "metric": tally.metric.value,
                    "value": tally.value,
                    "samples": tally.samples,
                    "failures": tally.failures,
                    "passed": tally.passed,
                }
                for tally in rollout.tallies
            ],
        }
    return wire


def _weight(memory: Memory) -> int:
    targets = memory.targets
    return targets[0][1] if targets else 0


def _channel(name: ChannelName, release: Release | None, weight: int) -> dict[str, Any]:
    wire: dict[str, Any] = {"name": name.value, "weight": weight}
    if release is not None:
        wire |= {f"active{key[0].upper()}{key[1:]}": value for key, value in _wire(release).items()}
    return wire


def _active(channel: ChannelStatus | None) -> Release | None:
    if channel is None or channel.active_version is None or channel.active_digest is None:
        return None
    return Release(
        channel.active_version,
        channel.active_digest,
        channel.active_source or "",
        channel.active_rank or 1,
        channel.active_secret_ref or "",
    )


def _wire(release: Release) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "version": release.version,
        "digest": release.digest,
        "source": release.source,
        "rank": release.rank,
    }
    return {**wire, "secretRef": release.secret_ref} if release.secret_ref else wire


def moment(seconds_: float) -> str:
    """A metav1.MicroTime."""
    return datetime.fromtimestamp(seconds_, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds(moment_: str) -> float:
    """Unix seconds of an RFC 3339 time; 0 for one that cannot be read."""
    try:
        then = datetime.fromisoformat(moment_)
    except ValueError:
        return 0.0
    return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp()


def shorten(text: str) -> str:
    return text if len(text) <= _MESSAGE else f"{text[: _MESSAGE - 3]}..."
