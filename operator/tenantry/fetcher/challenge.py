"""What a registry's 401 asks for (RFC 9110; the distribution protocol's token flow): Basic, or a token of its server.

The token server is named by the registry, so it is as foreign as any redirect: it is asked only where an admin listed
it, through the same guarded transport.
"""

from __future__ import annotations

import json
import re

import httpx

from .credentials import Login
from .errors import FetchError, Reason
from .session import Session, bounded

MAX_TOKEN_BYTES = 64 << 10
_PARAMETER = re.compile(r'(realm|service|scope)="([^"]{0,1024})"')


async def answer(session: Session, challenge: str, login: Login | None) -> str:
    """The Authorization header that the registry asks for. Raises FetchError."""
    scheme = challenge.partition(" ")[0].lower()
    fields = dict(_PARAMETER.findall(challenge))
    if scheme == "basic" and login is not None:
        return login.basic
    if scheme != "bearer" or "realm" not in fields:
        raise FetchError(
            Reason.ACCESS_DENIED,
            f"`{session.host}` wants credentials: it must allow anonymous reads, or `secretRef` must name them",
        )
    query = {name: fields[name] for name in ("service", "scope") if name in fields}
    url = httpx.URL(fields["realm"]).copy_merge_params(query)
    headers = {"accept-encoding": "identity", **({"authorization": login.basic} if login else {})}
    # Sent without following redirects: they could lead the credentials away.
    response = await session.client.send(
        session.client.build_request("GET", url, headers=headers), stream=True
    )
    try:
        if response.status_code != 200:
            reason = (
                Reason.ACCESS_DENIED if response.status_code in (400, 401, 403) else Reason.SOURCE_UNAVAILABLE
            )
            raise FetchError(reason, f"the token server answered HTTP {response.status_code}")
        return f"Bearer {_token(await bounded(response, MAX_TOKEN_BYTES, 'the token'))}"
    finally:
        await response.aclose()


def _token(raw: bytes) -> str:
    try:
        fields = json.loads(raw)
        token = fields.get("token") or fields.get("access_token")
    except (ValueError, AttributeError, RecursionError):
        token = None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise FetchError(Reason.SOURCE_UNAVAILABLE, "the token server must answer with a `token`")
    return token
