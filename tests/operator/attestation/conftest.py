"""A verifier that lies on demand, a gate in a folder of its own, and an authority."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from cluster.pki import certify
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tenantry.api import names
from tenantry.api.config import VerifierService
from tenantry.api.identity import Signer
from tenantry.attestation.authority import Authority
from tenantry.attestation.door import Door
from tenantry.attestation.gate import Gate
from tenantry.attestation.policy import GatePolicy
from tenantry.attestation.verifier import VerifierClient

TESTS = Path(__file__).parents[2]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from support.trust import AUDIENCE, Pod, make_authority  # noqa: E402
from support.verifier import GOOD, ISSUER, POINTER, Verifier  # noqa: E402


@pytest.fixture
def authority() -> Authority:
    return make_authority()


@pytest.fixture
async def verifier() -> AsyncIterator[Verifier]:
    found = Verifier()
    runner = await found.start()
    yield found
    await runner.cleanup()


@pytest.fixture
def policy(verifier: Verifier) -> GatePolicy:
    return GatePolicy(
        keys=[verifier.public],
        issuer=ISSUER,
        runtime_data="/customized_claims/runtime_data",
        measurements={POINTER: [GOOD, "ee" * 32], "/submods/cpu0/debug": ["false"]},
        max_age_seconds=300,
    )


@pytest.fixture
async def service(verifier: Verifier) -> AsyncIterator[VerifierClient]:
    client = VerifierClient(
        VerifierService(url=verifier.url, keys=[verifier.public], issuer=ISSUER, timeout_seconds=1)
    )
    yield client
    await client.close()


@pytest.fixture
async def pod(tmp_path: Path, policy: GatePolicy) -> AsyncIterator[Pod]:
    folder, identities = tmp_path / "run", tmp_path / "identity"
    folder.mkdir()
    identities.mkdir()
    key = Ed25519PrivateKey.generate()
    certify(identities, names.OPERATOR_ISSUER, key)
    document, boot = tmp_path / "policy.json", tmp_path / "boot_id"
    document.write_text(policy.model_dump_json(by_alias=True))
    boot.write_text(f"{uuid.uuid4()}\n")
    gate = Gate(folder, document, boot)
    door = Door(gate, folder, identities, AUDIENCE)
    transport = httpx.ASGITransport(app=door.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gate") as http:
        yield Pod(folder, gate, http, Signer(names.OPERATOR_ISSUER, key), document)
