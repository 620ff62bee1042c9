"""Engine replicas, a fetcher and a gateway's metrics over HTTP, as the wire reference has them; they fail on demand.

The real engine and fetcher are tested in rooms of their own; these exist to inject faults.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Wire = dict[str, Any]


@dataclass
class Engine:
    """One replica: what it was told, which bytes it has."""

    limit: int = 1000
    model: str = "tiny"
    requests: int = 0
    fence: tuple[int, int] = (0, 0)
    adapters: dict[str, Wire] = field(default_factory=dict)
    blobs: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)
    drained: bool = False
    down: bool = False
    declared: list[list[str]] = field(default_factory=list)
    separation: Wire | None = None
    smoked: list[str] = field(default_factory=list)
    dumb: dict[str, int] = field(default_factory=dict)

    def smoke(self, body: Wire) -> web.Response:
        """Digests in `dumb` are answered with their status."""
        entry = self.adapters.get(body["name"])
        if entry is None or entry["digest"] not in self.blobs or entry["tenant"] != body["tenant"]:
            return error(404, "model_not_found")
        if body["digest"] in self.dumb:
            return error(self.dumb[body["digest"]], "smoke_failed")
        self.smoked.append(body["name"])
        return web.json_response({"tokens": 2})

    def declare(self, body: Wire) -> web.Response:
        fence = (body["fence"]["epoch"], body["fence"]["counter"])
        if fence < self.fence:
            return error(409, "fenced")
        if len(body["adapters"]) > self.limit:
            return error(400, "too_many")
        wanted = {entry["name"]: entry for entry in body["adapters"]}
        if any(self.adapters.get(n, entry)["digest"] != entry["digest"] for n, entry in wanted.items()):
            return error(409, "name_taken")
        self.fence = fence
        self.adapters = {name: dict(entry) for name, entry in wanted.items()}
        self.declared.append(sorted(wanted))
        return self.report()

    def report(self) -> web.Response:
        adapters = []
        for name, entry in sorted(self.adapters.items()):
            digest = entry["digest"]
            state = "Registered" if digest in self.blobs else "Missing"
            reason = self.broken.get(digest, "") if state == "Registered" else ""
            adapters.append({**entry, "name": name, "state": "Failed" if reason else state, "reason": reason})
        return web.json_response(
            {
                "fence": {"epoch": self.fence[0], "counter": self.fence[1]},
                "ready": not self.drained,
                "draining": self.drained,
                "model": {"name": self.model, "digest": ""},
                "capacity": {"maxRank": 64, "maxRegistered": self.limit, "slots": 8},
                "adapters": adapters,
                "requests": self.requests,
                "separation": self.separation,
            }
        )


def error(status: int, code: str) -> web.Response:
    return web.json_response(
        {"error": {"message": code, "type": "x", "param": None, "code": code}}, status=status
    )


@dataclass
class Gateway:
    """What a gateway answers of every tenant; `silent`: it hangs up."""

    routes: list[str] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    silent: bool = False


@dataclass
class Fleet:
    """All replicas, gateways and the fetcher behind one port.

    `/<pod>/admin/v1/...`, `/gateways/<pod>/tenants/<name>` and `/fetcher/v1/transfers`.
    """

    engines: dict[str, Engine] = field(default_factory=dict)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    held_back: set[str] = field(default_factory=set)
    gateways: dict[str, Gateway] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    signatures: dict[str, Wire] = field(default_factory=dict)
    transfers: list[Wire] = field(default_factory=list)
    gateway: str = ""
    broken_gateway: bool = False
    port: int = 0

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{pod}/admin/v1/{call}", self._admin)
        app.router.add_get("/gateways/{pod}/tenants/{name}", self._places)
        app.router.add_post("/fetcher/v1/transfers", self._transfer)
        app.router.add_get("/gateway/metrics/rollouts", self._metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    def url(self, pod: str) -> str:
        return f"http://127.0.0.1:{self.port}/{pod}"

    async def _metrics(self, _: web.Request) -> web.Response:
        """What the one gateway tells."""
        return error(500, "broken") if self.broken_gateway else web.Response(text=self.gateway)

    async def _admin(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"].startswith("Bearer ")
        engine = self.engines.get(request.match_info["pod"])
        if engine is None or engine.down:
            if request.transport is not None:
                request.transport.abort()
            await asyncio.sleep(0)
            return error(503, "down")
        if request.match_info["call"] == "drain":
            engine.drained = True
            return web.json_response({})
        if request.match_info["call"] == "smoke":
            return engine.smoke(await request.json())
        return engine.declare(await request.json()) if request.method == "PUT" else engine.report()

    async def _places(self, request: web.Request) -> web.Response:
        gateway = self.gateways.get(request.match_info["pod"])
        if gateway is None or gateway.silent:
            return error(503, "down")
        return web.json_response({"routes": gateway.routes, "requests": gateway.requests})

    async def _transfer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.transfers.append(body)
        digest = body["digest"]
        artifact: Wire = {"state": "Verified", "bytes": 100}
        if "verification" in body:
            artifact["signature"] = self.signatures.get(
                digest, {"verified": True, "message": "key `release`"}
            )
        if digest in self.held_back:
            artifact = {"state": "Pulling"}
        elif digest in self.refused:
            reason, message = self.refused[digest]
            artifact = {"state": "Failed", "reason": reason, "message": message}
        verified = artifact["state"] == "Verified"
        pushes = []
        for replica in body["replicas"]:
            pod = replica["name"].partition("/")[2]
            if verified and pod in self.engines:
                self.engines[pod].blobs.add(digest)
            pushes.append({"name": replica["name"], "state": "Pushed" if verified else "Waiting"})
        facts = {"rank": self.ranks.get(digest, 8), "baseModel": "tiny", "targetModules": ["q_proj"]}
        answer = {
            "digest": digest,
            "artifact": artifact,
            "adapter": facts if verified else None,
            "replicas": pushes,
        }
        return web.json_response(answer)
