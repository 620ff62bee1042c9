"""A read-only client of the OCI distribution protocol (v1.1): manifests, layers and what refers to a manifest.

Layers become one adapter blob, verified on the way: each against the manifest, the whole against the digest that the
Adapter names.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from tenantry.api.digest import CONFIG_FILE, WEIGHTS_FILE

from .blob import BlobWriter, check_size
from .challenge import answer
from .credentials import Login
from .errors import FetchError, Reason
from .reference import INDEX_TYPE, MANIFEST_TYPE, TITLE, Reference
from .session import CHUNK, Session

MAX_MANIFEST_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Layer:
    """A descriptor: what the registry must deliver, to the byte."""

    title: str
    digest: str
    size: int


class Repository:
    """One repository of a listed registry, for one pull."""

    def __init__(self, session: Session, name: str, login: Login | None) -> None:
        self._session = session
        self._url = f"{session.base}/v2/{name}"
        session.challenged = lambda challenge: answer(session, challenge, login)

    async def pull(self, reference: Reference, writer: BlobWriter, limit: int) -> str:
        """Write the adapter's files; the digest of its manifest. Raises FetchError."""
        raw = await self.manifest(reference.manifest)
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if reference.digest not in (None, digest):
            raise FetchError(Reason.DIGEST_MISMATCH, "the manifest has not the digest that `source` names")
        config, weights = adapter_layers(raw)
        check_size(config.size, 16 + config.size + weights.size, limit)
        for layer in (config, weights):
            async with self._session.get(f"{self._url}/blobs/{layer.digest}", "layer") as response:
                promised = layer.digest.removeprefix("sha256:")
                await writer.add(layer.title, layer.size, response.aiter_raw(CHUNK), promised)
        return digest

    async def manifest(self, reference: str, media_type: str = MANIFEST_TYPE) -> bytes:
        """A manifest by tag or digest, as it was pushed. Raises FetchError."""
        return await self._text(f"manifests/{reference}", "manifest", MAX_MANIFEST_BYTES, media_type)

    async def blob(self, digest: str, limit: int) -> bytes:
        """A small blob that has its digest. Raises FetchError."""
        if not _DIGEST.fullmatch(digest):
            _invalid("a layer must have a sha256 digest")
        raw = await self._text(f"blobs/{digest}", "layer", limit)
        if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            raise FetchError(Reason.DIGEST_MISMATCH, "a layer has not the bytes that its manifest promises")
        return raw

    async def referrers(self, digest: str) -> bytes:
        """The index of what refers to a manifest, by the API or by the tag that stands in for it."""
        try:
            return await self._text(f"referrers/{digest}", "referrers", MAX_MANIFEST_BYTES, INDEX_TYPE)
        except FetchError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
        return await self.manifest(digest.replace(":", "-"), INDEX_TYPE)

    async def _text(self, path: str, what: str, limit: int, accept: str = "*/*") -> bytes:
        return await self._session.text(f"{self._url}/{path}", what, limit, {"accept": accept})


def adapter_layers(raw: bytes) -> tuple[Layer, Layer]:
    """Configuration and weights of an adapter's manifest. Raises FetchError(InvalidArtifact)."""
    manifest = parse_manifest(raw)
    if manifest.get("mediaType", MANIFEST_TYPE) != MANIFEST_TYPE:
        _invalid(f"the source must name one manifest ({MANIFEST_TYPE}), not an index or another kind")
    found: dict[str, Layer] = {}
    layers = manifest.get("layers")
    for entry in layers if isinstance(layers, list) else []:
        match entry:
            case {
                "digest": str(digest),
                "size": int(size),
                "annotations": {"org.opencontainers.image.title": title},
            }:
                pass
            case _:
                continue
        # Titles are compared, never used: whatever else a manifest names stays where it is.
        if title not in (CONFIG_FILE, WEIGHTS_FILE):
            continue
        if title in found:
            _invalid(f"the manifest must have one layer titled {title}, not two")
        if not _DIGEST.fullmatch(digest) or type(size) is not int or size < 0:
            _invalid(f"layer {title} must have a sha256 digest and a size")
        found[title] = Layer(title, digest, size)
    for title in (CONFIG_FILE, WEIGHTS_FILE):
        if title not in found:
            _invalid(f"the manifest must have a layer whose annotation `{TITLE}` is {title}")
    return found[CONFIG_FILE], found[WEIGHTS_FILE]


def parse_manifest(raw: bytes) -> dict[str, Any]:
    """A manifest or an index as a JSON object. Raises FetchError(InvalidArtifact)."""
    try:
        manifest: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FetchError(Reason.INVALID_ARTIFACT, "the manifest must be JSON") from error
    if not isinstance(manifest, dict):
        _invalid("the manifest must be a JSON object: the source must name one manifest")
    return manifest


def _invalid(message: str) -> NoReturn:
    raise FetchError(Reason.INVALID_ARTIFACT, message)
