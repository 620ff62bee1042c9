"""Who asks: the one place where a client's key becomes a tenant."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from tenantry.api import keys

from .errors import ApiError, unauthorized
from .state import State, Tenant

MAX_KEY_LENGTH = 256
_NO_KEY = "0" * 64

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: Tenant
    key_name: str


def identify(headers: Headers, state: State, now: float) -> Caller:
    """The tenant that the key proves. `now` in Unix seconds.

    Raises ApiError: 503 before any state is known, 401 for every kind of wrong key, 403 for a suspended tenant.
    A key is compared only with those of the tenant that it names, with all of them, in constant time.
    """
    if not state.ready:
        raise ApiError(503, "not_ready", "the gateway has not read its tenants yet", retry_after=2)
    key = _bearer(headers)
    tenant = state.tenants.get(keys.tenant_of(key) or "")
    name = None
    if tenant is None:
        keys.matches(key, _NO_KEY)
        raise unauthorized()
    for known in tenant.keys:
        if keys.matches(key, known.sha256) and (known.expires_at is None or now < known.expires_at):
            name = known.name
    if name is None:
        raise unauthorized()
    if tenant.suspended:
        raise ApiError(403, "tenant_suspended", "the tenant is suspended; its owner must resume it")
    return Caller(tenant, name)


def _bearer(headers: Headers) -> str:
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1 or len(values[0]) > MAX_KEY_LENGTH:
        raise unauthorized()
    scheme, _, key = values[0].decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not key.isascii():
        raise unauthorized()
    return key.strip()


def client_address(peer: str, headers: Headers, trusted: tuple[Network, ...]) -> str:
    """The client's address. `X-Forwarded-For` counts only as far as it was written by trusted proxies."""
    if not _within(peer, trusted):
        return peer
    hops = [
        h.strip()
        for name, value in headers
        if name == b"x-forwarded-for"
        for h in value.decode("latin-1").split(",")
    ]
    for hop in reversed(hops):
        try:
            address = str(ipaddress.ip_address(hop))
        except ValueError:
            break
        if not _within(address, trusted):
            return address
        peer = address
    return peer


def _within(address: str, networks: tuple[Network, ...]) -> bool:
    if not networks:
        return False
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in networks)
