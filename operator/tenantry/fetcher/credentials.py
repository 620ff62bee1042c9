"""What a Secret holds for a source: a registry login, an access key pair or a hub token. Pure; no value is ever shown.

A credential goes only to the host that it names itself, so that whoever may write an Adapter but not read the Secret
cannot have it sent to another listed host.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .errors import FetchError, Reason
from .reference import Origin, parse_host

DOCKER_CONFIG = ".dockerconfigjson"
DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class Login:
    """User and password of a registry, or of its token server."""

    user: str = field(repr=False)
    password: str = field(repr=False)

    @property
    def basic(self) -> str:
        """The value of an Authorization header (RFC 7617)."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


@dataclass(frozen=True)
class AccessKey:
    """What signs requests to an object store."""

    id: str = field(repr=False)
    secret: str = field(repr=False)
    region: str = DEFAULT_REGION
    session: str = field(default="", repr=False)


def login(data: Mapping[str, bytes], origin: Origin) -> Login:
    """The registry's entry of a `kubernetes.io/dockerconfigjson` Secret. Raises FetchError(SecretInvalid)."""
    if DOCKER_CONFIG not in data:
        _invalid(f"must be of type kubernetes.io/dockerconfigjson, with the key `{DOCKER_CONFIG}`")
    try:
        auths: Any = json.loads(data[DOCKER_CONFIG])["auths"]
        entries = list(auths.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        _invalid(f"must hold docker's configuration with `auths` in `{DOCKER_CONFIG}`")
    entry = next((entry for name, entry in entries if isinstance(entry, dict) and _names(name, origin)), None)
    if entry is None:
        _invalid(f"must have an entry for `{_short(origin)}` among its `auths`")
    return _login(entry, origin)


def access_key(data: Mapping[str, bytes], origin: Origin) -> AccessKey:
    """An access key pair: `host`, `accessKeyId`, `secretAccessKey`, and `region` and `sessionToken` where needed."""
    _for(data, origin)
    return AccessKey(
        _text(data, "accessKeyId"),
        _text(data, "secretAccessKey"),
        _text(data, "region", DEFAULT_REGION),
        _text(data, "sessionToken", ""),
    )


def hub_token(data: Mapping[str, bytes], origin: Origin) -> str:
    """A hub's access token: `host` and `token`."""
    _for(data, origin)
    return _text(data, "token")


def _login(entry: dict[str, Any], origin: Origin) -> Login:
    user, password = entry.get("username"), entry.get("password")
    if not (isinstance(user, str) and isinstance(password, str)):
        try:
            user, _, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
        except (ValueError, KeyError, TypeError):
            _invalid(f"must hold `auth`, or `username` and `password`, for `{_short(origin)}`")
    if not user or not password:
        _invalid(f"must hold a user and a password for `{_short(origin)}`")
    return Login(user, password)


def _names(name: str, origin: Origin) -> bool:
    """Whether an `auths` key is this registry's: `host[:port]`, also as the URL that older tools write."""
    host = name.removeprefix("https://").removeprefix("http://").partition("/")[0]
    return _same(host, origin)


def _for(data: Mapping[str, bytes], origin: Origin) -> None:
    if not _same(_text(data, "host"), origin):
        _invalid(f"must name `{_short(origin)}` as its `host`, since credentials go to no other")


def _same(text: str, origin: Origin) -> bool:
    try:
        host, port = parse_host(text, "host")
    except ValueError:
        return False
    # Without a port the scheme's own is meant.
    return host == origin.host and (port or (80 if origin.port == 80 else 443)) == origin.port


def _short(origin: Origin) -> str:
    return origin.host if origin.port == 443 else str(origin)


def _text(data: Mapping[str, bytes], key: str, default: str | None = None) -> str:
    if key not in data:
        if default is not None:
            return default
        _invalid(f"must have the key `{key}`")
    try:
        text = data[key].decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    # It becomes a part of a header.
    if not text or not text.isprintable():
        _invalid(f"must have printable ASCII in the key `{key}`")
    return text


def _invalid(what: str) -> NoReturn:
    raise FetchError(Reason.SECRET_INVALID, f"the Secret of `secretRef` {what}")
