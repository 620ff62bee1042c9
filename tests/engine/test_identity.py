"""Tokens as the other processes sign them are accepted once, and nothing else is (contract with `tenantry.api`)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import engine_world as world
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tenantry.api.digest import adapter_digest
from tenantry.api.identity import Signer
from tenantry_engine.digest import folder_digest
from tenantry_engine.errors import EngineError, RequestError
from tenantry_engine.identity import GATEWAY, OPERATOR, Verifier, read_identity

PATH = "/v1/chat/completions"
CLAIMS = {
    "tenant": "acme", "uid": "u-1", "weight": 2, "cap": 4, "lane": "fast", "salt": "0" * 64, "model": "m", "digest": "",
}  # fmt: skip


@pytest.fixture
def gateway(tmp_path: Path) -> Signer:
    return world.certify(tmp_path / "ids", GATEWAY, Ed25519PrivateKey.generate())


@pytest.fixture
def verifier(tmp_path: Path, gateway: Signer) -> Verifier:
    return Verifier("pool-uid", tmp_path / "ids")


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def test_a_token_is_good_once(verifier: Verifier, gateway: Signer) -> None:
    token = gateway.sign("pool-uid", PATH, b"{}", **CLAIMS)
    identity = read_identity(verifier.verify(token, {GATEWAY}, PATH, sha(b"{}")))
    assert (identity.tenant, identity.weight, identity.cap, identity.model) == ("acme", 2, 4, "m")
    with pytest.raises(RequestError, match="used before"):
        verifier.verify(token, {GATEWAY}, PATH, sha(b"{}"))


@pytest.mark.parametrize(
    ("audience", "path", "body", "issuers"),
    [
        ("other-pool", PATH, b"{}", {GATEWAY}),
        ("pool-uid", "/v1/completions", b"{}", {GATEWAY}),
        ("pool-uid", PATH, b"{ }", {GATEWAY}),
        ("pool-uid", PATH, b"{}", {OPERATOR}),
    ],
)
def test_made_for_something_else(
    verifier: Verifier, gateway: Signer, audience: str, path: str, body: bytes, issuers: set[str]
) -> None:
    token = gateway.sign(audience, path, body, **CLAIMS)
    with pytest.raises(RequestError) as caught:
        verifier.verify(token, issuers, PATH, sha(b"{}"))
    assert caught.value.status == 401
    assert token not in caught.value.message


def test_a_key_speaks_only_for_its_certificates_issuer(verifier: Verifier, gateway: Signer) -> None:
    forged = Signer(OPERATOR, gateway.key).sign("pool-uid", PATH, b"{}")
    with pytest.raises(RequestError):
        verifier.verify(forged, {OPERATOR}, PATH, sha(b"{}"))


def test_unknown_key_expired_and_none_algorithm(verifier: Verifier, gateway: Signer) -> None:
    stranger = Signer(GATEWAY, Ed25519PrivateKey.generate()).sign("pool-uid", PATH, b"{}", **CLAIMS)
    good = jwt.decode(gateway.sign("pool-uid", PATH, b"{}", **CLAIMS), options={"verify_signature": False})
    header = jwt.get_unverified_header(gateway.sign("pool-uid", PATH, b"{}"))
    kid = {"kid": header["kid"]}
    old = jwt.encode({**good, "iat": good["iat"] - 90, "exp": good["exp"] - 90}, gateway.key, "EdDSA", kid)
    long = jwt.encode({**good, "exp": good["exp"] + 3600}, gateway.key, "EdDSA", kid)
    unsigned = jwt.encode(good, None, "none", kid)
    for token in (stranger, old, long, unsigned, "", "a.b.c"):
        with pytest.raises(RequestError):
            verifier.verify(token, {GATEWAY}, PATH, sha(b"{}"))


def test_a_new_certificate_is_picked_up(tmp_path: Path, gateway: Signer) -> None:
    now = [1000.0]
    verifier = Verifier("pool-uid", tmp_path / "ids", clock=lambda: now[0])
    operator = world.certify(tmp_path / "ids", OPERATOR, Ed25519PrivateKey.generate())
    now[0] += 10
    assert verifier.verify(operator.sign("pool-uid", "/x"), {OPERATOR}, "/x", sha(b""))["iss"] == OPERATOR


def test_claims_are_checked() -> None:
    wrong = (
        ("weight", 0),
        ("cap", "4"),
        ("tenant", None),
        ("weight", True),
        ("salt", ""),
        ("salt", "0" * 63),
    )
    for name, value in wrong:
        with pytest.raises(RequestError, match=name):
            read_identity({**CLAIMS, "jti": "x", name: value})


def test_no_certificates_is_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="--identity-dir"):
        Verifier("pool-uid", tmp_path)


def test_digest_is_the_one_of_the_api(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b'{"r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 9000)
    (tmp_path / "README.md").write_text("not part of it")
    assert folder_digest(tmp_path) == adapter_digest(tmp_path)
