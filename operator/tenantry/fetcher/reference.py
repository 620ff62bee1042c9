"""Where an adapter lies, by scheme, and the media types of its manifest.

oci://host[:port]/repository[:tag][@sha256:...]
s3://host[:port]/bucket[/folder]                  path-style, so that the host is the one that an admin listed
hf://host[:port]/owner/name[/folder]@<commit>     a commit, since branches and tags move
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
ARTIFACT_TYPE = "application/vnd.tenantry.adapter.v1"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
LAYER_TYPE = "application/octet-stream"
TITLE = "org.opencontainers.image.title"

_HOST = r"(?=.{1,253}(?:[:/]|$))[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*"
_ORIGIN = re.compile(rf"(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?")
_REFERENCE = re.compile(
    rf"oci://{_ORIGIN.pattern}"
    r"/(?P<repository>[a-z0-9]+(?:(?:\.|_|__|-+|/)[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
# Steps begin with no dot: nothing can climb out of a folder, and nothing needs escaping in a URL.
_STEP = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_BUCKET = re.compile(
    rf"s3://{_ORIGIN.pattern}/(?P<bucket>[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9])(?P<folder>(?:/{_STEP})*)"
)
_COMMIT = re.compile(
    rf"hf://{_ORIGIN.pattern}/(?P<repository>{_STEP}/{_STEP})(?P<folder>(?:/{_STEP})*)@(?P<commit>[0-9a-f]{{40}})"
)
_FORM = "must look like oci://host[:port]/repository[:tag][@sha256:<64 hex digits>]"
_FORMS = f"{_FORM}, s3://host[:port]/bucket[/folder] or hf://host[:port]/owner/name[/folder]@<40 hex digits>"


@dataclass(frozen=True)
class Origin:
    """A host and the port that a connection would use."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Reference:
    """An artifact in a registry. `port` is None where the reference leaves it to the scheme."""

    host: str
    port: int | None
    repository: str
    tag: str | None
    digest: str | None

    @property
    def manifest(self) -> str:
        """What the registry is asked for: the digest where one is given, since a tag can move."""
        return self.digest or self.tag or "latest"

    @classmethod
    def parse(cls, source: str) -> Reference:
        """Raises ValueError that says what a source must look like."""
        match = _REFERENCE.fullmatch(source) if len(source) <= 512 else None
        if match is None:
            raise ValueError(f"`source` {_FORM}")
        return cls(
            match["host"], _port(match["port"], "source"), match["repository"], match["tag"], match["digest"]
        )


@dataclass(frozen=True)
class BucketFolder:
    """A folder of an S3 bucket: `path` is bucket and folder, as they stand in a URL."""

    host: str
    port: int | None
    path: str


@dataclass(frozen=True)
class HubFolder:
    """A folder of a hub's repository at one commit."""

    host: str
    port: int | None
    repository: str
    folder: str
    commit: str


Place = Reference | BucketFolder | HubFolder


def parse_source(source: str) -> Place:
    """Raises ValueError that says what a source must look like."""
    text = source if len(source) <= 512 else ""
    if text.startswith("oci://"):
        return Reference.parse(source)
    if match := _BUCKET.fullmatch(text):
        return BucketFolder(match["host"], _port(match["port"], "source"), match["bucket"] + match["folder"])
    if match := _COMMIT.fullmatch(text):
        port = _port(match["port"], "source")
        return HubFolder(match["host"], port, match["repository"], match["folder"], match["commit"])
    raise ValueError(f"`source` {_FORMS}")


def parse_host(text: str, flag: str) -> tuple[str, int | None]:
    """`HOST[:PORT]` of a flag. Raises ValueError that names the flag."""
    match = _ORIGIN.fullmatch(text.lower())
    if match is None:
        raise ValueError(
            f"`{flag}` must be HOST[:PORT] without scheme or path, e.g. registry.example.com:5000"
        )
    return match["host"], _port(match["port"], flag)


def _port(text: str | None, field: str) -> int | None:
    if text is None:
        return None
    port = int(text)
    if not 1 <= port <= 65_535:
        raise ValueError(f"`{field}` must have a port between 1 and 65535")
    return port
