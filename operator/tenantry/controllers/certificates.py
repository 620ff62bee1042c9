"""Certificates of the parts that call engines: for keys that the chart gave them, anew before the old ones end.

They are public, so they lie in a ConfigMap, and the parts take new ones from their mount without a restart. The
operator signs its own beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tenantry.api import names
from tenantry.attestation.authority import Authority, expiry, utc
from tenantry.cluster import CONFIG_MAP, Key
from tenantry.runtime.controller import Context

from .world import World

log = logging.getLogger(__name__)

CALLERS: Final = ("gateway", "fetcher")
RETRY_SECONDS: Final = 30.0


class Certificates:
    """Keeps `tenantry-certificates` and the operator's own certificate valid."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._due = 0.0

    async def tend(self, ctx: Context) -> str | None:
        """Renew what is due; what is missing, in words. Cheap when nothing is due."""
        trust = self.world.setup.trust
        if trust is None:
            return "the operator must be given an authority (`--authority-dir`) for mutual TLS"
        now = self.world.wall_clock()
        if now < self._due:
            return None
        seconds = ctx.config.certificate_seconds
        trust.renew(seconds, now)
        release = ctx.config.release_namespace
        where = Key(release, names.CERTIFICATES_CONFIGMAP)
        identities = await ctx.client.get(CONFIG_MAP, Key(release, names.IDENTITY_CONFIGMAP))
        published = await ctx.client.get(CONFIG_MAP, where)
        if identities is None or published is None:
            self._due = now + RETRY_SECONDS
            return f"ConfigMaps `{names.IDENTITY_CONFIGMAP}` and `{names.CERTIFICATES_CONFIGMAP}` are awaited"
        wanted = renewed(
            trust.authority, identities.get("data") or {}, published.get("data") or {}, seconds, now
        )
        if wanted:
            await ctx.client.merge_patch(CONFIG_MAP, where, {"data": wanted})
            log.info("certificates renewed: %s", ", ".join(sorted(wanted)))
        self._due = now + seconds / 8
        return None


def renewed(
    authority: Authority,
    identities: Mapping[str, str],
    published: Mapping[str, str],
    seconds: int,
    now: float,
) -> dict[str, str]:
    """What must be written: certificates that are missing, half over, or for another key; the authority's own."""
    wanted = (
        {} if published.get(names.AUTHORITY_FILE) == authority.pem else {names.AUTHORITY_FILE: authority.pem}
    )
    for part in CALLERS:
        file = f"{part}.crt"
        key = _key(identities.get(file, ""))
        if key is None:
            continue
        ends = expiry(published.get(file, ""))
        if _key(published.get(file, "")) != key or ends is None or ends - now < seconds / 2 or wanted:
            wanted[file] = authority.issue(
                key, names.tls_name(part), client=True, seconds=seconds, now=utc(now)
            )
    return wanted


def _key(pem: str) -> Ed25519PublicKey | None:
    try:
        key = x509.load_pem_x509_certificate(pem.encode()).public_key()
    except ValueError:
        return None
    return key if isinstance(key, Ed25519PublicKey) else None
