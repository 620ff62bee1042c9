"""Mutual TLS between our own processes: contexts that take new certificates as they come.

A handshake uses what is there at its moment; connections that stand are not touched by a new certificate. TLS 1.3 only,
and no tickets: a resumed session would never be asked for its certificate again.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0


@dataclass
class Credentials:
    """A process's key, its certificate and the authority that it believes, as files that others replace."""

    certificate: Path
    key: Path
    authority: Path
    _seen: tuple[bytes, ...] = ()
    _contexts: list[ssl.SSLContext] = field(default_factory=list)

    def client(self) -> ssl.SSLContext:
        """For connections to peers; their certificate must be for the `server_hostname` that is given then."""
        return self._made(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def server(self) -> ssl.SSLContext:
        """For callers, who must show a certificate for clients of the same authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        return self._made(context)

    def refresh(self) -> bool:
        """Load the files if they changed; whether every context has what they say now.

        Files that are missing or do not fit together leave what was loaded before: the next look finds both halves.
        """
        try:
            content = tuple(path.read_bytes() for path in (self.certificate, self.key, self.authority))
        except OSError:
            return False
        if content == self._seen:
            return True
        try:
            for context in self._contexts:
                self._load(context)
        except (ssl.SSLError, ValueError, OSError) as error:
            log.warning("certificate not taken: %s", error)
            return False
        self._seen = content
        return True

    async def watch(self, seconds: float = LOOK_SECONDS) -> None:
        """Refresh for ever."""
        while True:
            self.refresh()
            await asyncio.sleep(seconds)

    def _made(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Our authority alone is believed, whoever stands above it: others of the same root are strangers.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        self._contexts.append(context)
        self._seen = ()
        self.refresh()
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
