"""An engine that does what a test tells it and knows the truth of what it made; objects as Kubernetes sends them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tenantry.api import names
from tenantry.api.identity import IdentityError, Verifier


@dataclass
class Call:
    """One completion as the engine saw it. `generated` grows while it runs; `ended` once nobody computes any more."""

    path: str
    headers: dict[str, str]
    claims: dict[str, Any]
    body: dict[str, Any]
    input: int
    generated: int = 0
    cancelled: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Behaviour:
    """How a completion runs. `before` is awaited ahead of the head, `each` ahead of every token (index from 0)."""

    tokens: int = 3
    status: int = 200
    error: dict[str, Any] | None = None
    served: str | None = None
    cut_after: int | None = None
    close_before_head: bool = False
    usage: bool = True
    continuous: bool = True
    raw: list[bytes] | None = None
    before: Callable[[], Awaitable[None]] | None = None
    each: Callable[[int], Awaitable[None]] | None = None


class Engine:
    """A replica on loopback with both ports; verifies every token like the real one."""

    def __init__(self, verifier: Verifier, served: set[str], host: str) -> None:
        self.verifier = verifier
        self.base = served
        self.registered: set[str] = set()
        self.resident: set[str] = set()
        self.host = host
        self.slots = 16
        self.context = 4096
        self.draining = False
        self.silent = False
        self.hold = asyncio.Event()
        """While not set, what a poll is answered was true when it came and is sent later."""
        self.hold.set()
        self.outstanding = 0
        self.behaviour = Behaviour()
        self.calls: list[Call] = []
        self.refused: list[str] = []
        self.tokenized = 0
        self.polls = 0
        self._seen: set[str] = set()
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, port: int, admin_port: int) -> None:
        for number, handler in ((port, self._serve), (admin_port, self._admin)):
            self._servers.append(await asyncio.start_server(self._loop(handler), self.host, number))

    async def stop(self) -> None:
        """Die: no listener, no connection."""
        for server in self._servers:
            server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._servers.clear()

    def running(self) -> int:
        return sum(1 for call in self.calls if not call.ended.is_set())

    def _loop(self, handler: Callable[..., Awaitable[bool]]) -> Callable[..., Awaitable[None]]:
        async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            try:
                while await handler(reader, writer):
                    pass
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                pass
            finally:
                self._connections.discard(task)
                writer.transport.abort()

        return connection

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {}
        for line in lines[1:]:
            if line:
                name, _, value = line.partition(": ")
                assert name.lower() not in headers
                headers[name.lower()] = value
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return lines[0].split(" ")[1], headers, body

    @staticmethod
    async def _answer(writer: asyncio.StreamWriter, status: int, body: Any, **headers: str) -> bool:
        raw = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(raw)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + raw)
        await writer.drain()
        return True

    def _verify(self, token: str, path: str, body: bytes) -> dict[str, Any]:
        claims = self.verifier.verify(token, {names.GATEWAY_ISSUER}, path, hashlib.sha256(body).hexdigest())
        if claims["jti"] in self._seen:
            raise IdentityError("replayed")
        self._seen.add(claims["jti"])
        return claims

    async def _admin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        path, headers, body = await self._read(reader)
        self.polls += 1
        if self.silent:
            await asyncio.sleep(3600)
        try:
            self._verify(headers["authorization"].removeprefix("Bearer "), path, body)
        except (IdentityError, KeyError) as error:
            self.refused.append(f"{path}: {error}")
            return await self._answer(writer, 401, {})
        said = {
            "ready": not self.draining,
            "draining": self.draining,
            "slots": self.slots,
            "running": self.running(),
            "waiting": 0,
            "outstandingTokens": self.outstanding,
            "registered": sorted(self.registered),
            "resident": sorted(self.resident),
        }
        await self.hold.wait()
        return await self._answer(writer, 200, said)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        path, headers, raw = await self._read(reader)
        if path == "/v1/models":
            return await self._answer(writer, 200, {"data": [{"id": "base", "max_model_len": self.context}]})
        try:
            claims = self._verify(headers[names.IDENTITY_HEADER], path, raw)
        except (IdentityError, KeyError) as error:
            self.refused.append(f"{path}: {error}")
            return await self._answer(writer, 401, {"error": {"message": "no", "code": "unauthorized"}})
        body = json.loads(raw)
        assert body["model"] == claims["model"]
        count = count_tokens(body)
        if path == "/tokenize":
            self.tokenized += 1
            return await self._answer(
                writer, 200, {"count": count, "tokens": [], "max_model_len": self.context}
            )
        known = self.base | self.registered | self.resident
        if claims["model"] not in known:
            return await self._answer(writer, 404, {"error": {"message": "no", "code": "model_not_found"}})
        call = Call(path, headers, claims, body, count)
        self.calls.append(call)
        gone = asyncio.ensure_future(reader.read(1))
        work = asyncio.ensure_future(self._complete(writer, call, self.behaviour))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                call.cancelled = True
                return False
            return work.result()
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)
            call.ended.set()

    async def _complete(self, writer: asyncio.StreamWriter, call: Call, how: Behaviour) -> bool:
        if how.before:
            await how.before()
        if how.close_before_head:
            return False
        served = how.served if how.served is not None else call.claims["model"]
        if how.status != 200:
            return await self._answer(writer, how.status, {"error": how.error or {"message": "failed"}})
        if call.body["stream"]:
            return await self._stream(writer, call, how, served)
        for index in range(how.tokens):
            if how.each:
                await how.each(index)
            call.generated += 1
            if how.cut_after == call.generated:
                writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 10000\r\n")
                writer.write(f"{names.SERVED_HEADER}: {served}\r\n\r\n{{".encode())
                await writer.drain()
                return False
        text = " ".join(f"w{i}" for i in range(call.generated))
        message = (
            {"message": {"role": "assistant", "content": text}} if "messages" in call.body else {"text": text}
        )
        answer = {
            "id": "x",
            "object": "chat.completion" if "messages" in call.body else "text_completion",
            "created": 1,
            "model": served,
            "choices": [{"index": 0, "finish_reason": "stop", **message}],
            **({"usage": usage(call)} if how.usage else {}),
        }
        return await self._answer(writer, 200, answer, **{names.SERVED_HEADER: served})

    async def _stream(self, writer: asyncio.StreamWriter, call: Call, how: Behaviour, served: str) -> bool:
        writer.write(
            f"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            f"{names.SERVED_HEADER}: {served}\r\n\r\n".encode()
        )

        async def send(data: bytes) -> None:
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()

        if how.raw is not None:
            for piece in how.raw:
                await send(piece)
        asked = call.body.get("stream_options") or {}
        for index in range(0 if how.raw is not None else how.tokens):
            if how.each:
                await how.each(index)
            call.generated += 1
            delta = {"content": f"w{index} "}
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": delta} if "messages" in call.body else {"text": delta["content"]}
            chunk: dict[str, Any] = {
                "id": "x",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": served,
            }
            chunk["choices"] = [choice]
            if how.continuous and asked.get("continuous_usage_stats"):
                chunk["usage"] = usage(call)
            await send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if how.cut_after == call.generated:
                return False
        if how.raw is None:
            if how.usage and asked.get("include_usage"):
                last = {
                    "id": "x",
                    "object": "chat.completion.chunk",
                    "created": 1,
                    "model": served,
                    "choices": [],
                }
                await send(b"data: " + json.dumps({**last, "usage": usage(call)}).encode() + b"\n\n")
            await send(b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def count_tokens(body: dict[str, Any]) -> int:
    """One per word and one per message."""
    if "messages" in body:
        return sum(1 + len(str(m.get("content") or "").split()) for m in body["messages"])
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    return sum(len(prompt.split()) for prompt in prompts)


def usage(call: Call) -> dict[str, Any]:
    return {
        "prompt_tokens": call.input,
        "completion_tokens": call.generated,
        "total_tokens": call.input + call.generated,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


LIMITS = {
    "requestsPerMinute": 6000,
    "tokensPerMinute": 1_000_000,
    "maxInFlight": 8,
    "maxQueued": 100,
    "maxInputTokens": 2000,
    "maxOutputTokens": 100,
}


def tenant(
    name: str,
    keys: list[dict[str, Any]],
    *,
    limits: dict[str, Any] | None = None,
    models: list[dict[str, Any]] | None = None,
    lanes: list[dict[str, Any]] | None = None,
    prompt: dict[str, Any] | None = None,
    weight: int = 1,
    suspend: bool = False,
    lane: str = "Auto",
    uid: str | None = None,
    namespace: str = "system",
) -> dict[str, Any]:
    """A Tenant on the pool `base` whose replicas are `base-fast-0..`."""
    return {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name, "uid": uid or f"uid-{name}"},
        "spec": {
            "tier": "Smb",
            "models": [{"name": "chat", "baseModel": "base"}],
            "auth": {"apiKeys": keys},
            "prompt": prompt or {},
            "suspend": suspend,
        },
        "status": {
            "route": {
                "weight": weight,
                "lane": lane,
                "limits": {**LIMITS, **(limits or {})},
                "pools": [
                    {
                        "name": "base",
                        "uid": "pool-uid",
                        "namespace": namespace,
                        "lanes": lanes
                        or [{"name": "fast", "service": "base-fast", "slots": 16, "replicas": replicas(2)}],
                    }
                ],
                "models": models or [{"name": "chat", "pool": "base", "targets": [{"servedName": "base"}]}],
            }
        },
    }


def replicas(count: int, lane: str = "fast") -> list[str]:
    return [f"base-{lane}-{index}" for index in range(count)]


def endpoint_slice(hosts: dict[str, str], lane: str = "fast", ready: bool = True) -> dict[str, Any]:
    """The EndpointSlice of a lane's Service, by pod name."""
    return {
        "metadata": {
            "name": f"base-{lane}-abc",
            "namespace": "system",
            "labels": {"kubernetes.io/service-name": f"base-{lane}"},
        },
        "endpoints": [
            {"addresses": [host], "conditions": {"ready": ready}, "targetRef": {"kind": "Pod", "name": pod}}
            for pod, host in hosts.items()
        ],
    }
