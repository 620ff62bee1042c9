"""Adapter: verified, loaded on every replica of its tenant, then active; or why not, while the old version serves."""

from __future__ import annotations

from dataclasses import dataclass

from tenantry.api import AdapterSpec, AdapterStatus
from tenantry.cluster import Key, Obj, find_condition, uid_of
from tenantry.desired.conditions import Verdict, no, not_ready, progress, settled, stall, unknown, wire, yes
from tenantry.desired.problems import SpecError
from tenantry.engines import ArtifactState, EngineError, SignatureReport
from tenantry.promotion import machine
from tenantry.promotion.machine import Artifact, Decision, Fault, Held, Phase, Release, ReplicaView
from tenantry.runtime.controller import DONE, Context, Result

from . import bindings, pods
from .clock import seconds_since
from .world import Pool, World

PULLING_SECONDS = 1.0
RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class _Attempt:
    """Since when (on the world's clock) a version is asked for."""

    version: tuple[str, str, str]
    since: float


class AdapterReconciler:
    def __init__(self, world: World) -> None:
        self.world = world
        self._attempts: dict[Key, _Attempt] = {}

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        adapter = self.world.adapter(key)
        if adapter is None:
            self._attempts.pop(key, None)
            self.world.forget_spec("Adapter", key)
            return DONE
        try:
            spec = self.world.adapter_spec(adapter)
        except SpecError as error:
            await ctx.set_status(adapter, _invalid(adapter, str(error)))
            return DONE
        active, known = machine.resume(AdapterStatus.model_validate(adapter.get("status") or {}))
        desired = machine.desired_release(spec)
        objection = bindings.objection(self.world, key, spec)
        targets = self._targets(key, spec)
        if any(self._unseen(pool, replica) for pool, replica in targets):
            return Result(1.0)  # asked within seconds; judging before that would only flap
        elapsed = self._elapsed(key, adapter, desired)
        artifact = Artifact()
        wait = RETRY_SECONDS
        if desired is not None and objection is None:
            artifact, wait = await self._artifact(key, spec, desired, active, targets)
            objection = bindings.objection(self.world, key, spec)  # the bytes may have told something
        inputs = machine.Inputs(
            spec=spec,
            active=active,
            known=known,
            objection=objection,
            artifact=artifact,
            desired_on=self._views(key, desired, targets),
            elapsed=elapsed,
        )
        decision = machine.step(inputs)
        status = self._status(
            adapter, decision, artifact, self._views(key, decision.active, targets), targets
        )
        written = await ctx.set_status(adapter, status)
        if written:
            self._announce(ctx, adapter, active, decision)
            self.world.wake_replicas(Key(pool.name, replica) for pool, replica in targets)
        if decision.phase is Phase.PROMOTED:
            return Result(wait) if spec.verification is not None and not artifact.verified else DONE
        left = spec.rollout.progress_deadline_seconds - elapsed
        return Result(max(0.5, min(wait, left if left > 0 else wait)))

    # what is there

    def _targets(self, key: Key, spec: AdapterSpec) -> list[tuple[Pool, str]]:
        """Every replica that serves a model which the adapter answers, now or as soon as it can."""
        tenant = self.world.tenant(spec.tenant_ref)
        if tenant is None:
            return []
        try:
            tenant_spec = self.world.tenant_spec(tenant)
        except SpecError:
            return []
        targets = []
        for pool in bindings.pools_of(self.world, spec.tenant_ref, tenant_spec, key):
            if pool.spec.lora is None:
                continue
            existing = set(self.world.replicas(pool))
            placed = self.world.placements.get(spec.tenant_ref).pools.get(pool.name)
            serving = set(placed.replicas) if placed is not None else set()
            serving |= {
                r for r in existing if spec.tenant_ref in self.world.links.routed_to(Key(pool.name, r))
            }
            targets += [(pool, replica) for replica in sorted(serving & existing)]
        return targets

    def _unseen(self, pool: Pool, replica: str) -> bool:
        pod = self.world.pod(pool, replica)
        if pod is None or not pods.is_ready(pod) or self.world.driver is None:
            return False
        return self.world.observations.get(Key(pool.name, replica), pods.incarnation(pod)) is None

    def _views(self, key: Key, release: Release | None, targets: list[tuple[Pool, str]]) -> list[ReplicaView]:
        if release is None:
            return []
        name = bindings.served(key, release)
        return [self._view(pool, replica, name, release.digest) for pool, replica in targets]

    def _view(self, pool: Pool, replica: str, name: str, digest: str) -> ReplicaView:
        pod = self.world.pod(pool, replica)
        ready = pod is not None and pods.is_ready(pod)
        process = pods.incarnation(pod) if pod is not None else None
        seen = self.world.observations.get(Key(pool.name, replica), process) if process is not None else None
        held, fault = seen.held(name, digest) if seen is not None else (Held.UNKNOWN, None)
        return ReplicaView(replica, ready, held, fault)

    def _elapsed(self, key: Key, adapter: Obj, desired: Release | None) -> float:
        """Seconds since this version is asked for; after a restart, as long as the status says."""
        now = self.world.clock()
        if desired is None:
            return 0.0
        version = (uid_of(adapter), desired.version, desired.digest)
        attempt = self._attempts.get(key)
        if attempt is None or attempt.version != version:
            since = now
            stored = ((adapter.get("status") or {}).get("channels") or [{}])[0].get("desiredVersion")
            running = find_condition(adapter, "Reconciling")
            if (
                attempt is None
                and stored == desired.version
                and running is not None
                and running["status"] == "True"
            ):
                since = now - seconds_since(running["lastTransitionTime"])
            attempt = self._attempts[key] = _Attempt(version, since)
        return now - attempt.since

    async def _artifact(
        self,
        key: Key,
        spec: AdapterSpec,
        desired: Release,
        active: Release | None,
        targets: list[tuple[Pool, str]],
    ) -> tuple[Artifact, float]:
        """What is known of the bytes, and after how many seconds to ask again."""
        loaded = any(view.held is Held.LOADED for view in self._views(key, desired, targets))
        served = active is not None and (active.version, active.digest) == (desired.version, desired.digest)
        if spec.verification is None and (loaded or served):
            return Artifact(True), RETRY_SECONDS
        if self.world.fetcher is None:
            return Artifact(None), RETRY_SECONDS
        pull = bindings.pull(key, spec, desired)
        transfer = self.world.observations.artifact(pull)
        if transfer is None or transfer.artifact.state is not ArtifactState.VERIFIED:
            try:
                transfer = await self.world.fetcher.transfer(pull)
            except EngineError:
                return Artifact(None), PULLING_SECONDS * 5
            self.world.observations.put_artifact(pull, transfer)
        report = transfer.artifact
        if report.state is ArtifactState.VERIFIED:
            return _as_signed(report.signature), RETRY_SECONDS
        if report.state is ArtifactState.FAILED:
            return Artifact(False, Fault(report.reason or "SourceUnavailable", report.message)), RETRY_SECONDS
        return Artifact(None), PULLING_SECONDS

    # what is said

    def _status(
        self,
        adapter: Obj,
        decision: Decision,
        artifact: Artifact,
        active_on: list[ReplicaView],
        targets: list[tuple[Pool, str]],
    ) -> Obj:
        active = decision.active
        channel: Obj = {
            "name": "stable",
            "desiredVersion": decision.desired.version
            if decision.desired
            else adapter["spec"]["channels"][0]["version"],
            "replicasLoaded": decision.loaded,
            "replicas": decision.replicas,
        }
        if active is not None:
            channel |= {
                "activeVersion": active.version,
                "activeDigest": active.digest,
                "activeSource": active.source,
                "activeRank": active.rank,
                **({"activeSecretRef": active.secret_ref} if active.secret_ref else {}),
            }
        verdicts = [
            *_summary(decision, bool(targets)),
            _verified(decision, artifact),
            _loaded(decision),
            _ready(adapter, decision, active_on, bool(targets)),
        ]
        known = [{"version": version, "digest": digest} for version, digest in decision.known.items()]
        return {"channels": [channel], "known": known, "conditions": wire(verdicts)}

    def _announce(self, ctx: Context, adapter: Obj, before: Release | None, decision: Decision) -> None:
        after = decision.active
        if after is not None and after != before:
            note = f"`{after.version}` ({after.digest}) is active on {decision.replicas} replicas"
            ctx.recorder.event(adapter, "Promoted", note, action="Promote")
        elif decision.phase is Phase.STALLED:
            ctx.recorder.event(adapter, decision.reason, decision.message, action="Promote", type="Warning")


def _as_signed(signature: SignatureReport | None) -> Artifact:
    """Verified bytes, with what was found of the signature that was asked for."""
    if signature is None:
        return Artifact(True)
    if signature.verified:
        return Artifact(True, signature=signature.message)
    return Artifact(True, unsigned=Fault(signature.reason, signature.message))


def _summary(decision: Decision, placed: bool) -> tuple[Verdict, Verdict]:
    if decision.phase is Phase.STALLED:
        return stall(decision.reason, decision.message)
    if decision.phase is Phase.PROMOTED:
        return settled()
    if not placed:
        return progress(
            "NotPlaced", "no model of the tenant that this adapter answers is placed on a pool yet"
        )
    return progress(decision.reason, decision.message)


def _verified(decision: Decision, artifact: Artifact) -> Verdict:
    kind = "ArtifactsVerified"
    if artifact.unsigned is not None:
        message = (
            f"the bytes have the digest of the spec, but are not signed as asked: {artifact.unsigned.message}"
        )
        return yes(kind, artifact.unsigned.reason, message)
    if artifact.verified and artifact.signature:
        message = f"the bytes have the digest of the spec, signed by {artifact.signature}"
        return yes(kind, "SignatureVerified", message)
    if artifact.verified:
        return yes(kind, "DigestMatches", "the bytes have the digest of the spec")
    if artifact.fault is not None:
        return no(kind, artifact.fault.reason, artifact.fault.message)
    return unknown(
        kind, "Pending" if decision.phase is not Phase.STALLED else decision.reason, "not fetched yet"
    )


def _loaded(decision: Decision) -> Verdict:
    message = f"{decision.loaded} of {decision.replicas} replicas hold the desired version"
    if decision.replicas and decision.loaded == decision.replicas:
        return yes("Loaded", "OnEveryReplica", message)
    return no("Loaded", "NoReplicas" if not decision.replicas else "Incomplete", message)


def _ready(adapter: Obj, decision: Decision, active_on: list[ReplicaView], placed: bool) -> Verdict:
    serving = sum(view.ready and view.held is Held.LOADED for view in active_on)
    stored = adapter.get("status") or {}
    if decision.active is None:
        on_its_way = decision.phase is not Phase.STALLED
        return not_ready(stored, decision.reason, decision.message, provisioning=on_its_way)
    if serving:
        return yes("Ready", "Serving", f"`{decision.active.version}` is served")
    reason = "NoReplicaReady" if placed else "NotPlaced"
    return not_ready(
        stored, reason, f"no ready replica holds `{decision.active.version}`", provisioning=False
    )


def _invalid(adapter: Obj, message: str) -> Obj:
    """The stored status with the verdict: what is active serves on."""
    stored = adapter.get("status") or {}
    verdicts = [
        *stall("InvalidSpec", message),
        not_ready(stored, "InvalidSpec", message, provisioning=False),
    ]
    kept = {name: stored[name] for name in ("channels", "known") if name in stored}
    return {**kept, "conditions": wire(verdicts)}
