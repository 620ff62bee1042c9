"""A hub that speaks the resolve URLs of Hugging Face's: large files lie in a storage of another origin."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Two HTTP servers. What a test changes in here is a lie that the hub or its storage tells."""

    files: dict[str, bytes] = field(default_factory=dict)
    token: str | None = None
    commit: str = COMMIT
    etag: str | None = None
    linked_size: int | None = None
    stored: bytes | None = None
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    stored_asked: list[dict[str, str]] = field(default_factory=list)
    port: int = 0
    storage_port: int = 0

    @property
    def origin(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def storage(self) -> str:
        return f"localhost:{self.storage_port}"

    async def start(self) -> list[web.AppRunner]:
        hub, storage = web.Application(), web.Application()
        hub.router.add_get("/{owner}/{name}/resolve/{commit}/{path:.+}", self._resolve)
        storage.router.add_get("/{path:.+}", self._large)
        runners = []
        for app in (hub, storage):
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
        self.port, self.storage_port = (runner.addresses[0][1] for runner in runners)
        return runners

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        proof = request.headers.get("authorization")
        self.asked.append((request.path, proof))
        if self.token is not None and proof != f"Bearer {self.token}":
            return web.Response(status=401, headers={"x-error-code": "GatedRepo"})
        path = request.match_info["path"]
        raw = self.files.get(path)
        if raw is None or request.match_info["commit"] != COMMIT:
            return web.Response(status=404, headers={"x-error-code": "EntryNotFound"})
        headers = {"x-repo-commit": self.commit}
        if not path.endswith(".safetensors"):
            blob = b"blob %d\0" % len(raw) + raw
            etag = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
            return web.Response(body=raw, headers={**headers, "etag": f'"{etag}"'})
        size = len(raw) if self.linked_size is None else self.linked_size
        headers |= {
            "x-linked-size": str(size),
            "x-linked-etag": f'"{self.etag or hashlib.sha256(raw).hexdigest()}"',
            "location": f"http://{self.storage}/{path}?signature=x",
        }
        return web.Response(status=302, headers=headers)

    async def _large(self, request: web.Request) -> web.Response:
        self.stored_asked.append({name.lower(): value for name, value in request.headers.items()})
        raw = self.files[request.match_info["path"]] if self.stored is None else self.stored
        return web.Response(body=raw)
