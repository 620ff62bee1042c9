"""Opens the gates of a tenant's pods: carries their questions to the verifier, signs their certificates, and leaves
nodes that prove nothing or the wrong thing.

A node is left by a cordon of ours, which says why, and by deleting the tenant's pods there. What was proven too long
ago is tried again by itself; a node that proved something else stays cordoned until somebody lifts the cordon by hand.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as wire_dataclass

from tenantry.api import OperatorConfig, TenantSpec, names
from tenantry.attestation.authority import AuthorityError, key_hash, requested_key, utc
from tenantry.attestation.policy import GatePolicy
from tenantry.attestation.proof import FAILED_REASON, STALE_REASON, GateState, Proof, missed, opened
from tenantry.attestation.token import VERDICTS, AttestationError, Question, joint_nonce, verify
from tenantry.attestation.trust import Trust
from tenantry.attestation.verifier import VerifierClient, VerifierRefusal, VerifierUnavailable
from tenantry.cluster import NODE, POD, Key, Obj, is_deleting, key_of, uid_of
from tenantry.desired import gate, nodes
from tenantry.desired.isolation import GUARANTEES
from tenantry.engines import EngineError
from tenantry.engines.base import WIRE
from tenantry.engines.http import call
from tenantry.evidence.findings import Finding, clock
from tenantry.runtime.controller import Context

from . import pods
from .certificates import Certificates
from .claims import subject_of
from .world import Pool, World

CHALLENGE_PATH = "/v1/challenge"
ANSWER_PATH = "/v1/answer"
STALE_RETRY_SECONDS = 30.0
"""After leaving a node for want of fresh proof: how long until it is tried again."""

T = TypeVar("T")


@wire_dataclass(frozen=True, config=WIRE)
class _Challenge:
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    boot_id: Annotated[str, Field(min_length=1, max_length=64)]
    request: str
    evidence: str = ""
    expires_at: float | None = None


@wire_dataclass(frozen=True, config=WIRE)
class _Opened:
    expires_at: float | None = None


_CHALLENGE: TypeAdapter[_Challenge] = TypeAdapter(_Challenge)
_OPENED: TypeAdapter[_Opened] = TypeAdapter(_Opened)


@dataclass(frozen=True)
class Gated:
    """What a tenant's status says of its gates: `halted` (reason, message) waits for a person or for a verifier,
    `waiting` is on its way, `after` seconds something is due again."""

    halted: tuple[str, str] | None = None
    waiting: str | None = None
    after: float | None = None


NOT_GATED = Gated()


@dataclass(frozen=True)
class _Visit:
    """One pod's gate and by what it is judged. `service` names the verifier; both None: a certificate is all."""

    pool: Pool
    replica: str
    pod: Obj
    policy: GatePolicy | None
    service: str | None
    trust: Trust

    @property
    def node(self) -> str:
        return str(self.pod.get("spec", {}).get("nodeName") or "")


class Gates:
    """All gates of all tenants; `world.proofs` holds what is known of each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.certificates = Certificates(world)
        self._verifiers: dict[str, VerifierClient] = {}
        self._retry: dict[str, float] = {}
        self._visits: dict[Key, asyncio.Task[None]] = {}

    async def tend(self, tenant: Obj, spec: TenantSpec, ctx: Context) -> Gated:
        """Ask where something is due, leave nodes that must be left, and say where it all stands."""
        if not gate.is_secured(spec):
            return NOT_GATED
        missing = await self.certificates.tend(ctx)
        trust = self.world.setup.trust
        pool = self.world.pool(names.dedicated_pool(tenant["metadata"]["name"]))
        if missing is not None or trust is None or pool is None:
            return Gated(waiting=missing or "the pool is being made", after=5.0)
        policy = gate.policy_of(spec, ctx.config)
        service = spec.isolation.attestation.verifier_ref if spec.isolation.attestation else None
        found = {replica: self.world.pod(pool, replica) for replica in self.world.replicas(pool)}
        present = {replica: pod for replica, pod in found.items() if pod is not None and not is_deleting(pod)}
        self._forget(pool, set(present))
        proofs = []
        for replica, pod in present.items():
            if pods.address(pod):
                visit = _Visit(pool, replica, pod, policy, service, trust)
                proofs.append(proof := self._heard(visit, ctx.config))
                if proof.closed:
                    await self._leave(tenant, pod, proof, ctx)
        gated = await self._gated(tenant, proofs, len(present) - len(proofs), ctx)
        if policy is None or spec.tier not in GUARANTEES["AttestedNodes"]:
            return gated
        finding = attested(proofs, len(present), self.world.wall_clock())
        subject = subject_of(tenant["metadata"]["name"])
        self.world.evidence.record(subject, "AttestedNodes", "verifier", finding)
        again = self.world.evidence.max_age / 2  # a lease may last longer than a look counts
        return replace(gated, after=again if gated.after is None else min(again, gated.after))

    # one pod

    def _heard(self, visit: _Visit, config: OperatorConfig) -> Proof:
        """What is known of the gate now; asked anew beside the reconcile where that is due, and the tenant woken then.

        A verifier may take its time: no worker waits for it.
        """
        key = Key(visit.pool.name, visit.replica)
        before = self.world.proofs.get(key)
        if before is None or before.pod_uid != uid_of(visit.pod):
            before = Proof(uid_of(visit.pod), visit.node, GateState.WAITING)
        if before.due <= self.world.wall_clock() and key not in self._visits:
            task = asyncio.create_task(self._visit(visit, before, config))
            self._visits[key] = task
            task.add_done_callback(lambda _: self._over(key, visit.pool.tenant))
        return before

    def _over(self, key: Key, tenant: str | None) -> None:
        self._visits.pop(key, None)
        if tenant is not None:
            self.world.wake_tenants([tenant])

    async def _visit(self, visit: _Visit, before: Proof, config: OperatorConfig) -> None:
        service, now = visit.service, self.world.wall_clock()
        try:
            proof = await self._exchange(visit, config)
        except VerifierUnavailable as error:
            proof = missed(
                before, "VerifierUnavailable", f"verifier `{service}`: {error}", judged=False, now=now
            )
        except VerifierRefusal as error:
            text = f"verifier `{service}` refuses the evidence: {error}"
            proof = missed(before, "VerifierRefused", text, judged=True, now=now)
        except AttestationError as error:
            proof = missed(before, error.code, str(error), judged=True, now=now)
        except AuthorityError as error:
            proof = missed(before, "NoCertificate", str(error), judged=False, now=now)
        except EngineError as error:
            proof = missed(before, error.code, error.cause, judged=error.code in VERDICTS, now=now)
        self.world.proofs[Key(visit.pool.name, visit.replica)] = proof

    async def _exchange(self, visit: _Visit, config: OperatorConfig) -> Proof:
        """Question, verdict, answer. Raises EngineError, Verifier..., AttestationError, AuthorityError."""
        own, pool = secrets.token_hex(32), visit.pool
        asked_at = self.world.wall_clock()
        challenge = await self._call(visit, CHALLENGE_PATH, {"nonce": own}, _CHALLENGE)
        key = requested_key(challenge.request)
        token = ""
        if visit.policy is not None and visit.service is not None:
            nonce = joint_nonce(own, challenge.nonce)
            question = Question(nonce, challenge.boot_id, key_hash(key), asked_at)
            token = await self._verifier(visit.service, config).appraise(question, _bytes(challenge.evidence))
            verify(token, visit.policy, question, self.world.wall_clock())
        now, seconds = self.world.wall_clock(), config.certificate_seconds
        authority, name = visit.trust.authority, names.tls_name(pool.uid)
        certificate = authority.issue(key, name, client=False, seconds=seconds, now=utc(now))
        answer = {"token": token, "certificate": certificate, "authority": authority.pem}
        done = await self._call(visit, ANSWER_PATH, answer, _OPENED)
        return opened(uid_of(visit.pod), visit.node, done.expires_at, now + seconds, now)

    async def _call(self, visit: _Visit, path: str, payload: object, answer: TypeAdapter[T]) -> T:
        signer = self.world.setup.signer
        assert signer is not None
        pool = visit.pool
        return await call(
            self.world.http,
            signer,
            method="POST",
            base=self.world.gate(pool, visit.replica, str(pods.address(visit.pod))),
            path=path,
            audience=pool.uid,
            peer=f"{pool.namespace}/{visit.replica}",
            answer=answer,
            payload=payload,
        )

    def _verifier(self, name: str, config: OperatorConfig) -> VerifierClient:
        if name not in self._verifiers:
            self._verifiers[name] = VerifierClient(config.verifiers[name])
        return self._verifiers[name]

    def _forget(self, pool: Pool, present: set[str]) -> None:
        for key in [k for k in self.world.proofs if k.namespace == pool.name and k.name not in present]:
            del self.world.proofs[key]

    # leaving a node, and coming back to it

    async def _leave(self, tenant: Obj, pod: Obj, proof: Proof, ctx: Context) -> None:
        """First no new pods there, then none of this tenant's."""
        reason = _reason(proof)
        node = self.world.store.get(NODE, Key("", proof.node))
        held = node is not None and nodes.holds(node, tenant["metadata"]["name"], uid_of(tenant))
        if node is not None and held and not node.get("spec", {}).get("unschedulable"):
            why = f"{reason}: {proof.code}: {proof.message}"[:512]
            await self._patch(node, nodes.cordon_patch(why), ctx)
            self._retry[proof.node] = self.world.clock() + STALE_RETRY_SECONDS
            ctx.recorder.event(
                tenant, reason, f"node `{proof.node}`: {proof.message}", action="Cordon", type="Warning"
            )
        await ctx.client.delete(POD, key_of(pod), uid=uid_of(pod))

    async def _gated(self, tenant: Obj, proofs: list[Proof], without_address: int, ctx: Context) -> Gated:
        name, uid = tenant["metadata"]["name"], uid_of(tenant)
        now, clock = self.world.wall_clock(), self.world.clock()
        halted: list[tuple[str, str]] = []
        waits = [max(0.5, proof.due - now) for proof in proofs if proof.due > now]
        for node in [node for node in self.world.store.list(NODE) if nodes.holds(node, name, uid)]:
            where = node["metadata"]["name"]
            why = nodes.cordoned_by_us(node)
            if why is None:
                if nodes.CORDON_ANNOTATION in node["metadata"].get("annotations", {}):
                    await self._patch(node, nodes.uncordon_patch(), ctx)  # somebody lifted the cordon
                continue
            reason, _, text = why.partition(": ")
            if reason == STALE_REASON:
                left = self._retry.setdefault(where, clock + STALE_RETRY_SECONDS) - clock
                if left <= 0:
                    self._retry.pop(where, None)
                    await self._patch(node, nodes.uncordon_patch(), ctx)
                waits.append(max(0.5, left))
                halted.append((reason, f"node `{where}`: {text}; it is tried again"))
            else:
                remedy = f"after a check of the node: kubectl uncordon {where}"
                halted.append((FAILED_REASON, f"node `{where}`: {text}; {remedy}"))
        if not halted:
            halted = [
                (_reason(proof), f"node `{proof.node}`: {proof.message}") for proof in proofs if proof.closed
            ]
        waiting = [proof for proof in proofs if proof.state is GateState.WAITING]
        if without_address:
            waits.append(2.0)
        text = "; ".join(sorted({proof.message or "the gate has not opened yet" for proof in waiting}))
        return Gated(min(halted) if halted else None, text or None, min(waits, default=None))

    async def _patch(self, node: Obj, patch: Obj, ctx: Context) -> None:
        meta = node["metadata"]
        await ctx.client.merge_patch(
            NODE, Key("", meta["name"]), patch, uid=uid_of(node), version=meta["resourceVersion"]
        )


def attested(proofs: Sequence[Proof], pods: int, now: float) -> Finding:
    """What the gates of all `pods` of a tenant say together at `now` (Unix seconds)."""
    facts = tuple(
        f"node {proof.node}: {proof.state.value}"
        + (f", proven until {clock(proof.until)}" if proof.until else "")
        for proof in proofs
    )
    closed = [proof for proof in proofs if proof.closed]
    if closed:
        return Finding(False, f"node `{closed[0].node}` does not prove what it runs", now, facts)
    lasting = [proof for proof in proofs if proof.state is GateState.OPEN and (proof.until or 0.0) > now]
    if not proofs or len(lasting) < pods:
        return Finding(None, "not every gate has opened", now, facts)
    return Finding(True, "every node of the tenant's engines proved what it runs", now, facts)


def _reason(proof: Proof) -> str:
    return STALE_REASON if proof.state is GateState.STALE else FAILED_REASON


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise AttestationError("Malformed", "the gate's evidence must be base64") from error
