"""From a source to a blob: who holds the credentials, which protocol, which signature, all within one time limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tenantry.engines.fetcher import Pull, SignaturePolicy, SignatureReport

from . import credentials, metrics
from .blob import BlobWriter
from .errors import FetchError, Reason
from .folder import Folder, bucket_folder, hub_folder
from .net import GuardedTransport, OriginPolicy, Resolver, system_resolver
from .oci import Repository
from .reference import BucketFolder, HubFolder, Place, Reference, parse_source
from .session import TIMEOUT, Session, transport_fault
from .signatures import Subject, find_in_folder, find_in_repository, verify
from .trust import Trust

if TYPE_CHECKING:
    from .secrets import Secrets  # a Kubernetes client, which few releases need

NO_TRUST = Trust(None)


@dataclass(frozen=True)
class Receipt:
    """What was delivered: `bytes` of blob; `subject` is the digest that a signature of the artifact speaks of."""

    bytes: int
    subject: str


class Sources:
    """Reads listed hosts. One instance serves all pulls; each pull has connections of its own."""

    def __init__(
        self,
        policy: OriginPolicy,
        max_bytes: int,
        seconds: float,
        resolver: Resolver = system_resolver,
        *,
        secrets: Secrets | None = None,
        trust: Trust = NO_TRUST,
    ) -> None:
        self._policy = policy
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._resolver = resolver
        self._secrets = secrets
        self._trust = trust

    async def pull(self, pull: Pull, target: Path) -> Receipt:
        """Write the adapter blob to `target`. Raises FetchError; `target` may then hold anything."""
        async with self._open(pull) as (place, room):
            with target.open("xb") as file:
                writer = BlobWriter(file)
                if isinstance(room, Repository):
                    assert isinstance(place, Reference)
                    subject = await room.pull(place, writer, self._max_bytes)
                else:
                    await room.pull(writer, self._max_bytes)
                    subject = pull.digest
                writer.finish(pull.digest)
            return Receipt(writer.size, subject)

    async def signature(self, pull: Pull, subject: str) -> SignatureReport | None:
        """Look for the signature that `pull` asks for, on what `pull` delivered as `subject`.

        None where none is asked for. Raises FetchError where it is required and not good.
        """
        asked = pull.verification
        if asked is None:
            return None
        try:
            async with self._open(pull) as (_, room):
                signed = Subject(subject, blob=not isinstance(room, Repository))
                if isinstance(room, Repository):
                    found = await find_in_repository(room, subject)
                else:
                    found = await find_in_folder(room)
            signer = await asyncio.to_thread(verify, signed, found, asked, self._trust)
        except FetchError as error:
            metrics.signatures.labels(error.reason.value).inc()
            if asked.policy is SignaturePolicy.REQUIRED:
                raise
            return SignatureReport(False, error.reason.value, error.message)
        metrics.signatures.labels("ok").inc()
        return SignatureReport(True, "", signer)

    @asynccontextmanager
    async def _open(self, pull: Pull) -> AsyncIterator[tuple[Place, Repository | Folder]]:
        """The place of a source, with its credentials. What breaks inside is told as a FetchError."""
        try:
            place = parse_source(pull.source)
        except ValueError as error:
            raise FetchError(Reason.SOURCE_NOT_ALLOWED, str(error)) from error
        # The list comes first: no Secret is read for a host that nobody listed.
        base = self._policy.base_url(place.host, place.port)
        transport = GuardedTransport(self._policy, self._resolver)
        try:
            async with (
                asyncio.timeout(self._seconds),
                httpx.AsyncClient(transport=transport, timeout=TIMEOUT, follow_redirects=False) as client,
            ):
                session = Session(client, base, place.host)
                session.identified = bool(pull.secret_ref)
                yield place, await self._room(pull, place, session)
        except TimeoutError as error:
            raise FetchError(
                Reason.SOURCE_UNAVAILABLE, f"`{place.host}` did not deliver within {self._seconds:g} s"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise transport_fault(place.host, error) from error

    async def _room(self, pull: Pull, place: Place, session: Session) -> Repository | Folder:
        data = await self._secret(pull)
        origin = self._policy.origin(place.host, place.port)
        match place:
            case Reference():
                login = credentials.login(data, origin) if data is not None else None
                return Repository(session, place.repository, login)
            case BucketFolder():
                key = credentials.access_key(data, origin) if data is not None else None
                return bucket_folder(session, place, key)
            case HubFolder():
                token = credentials.hub_token(data, origin) if data is not None else None
                return hub_folder(session, place, token)

    async def _secret(self, pull: Pull) -> dict[str, bytes] | None:
        if not pull.secret_ref:
            return None
        if self._secrets is None:
            raise FetchError(
                Reason.SECRET_FORBIDDEN,
                "`secretRef` cannot be used: this release reads no Secrets; an admin sets `fetcher.readSecrets`",
            )
        return await self._secrets.read(pull.namespace, pull.secret_ref)

    async def close(self) -> None:
        """End the connection to the API server."""
        if self._secrets is not None:
            await self._secrets.close()
