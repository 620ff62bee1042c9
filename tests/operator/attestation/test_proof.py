"""What follows from a gate that was heard, or not: leases are used to their end, but never beyond it."""

from __future__ import annotations

from tenantry.attestation.proof import GateState, Proof, missed, opened

NOW = 1000.0
NEW = Proof("u", "n", GateState.WAITING)


def test_an_open_gate_is_asked_again_at_half() -> None:
    proof = opened("u", "n", NOW + 100, NOW + 1000, NOW)
    assert (proof.state, proof.due, proof.closed) == (GateState.OPEN, NOW + 50, False)
    assert opened("u", "n", None, NOW + 60, NOW).due == NOW + 30


def test_an_outage_ends_nobody_before_the_lease_does() -> None:
    proof = opened("u", "n", NOW + 100, NOW + 1000, NOW)
    later = missed(proof, "VerifierUnavailable", "", judged=False, now=NOW + 99)
    assert later.state is GateState.OPEN
    assert missed(later, "VerifierUnavailable", "", judged=False, now=NOW + 100).state is GateState.STALE


def test_a_gate_that_never_opened_waits_for_a_verdict() -> None:
    waiting = missed(NEW, "VerifierUnavailable", "", judged=False, now=NOW)
    assert (waiting.state, waiting.closed) == (GateState.WAITING, False)
    assert missed(waiting, "BadSignature", "", judged=True, now=NOW).state is GateState.FAILED


def test_other_measurements_close_it_at_once_other_faults_at_its_end() -> None:
    proof = opened("u", "n", NOW + 100, NOW + 1000, NOW)
    assert missed(proof, "OtherMeasurements", "", judged=True, now=NOW + 1).state is GateState.FAILED
    assert missed(proof, "VerifierRefused", "", judged=True, now=NOW + 1).state is GateState.FAILED
    kept = missed(proof, "BadSignature", "", judged=True, now=NOW + 1)
    assert kept.state is GateState.OPEN
    assert missed(kept, "BadSignature", "", judged=True, now=NOW + 101).state is GateState.FAILED
