"""Where an adapter lies: `oci://host[:port]/repository[:tag][@sha256:...]`, and the media types of its manifest."""

from __future__ import annotations

import re
from dataclasses import dataclass

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
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
_FORM = "must look like oci://host[:port]/repository[:tag][@sha256:<64 hex digits>]"


@dataclass(frozen=True)
class Origin:
    """A registry as a host and the port that a connection would use."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Reference:
    """A parsed source. `port` is None where the reference leaves it to the scheme."""

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
