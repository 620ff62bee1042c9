"""The gate against a verifier that lies in every way: nothing opens it but fresh proof about this very boot."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key as rsa_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from support.trust import AUDIENCE, Pod
from support.verifier import LIES, Verifier
from tenantry.api import names
from tenantry.api.identity import Signer
from tenantry.attestation.authority import Authority, key_hash, requested_key, utc
from tenantry.attestation.door import ANSWER_PATH, CHALLENGE_PATH
from tenantry.attestation.gate import Gate, is_open, lease
from tenantry.attestation.policy import GatePolicy
from tenantry.attestation.token import AttestationError, Question, joint_nonce, load_key, verify
from tenantry.attestation.verifier import VerifierClient, VerifierRefusal, VerifierUnavailable

NONCE = "5" * 64


async def ask(pod: Pod) -> tuple[Question, dict[str, str]]:
    """What the operator does first."""
    asked = time.time()
    answer = await pod.post(CHALLENGE_PATH, json.dumps({"nonce": NONCE}).encode())
    assert answer.status_code == 200, answer.text
    found = answer.json()
    key = key_hash(requested_key(found["request"]))
    return Question(joint_nonce(NONCE, found["nonce"]), found["bootId"], key, asked), found


async def reply(pod: Pod, authority: Authority, token: str, request: str) -> tuple[int, dict[str, object]]:
    """What it does last."""
    certificate = authority.issue(
        requested_key(request), names.tls_name(AUDIENCE), client=False, seconds=600, now=utc(time.time())
    )
    body = {"token": token, "certificate": certificate, "authority": authority.pem}
    answer = await pod.post(ANSWER_PATH, json.dumps(body).encode())
    return answer.status_code, answer.json()


def shut(pod: Pod) -> bool:
    """Nothing is there that an engine would start from."""
    return lease(pod.folder) is None and not is_open(pod.folder, True, time.time())


async def test_proof_opens_it_and_its_age_bounds_the_lease(
    pod: Pod, authority: Authority, service: VerifierClient, verifier: Verifier
) -> None:
    assert shut(pod)
    question, found = await ask(pod)
    status, said = await reply(pod, authority, await service.appraise(question, b""), found["request"])
    assert status == 200, said
    until = lease(pod.folder)
    assert until == said["expiresAt"]
    assert 290 < until - time.time() <= 300, "`maxAgeSeconds`, which is less than the token's own end"
    assert is_open(pod.folder, True, time.time())
    assert not is_open(pod.folder, True, until + 1)
    verifier.seconds = 60
    question, found = await ask(pod)
    assert found["expiresAt"] == until
    await reply(pod, authority, await service.appraise(question, b""), found["request"])
    assert (lease(pod.folder) or 0) < until, "a token that ends sooner is believed"


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_opens_nothing_neither_at_the_gate_nor_for_the_operator(
    lie: str, pod: Pod, authority: Authority, service: VerifierClient, verifier: Verifier, policy: GatePolicy
) -> None:
    if lie == "replay":
        question, found = await ask(pod)
        await service.appraise(question, b"")  # a good token, kept for later
    verifier.lie = lie
    question, found = await ask(pod)
    token = await service.appraise(question, b"")
    with pytest.raises(AttestationError) as refusal:
        verify(token, policy, question, time.time())
    assert refusal.value.code == LIES[lie]
    assert token not in str(refusal.value)
    status, said = await reply(pod, authority, token, found["request"])
    assert status in (400, 403, 413)
    if lie != "huge":
        assert said["error"]["code"] == LIES[lie]  # type: ignore[index]
    assert shut(pod)


async def test_a_token_answers_one_question_once(
    pod: Pod, authority: Authority, service: VerifierClient
) -> None:
    question, found = await ask(pod)
    token = await service.appraise(question, b"")
    assert (await reply(pod, authority, token, found["request"]))[0] == 200
    (pod.folder / "lease").unlink()
    status, said = await reply(pod, authority, token, found["request"])
    assert (status, said["error"]["code"]) == (409, "NotAsked")  # type: ignore[index]
    question, found = await ask(pod)
    newer = await service.appraise(question, b"")
    await ask(pod)  # asked again meanwhile: the answer to the question before counts no more
    status, said = await reply(pod, authority, newer, found["request"])
    assert said["error"]["code"] == "WrongNonce"  # type: ignore[index]
    assert shut(pod)


async def test_only_the_operator_is_heard(pod: Pod) -> None:
    body = json.dumps({"nonce": NONCE}).encode()
    assert (await pod.http.post(CHALLENGE_PATH, content=body)).status_code == 401
    stranger = Signer(names.OPERATOR_ISSUER, Ed25519PrivateKey.generate())
    assert (await pod.post(CHALLENGE_PATH, body, stranger)).status_code == 401
    token = pod.signer.sign("another-pool", CHALLENGE_PATH, body)
    headers = {"authorization": f"Bearer {token}"}
    assert (await pod.http.post(CHALLENGE_PATH, content=body, headers=headers)).status_code == 401
    token = pod.signer.sign(AUDIENCE, CHALLENGE_PATH, b"{}")
    headers = {"authorization": f"Bearer {token}"}
    assert (await pod.http.post(CHALLENGE_PATH, content=body, headers=headers)).status_code == 401
    assert (await pod.post(CHALLENGE_PATH, b'{"nonce": "short"}')).status_code == 400


async def test_a_certificate_for_another_key_is_not_taken(
    pod: Pod, authority: Authority, service: VerifierClient, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    foreign = Gate(elsewhere, None).request()
    question, _ = await ask(pod)
    status, said = await reply(pod, authority, await service.appraise(question, b""), foreign)
    assert (status, said["error"]["code"]) == (400, "BadCertificate")  # type: ignore[index]
    assert shut(pod)


async def test_without_attestation_a_certificate_is_all(tmp_path: Path, authority: Authority) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    gate = Gate(folder, None)
    assert not is_open(folder, False, time.time())
    key = requested_key(gate.request())
    pem = authority.issue(key, names.tls_name("p"), client=False, seconds=60, now=utc(time.time()))
    assert gate.admit("", pem, authority.pem) is None
    assert is_open(folder, False, time.time())
    assert not is_open(folder, True, time.time()), "a lease is something else"
    assert requested_key(Gate(folder, None).request()) == key, "a restarted gate keeps the pod's key"
    assert (folder / "tls.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("lie", ["slow", "down"])
async def test_no_verdict_is_not_a_refusal(
    lie: str, pod: Pod, service: VerifierClient, verifier: Verifier
) -> None:
    verifier.lie = lie
    question, _ = await ask(pod)
    with pytest.raises(VerifierUnavailable):
        await service.appraise(question, b"")
    verifier.lie = "refuse"
    with pytest.raises(VerifierRefusal):
        await service.appraise(question, b"")


async def test_evidence_is_bound_to_the_question(
    pod: Pod, service: VerifierClient, verifier: Verifier
) -> None:
    question, _ = await ask(pod)
    await service.appraise(question, b"report")
    [sent] = verifier.asked[-1]["verification_requests"]
    assert base64.urlsafe_b64decode(sent["evidence"] + "==") == b"report"
    assert sent["runtime_data"]["structured"] == {
        "nonce": question.nonce,
        "bootId": question.boot_id,
        "key": question.key,
    }
    other = Question(question.nonce, "another-boot", question.key, question.asked_at)
    assert question.digest() != other.digest()


@pytest.mark.parametrize("bits", [1024])
def test_weak_keys_are_refused(bits: int) -> None:
    pem = rsa_key(65537, bits).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(ValueError, match="at least 2048 bits"):
        load_key(pem.decode())
