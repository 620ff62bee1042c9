"""A read-only client of the OCI distribution protocol (v1.1): one adapter manifest and its two layers.

Written to one file as the adapter blob, verified on the way: each layer against the manifest, the whole against
the digest that the Adapter names. Redirects are followed by hand: each hop is checked, no token leaves its registry.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn
from urllib.parse import urljoin, urlsplit

import httpx

from tenantry.api.digest import CONFIG_FILE, WEIGHTS_FILE

from .artifact import MAX_CONFIG_BYTES
from .errors import FetchError, Reason, printable
from .net import GuardedTransport, OriginPolicy, Resolver, system_resolver
from .reference import MANIFEST_TYPE, TITLE, Reference

MAX_MANIFEST_BYTES = 1 << 20
MAX_TOKEN_BYTES = 64 << 10
MAX_REDIRECTS = 3
CHUNK = 1 << 20
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CHALLENGE = re.compile(r'(realm|service|scope)="([^"]{0,1024})"')


@dataclass(frozen=True)
class Layer:
    """A descriptor: what the registry must deliver, to the byte."""

    title: str
    digest: str
    size: int


class Registry:
    """Pulls from listed registries. One instance serves all pulls; each pull has connections of its own."""

    def __init__(
        self, policy: OriginPolicy, max_bytes: int, seconds: float, resolver: Resolver = system_resolver
    ) -> None:
        self._policy = policy
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._resolver = resolver

    async def pull(self, source: str, digest: str, target: Path) -> int:
        """Write the adapter blob of `source` to `target` and return its size in bytes.

        Raises FetchError; `target` may then hold anything and must be thrown away.
        """
        try:
            reference = Reference.parse(source)
        except ValueError as error:
            raise FetchError(Reason.SOURCE_NOT_ALLOWED, str(error)) from error
        base = self._policy.base_url(reference.host, reference.port)
        transport = GuardedTransport(self._policy, self._resolver)
        try:
            async with (
                asyncio.timeout(self._seconds),
                httpx.AsyncClient(transport=transport, timeout=TIMEOUT, follow_redirects=False) as client,
            ):
                session = _Session(client, f"{base}/v2/{reference.repository}", str(reference.host))
                return await self._pull(session, reference, digest, target)
        except TimeoutError as error:
            raise FetchError(
                Reason.SOURCE_UNAVAILABLE, f"`{reference.host}` did not deliver within {self._seconds:g} s"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            text = printable(str(error)) or type(error).__name__
            raise FetchError(Reason.SOURCE_UNAVAILABLE, f"`{reference.host}`: {text}") from error

    async def _pull(self, session: _Session, reference: Reference, digest: str, target: Path) -> int:
        raw = await session.manifest(reference.manifest)
        if reference.digest and f"sha256:{hashlib.sha256(raw).hexdigest()}" != reference.digest:
            raise FetchError(Reason.DIGEST_MISMATCH, "the manifest has not the digest that `source` names")
        config, weights = adapter_layers(raw)
        size = 16 + config.size + weights.size
        if config.size > MAX_CONFIG_BYTES or size > self._max_bytes:
            raise FetchError(
                Reason.TOO_LARGE,
                f"the adapter has {size} bytes; it must have at most {self._max_bytes}, "
                f"{CONFIG_FILE} at most {MAX_CONFIG_BYTES}",
            )
        whole = hashlib.sha256()
        with target.open("xb") as file:
            for layer in (config, weights):
                length = struct.pack("<Q", layer.size)
                whole.update(length)
                file.write(length)
                await self._layer(session, layer, file, whole)
        got = f"sha256:{whole.hexdigest()}"
        if got != digest:
            raise FetchError(Reason.DIGEST_MISMATCH, f"`digest` is {digest}, but the source delivers {got}")
        return size

    async def _layer(self, session: _Session, layer: Layer, file: BinaryIO, whole: hashlib._Hash) -> None:
        """Append one layer to the file, at most as many bytes as its descriptor says."""
        own = hashlib.sha256()

        def take(chunk: bytes) -> None:
            own.update(chunk)
            whole.update(chunk)
            file.write(chunk)

        received = 0
        async with session.blob(layer.digest) as response:
            async for chunk in response.aiter_raw(CHUNK):
                received += len(chunk)
                if received > layer.size:
                    break
                await asyncio.to_thread(take, chunk)
        if received != layer.size or f"sha256:{own.hexdigest()}" != layer.digest:
            raise FetchError(
                Reason.DIGEST_MISMATCH, f"layer {layer.title} has not the bytes that the manifest promises"
            )


def adapter_layers(raw: bytes) -> tuple[Layer, Layer]:
    """Configuration and weights of an adapter's manifest. Raises FetchError(InvalidArtifact)."""
    try:
        manifest: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FetchError(Reason.INVALID_ARTIFACT, "the manifest must be JSON") from error
    if not isinstance(manifest, dict) or manifest.get("mediaType", MANIFEST_TYPE) != MANIFEST_TYPE:
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


class _Session:
    """Requests to one repository, with the anonymous token that the registry may want."""

    def __init__(self, client: httpx.AsyncClient, base: str, host: str) -> None:
        self._client = client
        self._base = base
        self._host = host
        self._token: str | None = None

    async def manifest(self, reference: str) -> bytes:
        url = f"{self._base}/manifests/{reference}"
        async with self._get(url, {"accept": MANIFEST_TYPE}, "manifest") as response:
            return await _bounded(response, MAX_MANIFEST_BYTES, "the manifest")

    @asynccontextmanager
    async def blob(self, digest: str) -> AsyncIterator[httpx.Response]:
        async with self._get(f"{self._base}/blobs/{digest}", {}, "layer") as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                _invalid("the registry must send layers as they are, without content-encoding")
            yield response

    @asynccontextmanager
    async def _get(self, url: str, headers: dict[str, str], what: str) -> AsyncIterator[httpx.Response]:
        response = await self._follow(url, headers)
        try:
            if response.status_code == 401 and self._token is None:
                challenge = response.headers.get("www-authenticate", "")
                await response.aclose()
                self._token = await self._anonymous_token(challenge)
                response = await self._follow(url, headers)
            status = response.status_code
            if status == 404:
                raise FetchError(Reason.NOT_FOUND, f"`{self._host}` has no such {what}")
            if status in (401, 403):
                raise FetchError(
                    Reason.SOURCE_UNAVAILABLE,
                    f"`{self._host}` answered HTTP {status}: it must allow anonymous reads",
                )
            if status != 200:
                raise FetchError(
                    Reason.SOURCE_UNAVAILABLE, f"`{self._host}` answered HTTP {status} for the {what}"
                )
            yield response
        finally:
            await response.aclose()

    async def _follow(self, url: str, headers: dict[str, str]) -> httpx.Response:
        """The first answer that is no redirect. The token stays with the registry that it was made for."""
        home = urlsplit(url).netloc
        for _ in range(MAX_REDIRECTS + 1):
            own = {"accept-encoding": "identity", **headers}
            if self._token and urlsplit(url).netloc == home:
                own["authorization"] = f"Bearer {self._token}"
            response = await self._client.send(
                self._client.build_request("GET", url, headers=own), stream=True
            )
            if response.status_code not in (301, 302, 303, 307, 308):
                return response
            await response.aclose()
            url = urljoin(url, response.headers.get("location", ""))
        raise FetchError(
            Reason.SOURCE_UNAVAILABLE, f"`{self._host}` redirects more than {MAX_REDIRECTS} times"
        )

    async def _anonymous_token(self, challenge: str) -> str:
        """The token flow of the distribution protocol, without credentials. Its server must be listed, too."""
        fields = dict(_CHALLENGE.findall(challenge))
        if not challenge.lower().startswith("bearer ") or "realm" not in fields:
            raise FetchError(
                Reason.SOURCE_UNAVAILABLE, f"`{self._host}` wants credentials; it must allow anonymous reads"
            )
        query = {name: fields[name] for name in ("service", "scope") if name in fields}
        request = self._client.build_request("GET", fields["realm"], params=query)
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise FetchError(
                    Reason.SOURCE_UNAVAILABLE, f"the token server answered HTTP {response.status_code}"
                )
            raw = await _bounded(response, MAX_TOKEN_BYTES, "the token")
        finally:
            await response.aclose()
        try:
            answer = json.loads(raw)
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise FetchError(Reason.SOURCE_UNAVAILABLE, "the token server must answer with a `token`")
        return token


async def _bounded(response: httpx.Response, limit: int, what: str) -> bytes:
    raw = bytearray()
    async for chunk in response.aiter_raw(CHUNK):
        raw += chunk
        if len(raw) > limit:
            raise FetchError(Reason.TOO_LARGE, f"{what} must have at most {limit} bytes")
    return bytes(raw)


def _invalid(message: str) -> NoReturn:
    raise FetchError(Reason.INVALID_ARTIFACT, message)
