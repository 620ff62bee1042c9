"""A report is sealed by the operator's own key: whoever may edit ConfigMaps cannot make it claim anything."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tenantry.desired.objects import Obj

from .report import FIELD

SEAL: Final = "report.sig"
CERTIFICATE: Final = "operator.crt"
_CONTEXT: Final = b"tenantry-report-1\0"
"""The same key signs tokens: nothing signed for one purpose is valid for the other."""


def sealed(config_map: Obj, key: Ed25519PrivateKey) -> Obj:
    """The ConfigMap with the signature of its report beside it."""
    data = config_map["data"]
    signature = key.sign(_CONTEXT + data[FIELD].encode())
    return {**config_map, "data": {**data, SEAL: base64.b64encode(signature).decode()}}


def is_sealed(config_map: Obj | None, keys: Iterable[Ed25519PublicKey]) -> bool:
    """Whether one of the keys signed the report as it stands."""
    data = (config_map or {}).get("data") or {}
    text, seal = data.get(FIELD), data.get(SEAL)
    if not isinstance(text, str) or not isinstance(seal, str):
        return False
    try:
        signature = base64.b64decode(seal, validate=True)
    except (binascii.Error, ValueError):
        return False
    return any(_verifies(key, signature, _CONTEXT + text.encode()) for key in keys)


def certified(text: str) -> list[Ed25519PublicKey]:
    """The Ed25519 keys of PEM certificates; none for what is no certificate."""
    try:
        found = x509.load_pem_x509_certificates(text.encode())
    except ValueError:
        return []
    return [key for certificate in found if isinstance(key := certificate.public_key(), Ed25519PublicKey)]


def _verifies(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True
