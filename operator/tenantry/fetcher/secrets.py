"""Reads the Secret that an Adapter names, in the Adapter's own namespace, where its owners allowed that by a Role."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable

from tenantry.cluster.errors import ApiError, Forbidden, NotFound
from tenantry.cluster.resources import Resource
from tenantry.cluster.transport import Transport, load_configuration

from .errors import FetchError, Reason

SECRET = Resource("", "v1", "secrets", "Secret", True)
MAX_VALUE_BYTES = 64 << 10


async def in_cluster() -> Transport:
    """As the fetcher's own service account."""
    return Transport(
        await load_configuration(None), user_agent="tenantry-fetcher", attempts=3, timeout_seconds=5.0
    )


class Secrets:
    """Nothing is kept: every pull reads anew, so that a rotated or withdrawn Secret counts at once."""

    def __init__(self, connect: Callable[[], Awaitable[Transport]] = in_cluster) -> None:
        self._connect = connect
        self._transport: Transport | None = None

    async def read(self, namespace: str, name: str) -> dict[str, bytes]:
        """The Secret's values. Raises FetchError, whose text holds none of them."""
        where = f"Secret `{namespace}/{name}`"
        try:
            if self._transport is None:
                self._transport = await self._connect()
            secret = await self._transport.request("GET", SECRET.path(namespace, name))
        except NotFound as error:
            raise FetchError(
                Reason.SECRET_NOT_FOUND,
                f"`secretRef` must name a Secret of the namespace: there is no {where}",
            ) from error
        except Forbidden as error:
            raise FetchError(
                Reason.SECRET_FORBIDDEN,
                f"the fetcher must be allowed to read {where}: make a Role there with verb `get` for this name, "
                "and a RoleBinding to the service account `tenantry-fetcher` of the release",
            ) from error
        except (ApiError, OSError) as error:
            raise FetchError(
                Reason.SOURCE_UNAVAILABLE, f"{where} cannot be read now: the API server does not answer"
            ) from error
        return _values(secret.get("data") or {}, where)

    async def close(self) -> None:
        """End the connections."""
        if self._transport is not None:
            await self._transport.close()


def _values(data: dict[str, str], where: str) -> dict[str, bytes]:
    try:
        values = {key: base64.b64decode(value, validate=True) for key, value in data.items()}
    except (binascii.Error, TypeError):
        values = {}
    if not values or any(len(value) > MAX_VALUE_BYTES for value in values.values()):
        raise FetchError(
            Reason.SECRET_INVALID, f"{where} must hold values of at most {MAX_VALUE_BYTES} bytes each"
        )
    return values
