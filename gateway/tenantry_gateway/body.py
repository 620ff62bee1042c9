"""What a request may say: an allow-list of fields per route, each with its check. All of it before anything is queued.

A list of what is forbidden always misses the engine's next extension, so an unknown field is a 400 that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from .errors import ApiError, invalid

MAX_DEPTH = 48
MAX_MESSAGES = 4096
MAX_SEQUENCES = 1024
MAX_TOKENS = 1 << 20
DEFAULT_COMPLETION_TOKENS = 16
# What the chat template may add, as tokens: at its start and end, and around each message.
TEMPLATE_TOKENS = 64
MESSAGE_TOKENS = 16

Check = Callable[[str, Any], None]


@dataclass(frozen=True)
class Request:
    """A valid body. `fields` is what goes to the engine beside model, stream, prompt or messages and the token cap."""

    model: str
    stream: bool
    include_usage: bool
    user: str | None
    fields: dict[str, Any]
    messages: list[dict[str, Any]]
    prompts: list[str]
    choices: int
    max_tokens: int | None

    @property
    def sequences(self) -> int:
        """Sequences that the engine decodes for it: prompts times choices of each."""
        return max(1, len(self.prompts)) * self.choices


def parse(raw: bytes, chat: bool) -> Request:
    """Check a body of /v1/chat/completions (`chat`) or /v1/completions. Raises ApiError 400 naming the field."""
    body = _load(raw)
    checks = _CHAT if chat else _COMPLETION
    for name, value in body.items():
        check = checks.get(name)
        if check is None:
            raise ApiError(
                400,
                "unknown_field",
                f"`{name[:128]}` must be left out: this route does not take it",
                name[:128],
            )
        if value is not None:
            check(name, value)
    given = {name: value for name, value in body.items() if value is not None}
    if "model" not in given:
        raise invalid("model", "must be given, see GET /v1/models", "missing_field")
    content = "messages" if chat else "prompt"
    if content not in given:
        raise invalid(content, "must be given", "missing_field")
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise invalid("max_tokens", "must not stand beside `max_completion_tokens`; leave one of them out")
    n = given.get("n", 1)
    if "stream_options" in given and not given.get("stream"):
        raise invalid("stream_options", "must stand beside `stream: true` only")
    if given.get("best_of", n) < n:
        raise invalid("best_of", "must be at least `n`")
    prompt = given.get("prompt", [])
    max_tokens = given.get("max_tokens", given.get("max_completion_tokens"))
    return Request(
        model=given["model"],
        stream=given.get("stream", False),
        include_usage=bool((given.get("stream_options") or {}).get("include_usage")),
        user=given.get("user"),
        fields={name: value for name, value in given.items() if name not in _OURS},
        messages=given.get("messages", []),
        prompts=[prompt] if isinstance(prompt, str) else prompt,
        choices=max(n, given.get("best_of", n)),
        max_tokens=max_tokens if chat else (max_tokens or DEFAULT_COMPLETION_TOKENS),
    )


def forwarded(request: Request, messages: list[dict[str, Any]], model: str, max_tokens: int) -> bytes:
    """The body for the engine: served name instead of alias, a token cap always, usage always asked for."""
    body: dict[str, Any] = {
        "model": model,
        **request.fields,
        "max_tokens": max_tokens,
        "stream": request.stream,
    }
    if request.stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if request.prompts:
        body["prompt"] = request.prompts[0] if len(request.prompts) == 1 else request.prompts
    else:
        body["messages"] = messages
    return orjson.dumps(body)


def input_bound(request: Request, messages: list[dict[str, Any]]) -> int:
    """Most tokens that the input can have: no tokenizer with special tokens disabled makes more tokens than bytes."""
    if request.prompts:
        return sum(len(prompt.encode()) + 1 for prompt in request.prompts)
    tools = request.fields.get("tools")
    size = len(orjson.dumps(tools)) if tools else 0
    for message in messages:
        size += MESSAGE_TOKENS + sum(
            len(value.encode()) if isinstance(value, str) else len(orjson.dumps(value))
            for name, value in message.items()
            if name != "role"
        )
    return TEMPLATE_TOKENS + size


def _load(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(
            400, "invalid_json", f"the body must be JSON: {error.msg} at byte {error.pos}"
        ) from error
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return body
    raise ApiError(400, "too_deep", f"the body must nest at most {MAX_DEPTH} levels deep")


def _number(low: float, high: float) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(name, f"must be a number from {low:g} to {high:g}")

    return check


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(name, f"must be an integer from {low} to {high}")

    return check


def _string(length: int) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or len(value) > length:
            raise invalid(name, f"must be a string of at most {length} characters")

    return check


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise invalid(name, "must be true or false")


def _stop(name: str, value: Any) -> None:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not 0 < len(values) <= 16:
        raise invalid(name, "must be a string or a list of 1 to 16 strings")
    if not all(isinstance(v, str) and 0 < len(v) <= 256 for v in values):
        raise invalid(name, "must hold strings of 1 to 256 characters")


def _token_ids(name: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) > 64:
        raise invalid(name, "must be a list of at most 64 token ids")
    for index, token in enumerate(value):
        _integer(0, 1 << 31)(f"{name}[{index}]", token)


def _logit_bias(name: str, value: Any) -> None:
    if not isinstance(value, dict) or len(value) > 1024:
        raise invalid(name, "must be an object of at most 1024 token ids")
    for token, bias in value.items():
        if not token.isdecimal() or len(token) > 9:
            raise invalid(name, "must have token ids as its keys")
        _number(-100, 100)(f"{name}.{token}", bias)


def _stream_options(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid(name, "must be an object")
    for key, option in value.items():
        if key not in ("include_usage", "include_obfuscation"):
            raise ApiError(
                400, "unknown_field", f"`{name}.{key[:128]}` must be left out", f"{name}.{key[:128]}"
            )
        if option is not None:
            _boolean(f"{name}.{key}", option)


def _objects(length: int) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) > length or not all(isinstance(v, dict) for v in value):
            raise invalid(name, f"must be a list of at most {length} objects")

    return check


def _object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid(name, "must be an object")


def _tool_choice(name: str, value: Any) -> None:
    if not isinstance(value, dict) and value not in ("none", "auto", "required"):
        raise invalid(name, "must be `none`, `auto`, `required` or an object that names a function")


def _prompt(name: str, value: Any) -> None:
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MAX_SEQUENCES:
        raise invalid(name, f"must be a string or a list of 1 to {MAX_SEQUENCES} strings")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid(name, "must be text; token ids are not taken")


_ROLES = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "refusal", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}


def _messages(name: str, value: Any) -> None:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise invalid(name, f"must be a list of 1 to {MAX_MESSAGES} messages")
    for index, message in enumerate(value):
        _message(f"{name}[{index}]", message)


def _message(name: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise invalid(name, "must be an object")
    fields = _ROLES.get(message["role"]) if isinstance(message.get("role"), str) else None
    if fields is None:
        raise invalid(f"{name}.role", f"must be one of {', '.join(f'`{role}`' for role in _ROLES)}")
    for key, value in message.items():
        if key not in fields:
            raise ApiError(
                400, "unknown_field", f"`{name}.{key[:128]}` must be left out", f"{name}.{key[:128]}"
            )
        if key in ("name", "refusal", "tool_call_id") and value is not None:
            _string(1 << 20)(f"{name}.{key}", value)
    if message.get("tool_calls") is not None:
        _objects(128)(f"{name}.tool_calls", message["tool_calls"])
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise invalid(f"{name}.content", "must be given", "missing_field")
    elif isinstance(content, list):
        for index, part in enumerate(content):
            _part(f"{name}.content[{index}]", part)
    elif not isinstance(content, str):
        raise invalid(f"{name}.content", "must be a string or a list of text parts")


def _part(name: str, part: Any) -> None:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise invalid(f"{name}.type", "must be `text`; the models served here take no other content")
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise invalid(name, "must hold `type` and `text`, and nothing else")


_COMMON: dict[str, Check] = {
    "model": _string(128),
    "stream": _boolean,
    "stream_options": _stream_options,
    "max_tokens": _integer(1, MAX_TOKENS),
    "n": _integer(1, MAX_SEQUENCES),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _integer(-1, 1 << 20),
    "min_p": _number(0, 1),
    "min_tokens": _integer(0, MAX_TOKENS),
    "repetition_penalty": _number(0.01, 10),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": _logit_bias,
    "seed": _integer(-(1 << 63), (1 << 63) - 1),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "user": _string(512),
}
_CHAT: dict[str, Check] = {
    **_COMMON,
    "messages": _messages,
    "max_completion_tokens": _integer(1, MAX_TOKENS),
    "logprobs": _boolean,
    "top_logprobs": _integer(0, 20),
    "tools": _objects(128),
    "tool_choice": _tool_choice,
    "parallel_tool_calls": _boolean,
    "response_format": _object,
}
_COMPLETION: dict[str, Check] = {
    **_COMMON,
    "prompt": _prompt,
    "best_of": _integer(1, MAX_SEQUENCES),
    "logprobs": _integer(0, 20),
}
_OURS = {
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "user",
}
