"""Why an artifact could not be had: the reasons of the wire reference, each with a text for people."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    SOURCE_NOT_ALLOWED = "SourceNotAllowed"
    SOURCE_UNAVAILABLE = "SourceUnavailable"
    ACCESS_DENIED = "AccessDenied"
    NOT_FOUND = "NotFound"
    INVALID_ARTIFACT = "InvalidArtifact"
    DIGEST_MISMATCH = "DigestMismatch"
    TOO_LARGE = "TooLarge"
    SECRET_NOT_FOUND = "SecretNotFound"  # noqa: S105
    SECRET_FORBIDDEN = "SecretForbidden"  # noqa: S105
    SECRET_INVALID = "SecretInvalid"  # noqa: S105
    KEY_NOT_FOUND = "KeyNotFound"
    SIGNATURE_MISSING = "SignatureMissing"
    SIGNATURE_INVALID = "SignatureInvalid"


class FetchError(Exception):
    """An artifact that could not be pulled or is not what it must be."""

    def __init__(self, reason: Reason, message: str) -> None:
        self.reason = reason
        self.message = message
        super().__init__(f"{reason.value}: {message}")


def printable(text: str, limit: int = 200) -> str:
    """Foreign text as it may stand in a status or a log line: one line, printable, short."""
    return "".join(char if char.isprintable() else "?" for char in text[:limit])
