"""What can go wrong between us and the API server, by what the caller does about it."""

from __future__ import annotations

from .resources import Key, Resource


class ApiError(Exception):
    """The API server answered with an error. `reason` is the machine-readable word of its Status object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class NotFound(ApiError):
    """404: the object is gone (or never was)."""


class Forbidden(ApiError):
    """403: the operator's roles do not allow it."""


class Conflict(ApiError):
    """409: a precondition (uid, resourceVersion) does not hold; read again and retry."""


class AlreadyExists(ApiError):
    """409 at a POST: the name is taken."""


class Expired(ApiError):
    """410: the list or watch must start anew."""


class Invalid(ApiError):
    """400 or 422: the object is refused; retrying the same object cannot help."""


class Unavailable(ApiError):
    """429, 5xx or no connection, also after retries. A write may or may not have happened."""


class NameTaken(Exception):
    """An object that we should make exists and is not ours. It is never taken over."""

    def __init__(self, resource: Resource, key: Key, holder: str) -> None:
        super().__init__(
            f"{resource.kind} `{key}` must not exist yet or belong to us, but belongs to {holder}: rename or delete it"
        )
        self.resource = resource
        self.key = key
        self.holder = holder


class OwnerChanged(Exception):
    """The root object was deleted, replaced or is being deleted since the reconcile began: start over."""


class StillTerminating(Exception):
    """An object that must be made anew is still being deleted: try again when it is gone."""

    def __init__(self, resource: Resource, key: Key) -> None:
        super().__init__(f"{resource.kind} `{key}` is still being deleted")
        self.resource = resource
        self.key = key


_BY_STATUS: dict[int, type[ApiError]] = {
    400: Invalid,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    422: Invalid,
    429: Unavailable,
}


def api_error(status: int, reason: str, message: str) -> ApiError:
    """The exception for an error answer."""
    if status == 409 and reason == "AlreadyExists":
        return AlreadyExists(status, reason, message)
    kind = Unavailable if status >= 500 else _BY_STATUS.get(status, ApiError)
    return kind(status, reason, message)
