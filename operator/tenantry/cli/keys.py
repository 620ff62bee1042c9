"""`tenantry keys mint`: a key for its owner and the hash of it for Git."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

from tenantry.api.common import DNS_LABEL
from tenantry.api.keys import mint

from .errors import CliError

_UNITS = {"d": "days", "h": "hours", "m": "minutes"}


def mint_key(tenant: str, name: str, expires_in: str | None) -> tuple[str, str]:
    """The key and one YAML line for `spec.auth.apiKeys`. Raises CliError."""
    for field, value in (("TENANT", tenant), ("--name", name)):
        if not re.fullmatch(DNS_LABEL, value) or len(value) > 63:
            raise CliError(f"`{field}` must be a DNS label: a-z, 0-9 and -, at most 63 characters")
    minted = mint(tenant)
    entry = f"- {{name: {_scalar(name)}, sha256: {json.dumps(minted.sha256)}"
    if expires_in is not None:
        end = datetime.now(UTC) + lifetime("--expires-in", expires_in)
        entry += f', expiresAt: "{end:%Y-%m-%dT%H:%M:%SZ}"'
    return minted.key, entry + "}"


def lifetime(field: str, text: str) -> timedelta:
    """A time such as 90d, given for `field`. Raises CliError."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})([dhm])", text)
    if match is None:
        raise CliError(f"`{field}` must be a number with d, h or m, e.g. 90d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _scalar(text: str) -> str:
    """Quoted where YAML would read a number, a truth value or nothing at all."""
    words = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
    return text if text[0].isalpha() and text not in words else json.dumps(text)
