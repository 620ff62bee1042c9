"""Mutual TLS on both ports: one context, which takes a new certificate without touching connections that stand.

The folder holds `tls.crt`, `tls.key` and `ca.pem`. Callers must show a certificate for clients of that authority. TLS
1.3 only, and no tickets: a resumed session would never be asked for its certificate again.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from tenantry_engine.errors import EngineError

log = logging.getLogger("tenantry_engine")

_LOOK_SECONDS = 5.0
_FILES = ("tls.crt", "tls.key", "ca.pem")


class ServerTls:
    """The context and the files behind it."""

    def __init__(self, folder: Path) -> None:
        """Raises EngineError when the folder does not hold what it must."""
        self._folder = folder
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.verify_mode = ssl.CERT_REQUIRED
        # That authority alone is believed, whoever stands above it: others of the same root are strangers.
        self.context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        self.context.num_tickets = 0
        self.context.options |= ssl.OP_NO_TICKET
        self._seen: tuple[bytes, ...] = ()
        try:
            self._load()
        except (OSError, ValueError) as error:
            raise EngineError(
                f"`--tls-dir` must hold a certificate, its key and an authority: {error}"
            ) from error

    async def watch(self, seconds: float = _LOOK_SECONDS) -> None:
        """Takes new files for ever. Such as do not fit together leave the old ones in force until the next look."""
        while True:
            await asyncio.sleep(seconds)
            try:
                self._load()
            except (OSError, ValueError) as error:
                log.warning("new certificate not taken: %s", error)

    def _load(self) -> None:
        content = tuple((self._folder / name).read_bytes() for name in _FILES)
        if content == self._seen:
            return
        self.context.load_cert_chain(self._folder / "tls.crt", self._folder / "tls.key")
        self.context.load_verify_locations(self._folder / "ca.pem")
        self._seen = content
