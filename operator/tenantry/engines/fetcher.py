"""Client of the fetcher: ask that an adapter be pulled, verified and pushed; ask again until it is."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import httpx
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from tenantry.api import names
from tenantry.api.identity import Signer

from .base import WIRE, Replica
from .http import call

TRANSFERS_PATH = "/v1/transfers"


class ArtifactState(StrEnum):
    PULLING = "Pulling"
    VERIFIED = "Verified"
    FAILED = "Failed"


class PushState(StrEnum):
    WAITING = "Waiting"
    PUSHING = "Pushing"
    PUSHED = "Pushed"
    FAILED = "Failed"


@dataclass(frozen=True, config=WIRE)
class ArtifactReport:
    """The pull. `bytes` is the size of the blob once verified."""

    state: ArtifactState
    reason: str = ""
    message: str = ""
    bytes: int = 0


@dataclass(frozen=True, config=WIRE)
class AdapterFacts:
    """What the verified files say; the operator compares it with spec and pool."""

    rank: int
    base_model: str
    target_modules: tuple[str, ...]


@dataclass(frozen=True, config=WIRE)
class PushReport:
    """The push to one replica, `<namespace>/<pod>`."""

    name: str
    state: PushState
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, config=WIRE)
class Transfer:
    """Where the work on one digest stands."""

    digest: str
    artifact: ArtifactReport
    adapter: AdapterFacts | None = None
    replicas: tuple[PushReport, ...] = ()

    @property
    def final(self) -> bool:
        """Whether asking again changes nothing before the fetcher's back-off ends."""
        if self.artifact.state is ArtifactState.FAILED:
            return True
        return self.artifact.state is ArtifactState.VERIFIED and all(
            replica.state in (PushState.PUSHED, PushState.FAILED) for replica in self.replicas
        )


_TRANSFER: TypeAdapter[Transfer] = TypeAdapter(Transfer)


class FetcherClient:
    """Speaks to one fetcher. Stateless; every call is idempotent."""

    def __init__(self, signer: Signer, url: str, client: httpx.AsyncClient) -> None:
        self._signer = signer
        self._url = url
        self._client = client

    async def transfer(self, digest: str, source: str, replicas: Sequence[Replica] = ()) -> Transfer:
        """Start or join the work and say where it stands. No replicas: pull and verify only."""
        payload = {
            "digest": digest,
            "source": source,
            "replicas": [{"name": r.name, "url": r.url, "audience": r.audience} for r in replicas],
        }
        return await call(
            self._client,
            self._signer,
            method="POST",
            base=self._url,
            path=TRANSFERS_PATH,
            audience=names.FETCHER_AUDIENCE,
            peer="fetcher",
            answer=_TRANSFER,
            payload=payload,
        )
