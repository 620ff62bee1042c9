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


class SignaturePolicy(StrEnum):
    REQUIRED = "Required"
    WARN = "Warn"


@dataclass(frozen=True, slots=True, config=WIRE)
class Identity:
    """A signer as certificates name one: OIDC issuer and subject."""

    issuer: str
    subject: str


@dataclass(frozen=True, slots=True, config=WIRE)
class Verification:
    """Whose signature is asked for: of a named public key, or of one of some identities."""

    policy: SignaturePolicy
    key_ref: str = ""
    identities: tuple[Identity, ...] = ()


@dataclass(frozen=True, slots=True, config=WIRE)
class Pull:
    """Bytes by digest, where they lie, and on which terms they are to be had.

    `namespace` is the Adapter's, whose Secret `secret_ref` holds the credentials ("": none are used). What was found
    out on some terms says nothing on others, so all of it is the key of a transfer.
    """

    digest: str
    source: str
    namespace: str = ""
    secret_ref: str = ""
    verification: Verification | None = None


@dataclass(frozen=True, slots=True, config=WIRE)
class SignatureReport:
    """What was found of the signature that was asked for. `message` names the signer, or says what is wrong."""

    verified: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, config=WIRE)
class ArtifactReport:
    """The pull. `bytes` is the size of the blob once verified; `signature` is None where none was asked for."""

    state: ArtifactState
    reason: str = ""
    message: str = ""
    bytes: int = 0
    signature: SignatureReport | None = None


@dataclass(frozen=True, slots=True, config=WIRE)
class AdapterFacts:
    """What the verified files say; the operator compares it with spec and pool."""

    rank: int
    base_model: str
    target_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, config=WIRE)
class PushReport:
    """The push to one replica, `<namespace>/<pod>`."""

    name: str
    state: PushState
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, config=WIRE)
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
_PULL: TypeAdapter[Pull] = TypeAdapter(Pull)


class FetcherClient:
    """Speaks to one fetcher. Stateless; every call is idempotent."""

    def __init__(self, signer: Signer, url: str, client: httpx.AsyncClient) -> None:
        self._signer = signer
        self._url = url
        self._client = client

    async def transfer(self, pull: Pull, replicas: Sequence[Replica] = ()) -> Transfer:
        """Start or join the work and say where it stands. No replicas: pull and verify only."""
        payload = {
            **_PULL.dump_python(pull, mode="json", by_alias=True, exclude_defaults=True),
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
