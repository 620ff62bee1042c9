"""What a client is told: OpenAI-shaped errors with a word (`code`), and `Retry-After` exactly when waiting helps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import orjson

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


@dataclass
class ApiError(Exception):
    """An answer that is an error. `retry_after` in seconds, None where waiting does not help."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    def body(self) -> bytes:
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": TYPES.get(self.status, "server_error"),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def all_headers(self) -> dict[str, str]:
        if self.retry_after is None:
            return self.headers
        return {**self.headers, "retry-after": str(max(1, math.ceil(self.retry_after)))}


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field; `message` goes on after its name."""
    return ApiError(400, code, f"`{param}` {message}", param)


def unauthorized() -> ApiError:
    """The same for a missing, malformed, unknown, foreign, revoked or expired key."""
    return ApiError(
        401,
        "invalid_api_key",
        "the API key must be a valid key of a tenant, sent as `Authorization: Bearer tk_...`",
        headers={"www-authenticate": "Bearer"},
    )


def model_not_found(name: str) -> ApiError:
    """The same for a model that does not exist and for one that belongs to someone else."""
    return ApiError(
        404,
        "model_not_found",
        f"`model` must be one of your models (see GET /v1/models); `{name[:128]}` is not",
        "model",
    )
