"""Asks engines as somebody without a certificate of ours would: what is said of TLS is what was seen of it.

Of the two ports the operator reaches the admin port alone; both are served with the same context.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from enum import StrEnum
from urllib.parse import urlsplit

from tenantry.evidence.findings import Finding, blind

SECONDS = 3.0
_QUESTION = b"GET /readyz HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n"


class Outcome(StrEnum):
    REFUSED = "refused"
    ANSWERED = "answered"
    SILENT = "silent"
    """Neither: nothing can be said."""


async def look(urls: Mapping[str, str], answered: Mapping[str, bool], at: float) -> Finding:
    """Aspect `handshake` of EncryptionInTransit. `urls`: of the replicas; `answered`: whether they did to us."""
    if not urls:
        return Finding(None, "no replica is ready", at)
    plain = dict(zip(urls, await asyncio.gather(*(ask(url) for url in urls.values())), strict=True))
    bare = dict(
        zip(urls, await asyncio.gather(*(ask(url, stranger()) for url in urls.values())), strict=True)
    )
    facts = tuple(
        f"{name}: without TLS {plain[name]}, without a certificate {bare[name]}" for name in sorted(urls)
    )
    for outcomes, how in ((plain, "without TLS"), (bare, "whoever shows no certificate")):
        open_ = sorted(name for name, outcome in outcomes.items() if outcome is Outcome.ANSWERED)
        if open_:
            return Finding(False, f"replica `{open_[0]}` answers {how}", at, facts)
    unseen = [
        name
        for name in sorted(urls)
        if Outcome.SILENT in (plain[name], bare[name]) or not answered.get(name, False)
    ]
    if unseen:
        return blind(f"replica `{unseen[0]}` could not be asked", at, facts)
    return Finding(True, "engines answer nobody without a certificate of ours", at, facts)


def stranger() -> ssl.SSLContext:
    """Of somebody who shows nothing and believes everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def ask(url: str, tls: ssl.SSLContext | None = None) -> Outcome:
    """What comes of one HTTP request to the URL's host and port."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
    except (ssl.SSLError, ConnectionResetError):
        return Outcome.REFUSED
    except (OSError, TimeoutError):
        return Outcome.SILENT
    try:
        async with asyncio.timeout(SECONDS):
            writer.write(_QUESTION)
            answer = await reader.read(5)
    except OSError:  # a TLS alert, or a connection that was reset
        return Outcome.REFUSED
    except TimeoutError:
        return Outcome.SILENT
    finally:
        writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await writer.wait_closed()
    return Outcome.ANSWERED if answer == b"HTTP/" else Outcome.REFUSED
