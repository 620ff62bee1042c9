"""What tests of the gateway share: one whole gateway on loopback, its engines, and clients of it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from gateway_fakes import Engine, tenant
from tenantry.api import keys
from tenantry.api.identity import Signer, Verifier
from tenantry_gateway.main import Gateway
from tenantry_gateway.settings import Timeouts
from tenantry_gateway.state import State

SALT = b"0123456789abcdef0123456789abcdef"
AUDIENCE = "pool-uid"
ADAPTER = "acme-ml.tone--1.0.0-0123456789ab"
DIGEST = "sha256:" + "0123456789ab" + "0" * 52
TONED: list[dict[str, Any]] = [
    {"name": "chat", "pool": "base", "targets": [{"servedName": "base"}]},
    {"name": "toned", "pool": "base", "targets": [{"servedName": ADAPTER, "digest": DIGEST}]},
]
"""A model without an adapter and one that is answered by `ADAPTER`."""
FAST = Timeouts(body=2, queue=5, first_byte=5, idle=5, total=20, lease=60, header=2)


@dataclass(frozen=True)
class Identity:
    key: Path
    certificates: Path
    signer: Signer
    verifier: Verifier


async def until(condition: Any, seconds: float = 5.0) -> None:
    """Wait for a condition; fail when it does not come true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - any condition, not one of ours
            await asyncio.sleep(0.005)


async def until_answer(ask: Callable[[], Awaitable[int]], wanted: int, seconds: float = 10.0) -> None:
    """Ask again and again until the answer is the wanted one."""
    async with asyncio.timeout(seconds):
        while await ask() != wanted:  # noqa: ASYNC110 - the condition lies in another process
            await asyncio.sleep(0.02)


@dataclass
class World:
    """One gateway with its engines, and clients of it."""

    gateway: Gateway
    engines: list[Engine]
    url: str
    ports: tuple[int, int]
    keys: dict[str, str] = field(default_factory=dict)
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    clients: list[Any] = field(default_factory=list)

    @property
    def state(self) -> State:
        return self.gateway.state

    def put(self, name: str, **options: Any) -> str:
        """Apply a Tenant with one key (the same on every call); returns the key."""
        key = self.keys.setdefault(name, keys.mint(name).key)
        self.items[name] = tenant(name, [{"name": "main", "sha256": keys.hash_key(key)}], **options)
        self.state.put_tenant(self.items[name])
        return key

    def client(self, name: str, **options: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.keys[name], max_retries=0, **options
        )
        self.clients.append(client)
        return client

    def http(self, name: str | None = None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[name]}"} if name else {}
        client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20)
        self.clients.append(client)
        return client

    async def rows(self) -> list[dict[str, Any]]:
        """The ledger: opened records with what closed them."""
        await self.gateway.ledger.flush()
        sql = "SELECT * FROM opened o LEFT JOIN closed c ON c.id = o.id ORDER BY o.id"
        connection = sqlite3.connect(self.gateway.settings.ledger.removeprefix("sqlite:///"))
        connection.row_factory = sqlite3.Row
        try:
            return [dict(row) for row in connection.execute(sql)]
        finally:
            connection.close()

    async def settled(self) -> None:
        """Nothing is left in flight, in queues or on replicas."""
        await until(lambda: self.gateway.limiter.in_flight() == 0 and self.gateway.dispatcher.queued() == 0)
        for replica in self.gateway.replicas.all():
            assert (replica.in_flight, replica.own_tokens, replica.by_tenant) == (0, 0, {})


def chat(text: str = "hello there", **options: Any) -> dict[str, Any]:
    """A body of /v1/chat/completions."""
    return {"model": "chat", "messages": [{"role": "user", "content": text}], **options}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The OpenAI-shaped error of an answer."""
    error = json.loads(response.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)
