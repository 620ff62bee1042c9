"""What follows from a gate that was heard, or not: leases are used to their end, but never beyond it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tenantry.attestation.proof import GateState, Proof, missed, opened
from tenantry.controllers.gates import attested

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


def test_nodes_count_as_proven_while_every_gate_has_a_lease_that_lasts() -> None:
    proof = opened("u", "n", NOW + 100, NOW + 1000, NOW)
    found = attested([proof, replace(proof, node="m")], 2, NOW + 99)
    assert (found.holds, found.at) == (True, NOW + 99)
    assert found.facts[1].startswith("node m: Open, proven until 1970-01-01T00:18:20Z")


@pytest.mark.parametrize(
    ("proofs", "pods", "holds"),
    [
        ([], 0, None),
        ([opened("u", "n", NOW + 100, NOW + 1000, NOW)], 2, None),
        ([opened("u", "n", NOW, NOW + 1000, NOW)], 1, None),
        ([opened("u", "n", None, NOW + 1000, NOW)], 1, None),
        ([opened("u", "n", NOW + 100, NOW + 1000, NOW), NEW], 2, None),
        ([opened("u", "n", NOW + 100, NOW + 1000, NOW), replace(NEW, state=GateState.STALE)], 2, False),
        ([replace(NEW, state=GateState.FAILED)], 1, False),
    ],
)
def test_nothing_less_counts(proofs: list[Proof], pods: int, holds: bool | None) -> None:
    assert attested(proofs, pods, NOW).holds is holds
