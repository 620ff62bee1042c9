"""Adapters that lie as two files in a folder: of an S3 bucket, or of a hub's repository at a commit."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable

import httpx

from tenantry.api.digest import CONFIG_FILE, WEIGHTS_FILE

from .artifact import MAX_CONFIG_BYTES
from .blob import BlobWriter, check_size
from .credentials import AccessKey
from .errors import FetchError, Reason
from .reference import BucketFolder, HubFolder
from .session import CHUNK, Session, bounded
from .sigv4 import signed_headers

_SHA256 = re.compile(r'"?([0-9a-f]{64})"?')


class Folder:
    """One folder, for one pull. `url` makes the address of a file in it."""

    def __init__(
        self,
        session: Session,
        url: Callable[[str], str],
        promise: Callable[[httpx.Response], str | None] = lambda _: None,
    ) -> None:
        self._session = session
        self._url = url
        self._promise = promise

    async def pull(self, writer: BlobWriter, limit: int) -> None:
        """Write both files. Raises FetchError."""
        async with self._session.get(self._url(CONFIG_FILE), CONFIG_FILE) as response:
            promised = self._promise(response)
            config = await bounded(response, MAX_CONFIG_BYTES, CONFIG_FILE)
            await writer.add(CONFIG_FILE, len(config), _once(config), promised)
        async with self._session.get(self._url(WEIGHTS_FILE), WEIGHTS_FILE) as response:
            size = _length(response)
            check_size(len(config), 16 + len(config) + size, limit)
            await writer.add(WEIGHTS_FILE, size, response.aiter_raw(CHUNK), self._promise(response))

    async def text(self, name: str, limit: int) -> bytes:
        """A small file of the folder. Raises FetchError."""
        return await self._session.text(self._url(name), name, limit)


def bucket_folder(session: Session, place: BucketFolder, key: AccessKey | None) -> Folder:
    """A folder of an S3 bucket; without a key it must be public."""
    if key is not None:
        session.authorize = lambda url: signed_headers(url, key)
    return Folder(session, lambda name: f"{session.base}/{place.path}/{name}")


def hub_folder(session: Session, place: HubFolder, token: str | None) -> Folder:
    """A folder of a hub's repository, by the hub's resolve URLs."""
    if token is not None:
        session.authorize = lambda _: {"authorization": f"Bearer {token}"}
    root = f"{session.base}/{place.repository}/resolve/{place.commit}{place.folder}"
    return Folder(session, lambda name: f"{root}/{name}", lambda response: _hub_promise(response, place))


def _hub_promise(response: httpx.Response, place: HubFolder) -> str | None:
    """The SHA-256 that the hub itself promises for a file in large-file storage, and that it spoke of our commit.

    The hub says both in the answer that redirects to its storage host.
    """
    hops = [*response.history, response]
    for hop in hops:
        commit = hop.headers.get("x-repo-commit", place.commit)
        if commit != place.commit:
            raise FetchError(Reason.DIGEST_MISMATCH, "the hub answers for another commit than `source` names")
    for hop in hops:
        size = hop.headers.get("x-linked-size", "")
        if size.isdecimal() and int(size) != _length(response):
            raise FetchError(
                Reason.DIGEST_MISMATCH, "the hub's storage has not as many bytes as the hub promises"
            )
        found = _SHA256.fullmatch(hop.headers.get("x-linked-etag", ""))
        if found:
            return found[1]
    return None


def _length(response: httpx.Response) -> int:
    """Bytes of the body: they stand before it in the blob."""
    text = response.headers.get("content-length", "")
    if not (text.isascii() and text.isdecimal()):
        raise FetchError(Reason.SOURCE_UNAVAILABLE, "the source must say how long a file is (Content-Length)")
    return int(text)


async def _once(raw: bytes) -> AsyncIterator[bytes]:
    yield raw
