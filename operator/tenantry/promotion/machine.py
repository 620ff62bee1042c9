"""The promotion of one adapter: Verify -> Load -> Shift, step by step -> Promoted, or RolledBack, Paused, Stalled.

What has traffic changes only here. A version gets the first of it when every replica that gets traffic holds its bytes
by digest and has answered a smoke request; more of it on time and on data; all of it after the last step. Whatever goes
wrong, the last promoted version serves on. The state between two steps is `Memory`, which is the Adapter's status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tenantry.api.adapter import AdapterSpec, ChannelName, OnFailure, Phase

from . import analysis, canary
from .analysis import Window
from .asked import WITHDRAWN, declaration, fault_of, precedence, wanted
from .facts import Artifact, Candidate, Fault, Held, Release, ReplicaView
from .memory import Memory, Rollout, recall, revision

LOOK_SECONDS: Final = 5.0
"""How often a step looks at what gateways counted."""
AT_ONCE: Final = 0.05
"""Seconds until the next look when nothing has to be waited for."""
STARVED: Final = "InsufficientData"


@dataclass(frozen=True)
class Inputs:
    """Everything that one step depends on. `now` in Unix seconds, `generation` of the spec.

    `window`: what gateways counted of the rollout's release since the last measurement; None when not all of them
    told, or nobody was asked.
    """

    spec: AdapterSpec
    generation: int
    memory: Memory
    stable: Candidate
    canary: Candidate
    window: Window | None
    now: float


@dataclass(frozen=True)
class Decision:
    """`memory` is to be written; `declare` is what replicas must hold, what is served first.

    `stalled`: nothing happens until somebody edits or repairs something. `measured`: the window was used up.
    `again_in`: seconds after which time alone changes something, None for never.
    """

    phase: Phase
    memory: Memory
    desired: Release | None
    declare: tuple[Release, ...]
    reason: str
    message: str
    stalled: bool = False
    measured: bool = False
    again_in: float | None = None

    @property
    def active(self) -> Release | None:
        """What answers whatever nothing else does."""
        return self.memory.active


def step(inputs: Inputs) -> Decision:
    """One step. Called again with what has been seen since, until nothing changes."""
    return _Step(inputs).decide()


class _Step:
    """One step's decision. Every method returns what is decided; none changes anything."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.spec = inputs.spec
        self.rules = inputs.spec.rollout.analysis
        self.now = round(inputs.now, 6)
        self.desired = wanted(inputs.spec, ChannelName.STABLE)
        self.memory = replace(inputs.memory, known=_remember(inputs.spec, inputs.memory))

    def decide(self) -> Decision:
        objection = self.inputs.stable.objection
        if objection is not None and objection.reason in WITHDRAWN:
            nothing = replace(self.memory, active=None, canary=None, canary_weight=0, rollout=None)
            return self._say(nothing, Phase.STALLED, objection, stalled=True)
        fault = fault_of(self.spec, ChannelName.STABLE, self.memory, objection)
        if fault is not None or self.desired is None:
            assert fault is not None
            idle = self._with_canary(replace(self.memory, rollout=None))
            return self._say(idle, Phase.STALLED, fault, stalled=True)
        if self.desired.same(self.memory.active):
            return self._settled(self.desired)
        return self._roll(self.desired, self._attempt(self.desired))

    def _with_canary(self, memory: Memory) -> Memory:
        return canary.admit(self.spec, memory, self.inputs.canary)

    def _settled(self, desired: Release) -> Decision:
        """What is asked for is served. A rollout that ran until now is superseded: Git went back."""
        done = self.memory.rollout
        if done is not None and not (done.phase is Phase.PROMOTED and desired.same(done.release)):
            done = None
        # Where only the source was corrected this takes effect at once: the bytes are the same.
        memory = self._with_canary(replace(self.memory, active=desired, rollout=done))
        failed = self.inputs.stable.failed
        if failed is not None:
            return self._say(memory, Phase.STALLED, failed, stalled=True)
        trouble = canary.trouble(self.spec, memory, self.inputs.canary)
        if trouble is not None:
            return self._say(memory, Phase.PROMOTED, trouble[0], stalled=trouble[1])
        return self._say(memory, Phase.PROMOTED, Fault("Promoted", f"`{desired.version}` is served"))

    # another version than the one that is served

    def _attempt(self, desired: Release) -> Rollout:
        """The rollout that is under way for what the spec asks, or a new one, without traffic."""
        asked, before = revision(self.spec, desired), self.memory.rollout
        if (
            before is not None
            and before.phase is not Phase.PROMOTED
            and (before.revision == asked and desired.same(before.release))
        ):
            return replace(before, release=desired)
        last = max((failed.attempt for failed in self.memory.failed), default=0)
        return Rollout(
            revision=asked,
            attempt=max(last, before.attempt if before is not None else 0) + 1,
            phase=Phase.VERIFY,
            release=desired,
            started_at=self.now,
            step_started_at=self.now,
            start_weight=self.memory.canary_weight if desired.same(self.memory.canary) else 0,
        )

    def _roll(self, desired: Release, rollout: Rollout) -> Decision:
        memory = replace(self.memory, rollout=rollout)
        if memory.ended():
            last = memory.failed[-1]
            kept = memory if rollout.shifting else self._without(desired, memory)
            return self._say(kept, rollout.phase, Fault(last.reason, last.message), stalled=True)
        if rollout.phase is Phase.PAUSED and rollout.reason != STARVED and not self.spec.rollout.paused:
            # Let go by hand: the step, or loading, has its whole time again.
            rollout = replace(rollout, phase=Phase.LOAD, step_started_at=self.now, started_at=self.now)
        if rollout.weight:
            return self._shift(replace(memory, canary=None, canary_weight=0, rollout=rollout), rollout)
        return self._prepare(desired, self._as_canary(desired, memory, rollout), rollout)

    def _as_canary(self, desired: Release, memory: Memory, rollout: Rollout) -> Memory:
        """A version that is a canary keeps its weight until the shift begins, also when its channel is gone."""
        admitted = self._with_canary(memory)
        if (
            admitted.canary is None
            and rollout.start_weight
            and desired.same(memory.canary)
            and self.inputs.stable.failed is None
        ):
            return replace(memory, canary=desired, canary_weight=rollout.start_weight)
        return admitted

    def _prepare(self, desired: Release, memory: Memory, rollout: Rollout) -> Decision:
        """Verify and Load: no traffic yet, so whatever fails is tried on."""
        candidate, limit = self.inputs.stable, self.spec.rollout.progress_deadline_seconds
        fault = candidate.artifact.fault or candidate.failed
        if fault is not None:
            return self._progress(memory, rollout, Phase.STALLED, fault, stalled=True)
        if self.spec.rollout.paused:
            return self._hold(memory, rollout)
        if candidate.proven:
            if memory.active is None or self._was_served_lately(desired, memory.active):
                return self._promote(desired, memory, rollout)
            return self._next(memory, rollout, 0)
        age = self.now - rollout.started_at
        if age > limit:
            late = self._late(limit)
            late = replace(late, message=f"{late.message}; it is tried on")
            return self._progress(memory, rollout, Phase.STALLED, late, stalled=True)
        artifact = candidate.artifact
        if artifact.unproven or (
            artifact.verified is None and not any(v.held is Held.LOADED for v in candidate.on)
        ):
            why = Fault("Verifying", f"fetching `{desired.version}` and checking its digest")
            return self._progress(memory, rollout, Phase.VERIFY, why, again_in=limit - age)
        why = canary.loading(desired.version, candidate)
        return self._progress(memory, rollout, Phase.LOAD, why, again_in=limit - age)

    def _was_served_lately(self, desired: Release, active: Release) -> bool:
        """Whether this goes back to what answered everything a moment ago: then steps would tell nothing new."""
        window = self.spec.rollout.rollback_window_seconds
        older = precedence(desired.version) < precedence(active.version)
        return older and any(
            past.release.same(desired) and self.now - past.at <= window for past in self.memory.history
        )

    def _shift(self, memory: Memory, rollout: Rollout) -> Decision:
        """The release has a part of the traffic: more of it, none of it, or wait."""
        candidate, settings = self.inputs.stable, self.spec.rollout
        if candidate.failed is not None:
            return self._fail(memory, rollout, candidate.failed)
        tallies, measured = analysis.tallies(self.rules, rollout.tallies), False
        window = self.inputs.window
        if self.rules and window is not None and analysis.sufficient(self.rules, window):
            tallies, measured = analysis.measure(self.rules, tallies, window), True
        rollout = replace(rollout, tallies=tallies)
        bad = analysis.verdict(self.rules, tallies)
        if bad is not None:
            decision = self._fail(memory, rollout, Fault("AnalysisFailed", bad))
        elif settings.paused:
            decision = self._hold(memory, rollout)
        else:
            decision = self._advance(memory, rollout)
        return replace(decision, measured=measured)

    def _advance(self, memory: Memory, rollout: Rollout) -> Decision:
        """The next step, when this one's time is over, its analysis has passed and every replica serves on."""
        settings, candidate = self.spec.rollout, self.inputs.stable
        pause = settings.steps[rollout.step].pause_seconds
        age = max(0.0, self.now - rollout.step_started_at)
        late = age > pause + settings.progress_deadline_seconds
        if not candidate.proven:
            if late:
                return self._fail(memory, rollout, self._late(settings.progress_deadline_seconds))
            why = canary.loading(rollout.release.version, candidate)
            return self._progress(memory, rollout, Phase.SHIFT, why, again_in=LOOK_SECONDS)
        waiting = [tally.metric.value for tally in rollout.tallies if not tally.passed]
        if waiting and late:
            why = Fault(
                STARVED,
                f"`{rollout.release.version}` answers {rollout.weight} %, and too few requests came to measure "
                f"{', '.join(waiting)}: it goes on by itself when they come",
            )
            return self._progress(memory, rollout, Phase.PAUSED, why, stalled=True, again_in=LOOK_SECONDS)
        if age >= pause and not waiting:
            return self._next(memory, rollout, rollout.step + 1)
        why = self._shifting(rollout, f"; measuring {', '.join(waiting)}" if waiting else "")
        left = pause - age if age < pause else LOOK_SECONDS
        again_in = min(left, LOOK_SECONDS) if self.rules else left
        return self._progress(memory, rollout, Phase.SHIFT, why, again_in=max(AT_ONCE, again_in))

    def _next(self, memory: Memory, rollout: Rollout, index: int) -> Decision:
        """The first step from `index` on that takes nothing away; when there is none, all of the traffic."""
        steps = self.spec.rollout.steps
        while index < len(steps) and steps[index].weight < max(rollout.start_weight, rollout.weight):
            index += 1
        if index >= len(steps):
            return self._promote(rollout.release, memory, rollout)
        moved = replace(
            rollout,
            step=index,
            weight=steps[index].weight,
            step_started_at=self.now,
            tallies=tuple(replace(t, passed=False) for t in analysis.tallies(self.rules, rollout.tallies)),
        )
        memory = replace(memory, canary=None, canary_weight=0)
        return self._progress(memory, moved, Phase.SHIFT, self._shifting(moved), again_in=AT_ONCE)

    def _promote(self, desired: Release, memory: Memory, rollout: Rollout) -> Decision:
        promoted = memory.promote(desired, self.inputs.generation, self.now)
        done = replace(rollout, phase=Phase.PROMOTED, weight=100, reason="Promoted")
        memory = self._with_canary(replace(promoted, rollout=done))
        why = Fault("Promoted", f"`{desired.version}` is served")
        # A canary that is still on its way is told of in the next step.
        again_in = AT_ONCE if self.spec.channel(ChannelName.CANARY) is not None else None
        return self._say(memory, Phase.PROMOTED, why, again_in=again_in)

    def _fail(self, memory: Memory, rollout: Rollout, why: Fault) -> Decision:
        """It had traffic: now none of it, or (`Pause`) what it has, until the spec changes."""
        pause = self.spec.rollout.on_failure is OnFailure.PAUSE
        phase = Phase.PAUSED if pause else Phase.ROLLED_BACK
        ended = replace(rollout, phase=phase, weight=rollout.weight if pause else 0, reason=why.reason)
        memory = replace(memory, rollout=ended).fail(why.reason, why.message, self.now)
        return self._say(memory, phase, why, stalled=True)

    def _hold(self, memory: Memory, rollout: Rollout) -> Decision:
        why = Fault(
            "PausedByHand",
            f"`{rollout.release.version}` answers {rollout.weight} % as long as `rollout.paused` is true",
        )
        return self._progress(memory, rollout, Phase.PAUSED, why)

    def _without(self, desired: Release, memory: Memory) -> Memory:
        """A version that was rolled back is no canary either."""
        if desired.same(wanted(self.spec, ChannelName.CANARY)):
            return replace(memory, canary=None, canary_weight=0)
        return self._with_canary(memory)

    # words

    def _shifting(self, rollout: Rollout, more: str = "") -> Fault:
        return Fault(
            "Shifting",
            f"`{rollout.release.version}` answers {rollout.weight} % "
            f"(step {rollout.step + 1} of {len(self.spec.rollout.steps)}){more}",
        )

    def _late(self, limit: int) -> Fault:
        ready = self.inputs.stable.ready
        waiting = [view for view in ready if not view.proven]
        if not ready:
            what = "no replica of the tenant is ready"
        else:
            said = ", ".join(
                f"`{view.name}` {'gave no answer' if view.held is Held.LOADED else view.held.value}"
                for view in waiting[:5]
            )
            what = f"{len(waiting)} of {len(ready)} ready replicas do not serve it ({said})"
        return Fault("ProgressDeadlineExceeded", f"not loaded within {limit} s: {what}")

    def _progress(
        self,
        memory: Memory,
        rollout: Rollout,
        phase: Phase,
        why: Fault,
        *,
        stalled: bool = False,
        again_in: float | None = None,
    ) -> Decision:
        memory = replace(memory, rollout=replace(rollout, phase=phase, reason=why.reason))
        return self._say(memory, phase, why, stalled=stalled, again_in=again_in)

    def _say(
        self,
        memory: Memory,
        phase: Phase,
        why: Fault,
        *,
        stalled: bool = False,
        again_in: float | None = None,
    ) -> Decision:
        declare = declaration(self.spec, memory, self.inputs.stable.objection, self.inputs.canary.objection)
        return Decision(
            phase=phase,
            memory=memory,
            desired=self.desired,
            declare=declare,
            reason=why.reason,
            message=why.message,
            stalled=stalled,
            again_in=again_in,
        )


def _remember(spec: AdapterSpec, memory: Memory) -> Mapping[str, str]:
    """Digests of versions still listed or served, as first seen: the schema cannot see a changed one."""
    known = {version.version: memory.known.get(version.version, version.digest) for version in spec.versions}
    known |= {release.version: release.digest for release, _ in memory.targets}
    return dict(sorted(known.items()))


__all__ = [
    "Artifact",
    "Candidate",
    "Decision",
    "Fault",
    "Held",
    "Inputs",
    "Memory",
    "Phase",
    "Release",
    "ReplicaView",
    "Window",
    "declaration",
    "recall",
    "step",
    "wanted",
]
