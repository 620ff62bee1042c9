"""Asks the gateway for other tenants' models with a key that an admin set aside for this, as a stranger would.

The answer must be the one that an unknown name gets, word for word. No token is generated: the gateway refuses before
anything runs.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from pathlib import Path

import httpx

from tenantry.api import names
from tenantry.evidence import checks
from tenantry.evidence.checks import Refusal
from tenantry.evidence.findings import Finding, blind

from .world import World

NAMES_AT_ONCE = 4


class Door:
    """One stranger for all tenants."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def look(self, foreign: Iterable[str]) -> Finding | None:
        """Whether a few of the foreign names are refused as if they did not exist; None when no key is set aside."""
        path, at = self.world.config.evidence.access_key_file, self.world.evidence.now()
        if path is None or self.world.driver is None:
            return None
        try:
            key = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return blind("the key that is set aside cannot be read", at)
        space = self.world.config.release_namespace
        base = f"http://{names.GATEWAY_SERVICE}.{space}.svc:{names.GATEWAY_PORT}/v1"
        try:
            own = await self._models(base, key)
            asked = _some([name for name in foreign if name not in own], at)
            unknown = f"unknown-{uuid.uuid4().hex}"
            answers = [await self._ask(base, key, name) for name in (*asked, unknown)]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            return blind("the gateway did not answer as it should", at, (type(error).__name__,))
        return checks.door(len(own), answers[:-1], answers[-1], at)

    async def _models(self, base: str, key: str) -> frozenset[str]:
        answer = await self.world.http.get(f"{base}/models", headers={"authorization": f"Bearer {key}"})
        answer.raise_for_status()
        return frozenset(str(entry["id"]) for entry in answer.json()["data"])

    async def _ask(self, base: str, key: str, name: str) -> Refusal:
        body = {"model": name, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}"}
        answer = await self.world.http.post(f"{base}/chat/completions", json=body, headers=headers)
        return Refusal(name, answer.status_code, answer.text if answer.status_code >= 400 else "")


def _some(foreign: list[str], at: float) -> list[str]:
    """Others each time, so that all are asked for in the long run."""
    draw = sorted(set(foreign), key=lambda name: hashlib.sha256(f"{at} {name}".encode()).digest())
    return draw[:NAMES_AT_ONCE]
