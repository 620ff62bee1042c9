"""Errors that callers can act on. The innermost module of the engine: imports nothing of ours."""

from __future__ import annotations


class EngineError(Exception):
    """Something that the person who started or configured the engine can put right; the text says how."""


class RequestError(Exception):
    """A request that cannot be served as sent. Becomes an OpenAI-shaped answer.

    `status` is the HTTP status, `code` one word for programs, `param` the field at fault.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        if self.status in (401, 403):
            return "authentication_error"
        if self.status == 404:
            return "not_found_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, object]:
        """`{"error": {...}}`, the shape of every error of every interface."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class AdapterError(Exception):
    """An adapter that this engine cannot serve.

    `reason` is one of BaseModelMismatch, RankTooLarge, UnsupportedConfig, InvalidTensors, TooLarge, Corrupt.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
