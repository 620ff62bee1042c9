"""The replica under soak: started, killed, asked and measured; and the small adapters and prompts it is asked with."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import soak_memory
import torch
from safetensors.torch import save_file
from tenantry_engine.digest import folder_blob, folder_digest
from workload import dying_with_me, free_port

MAX_TOKENS = 24
SLOTS, MAX_LENGTH, POOL_PAGES = 6, 256, 220
_RANKS = (1, 2, 3, 4, 8)
_START_SECONDS = 180
_END_SECONDS = 30
_IDLE_SECONDS = 2.0
"""An idle connection is used again for so long: less than the server keeps it, which could close it under a request."""


def make_small_adapters(model: Path, folder: Path, count: int, seed: int) -> tuple[dict[str, Path], int]:
    """PEFT folders over q and v with small ranks, strong enough to change answers; and the size of the vocabulary."""
    config = json.loads((model / "config.json").read_text())
    hidden, layers, head = config["hidden_size"], config["num_hidden_layers"], config.get("head_dim")
    head = head or hidden // config["num_attention_heads"]
    wide = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    made = {}
    for index in range(count):
        rank = _RANKS[index % len(_RANKS)]
        generator = torch.Generator().manual_seed(seed * 100_003 + index)
        tensors = {}
        for layer in range(layers):
            for name, width in wide.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                for half, shape in (("lora_A", (rank, hidden)), ("lora_B", (width, rank))):
                    tensors[f"{prefix}.{half}.weight"] = torch.randn(shape, generator=generator) * 0.2
        path = folder / f"adapter-{index:04d}"
        path.mkdir(parents=True)
        save_file(tensors, str(path / "adapter_model.safetensors"))
        about = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": list(wide),
            "task_type": "CAUSAL_LM",
        }
        (path / "adapter_config.json").write_text(json.dumps(about))
        made[path.name] = path
    return made, config["vocab_size"]


@dataclass(frozen=True)
class Request:
    """A prompt, and how its tokens are chosen: greedily, or drawn with a seed."""

    prompt: list[int]
    seed: int | None = None

    def body(self, model: str, count: int) -> dict[str, Any]:
        """Of a completion of `count` tokens."""
        drawn = (
            {"temperature": 0} if self.seed is None else {"temperature": 1, "top_p": 0.9, "seed": self.seed}
        )
        fields = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": count,
            "ignore_eos": True,
            "logprobs": 1,
        }
        return {**fields, **drawn}


def make_work(draw: random.Random, names: list[str], vocab: int) -> dict[tuple[str, int], Request]:
    """A request for each name (eight for the base model), some with a beginning in common, a quarter drawn."""
    shared = [[draw.randrange(10, vocab) for _ in range(48)] for _ in range(4)]
    work = {}
    for name in names:
        for number in range(8 if name == "base" else 1):
            begin = draw.choice(shared) if draw.random() < 0.5 else []
            prompt = begin + [draw.randrange(10, vocab) for _ in range(draw.randint(1, 60))]
            work[name, number] = Request(prompt, draw.randrange(1 << 30) if draw.random() < 0.25 else None)
    return work


class SoakReplica:
    """One replica after another on the same data folder. Its errors are httpx's."""

    def __init__(self, model: Path, folder: Path, dtype: str, adapters: dict[str, Path]) -> None:
        self.life = 0  # which replica this is
        self._model, self._folder, self._dtype = model, folder, dtype
        self._adapters = adapters
        self._digests = {name: folder_digest(path) for name, path in adapters.items()}
        self._process: subprocess.Popen[bytes] | None = None
        config = json.loads((model / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        elements = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * 16 * head
        self._pool_bytes = POOL_PAGES * elements * (4 if dtype == "float32" else 2)

    async def start(self) -> None:
        """A new replica, ready. Nobody asks while it starts."""
        if self.life:
            await self._close_clients()
        port, admin = free_port(), free_port()
        command = [
            sys.executable, "-m", "tenantry_engine.main", "--model", str(self._model), "--model-name", "base",
            "--dev-open", "--port", str(port), "--admin-port", str(admin), "--data-dir", str(self._folder / "data"),
            "--dtype", self._dtype, "--slots", str(SLOTS), "--step-tokens", "64", "--max-model-len", str(MAX_LENGTH),
            "--pool-bytes", str(self._pool_bytes), "--max-rank", "8", "--target-modules", "q_proj,v_proj",
        ]  # fmt: skip
        self.life += 1
        with (self._folder / f"replica-{self.life}.log").open("w") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
                dying_with_me(command), stderr=log, env=soak_memory.environment()
            )
        self._serving, self._admin = (_client(f"http://127.0.0.1:{p}") for p in (port, admin))
        async with asyncio.timeout(_START_SECONDS):
            while True:
                if self._process.poll() is not None:
                    raise RuntimeError(self.last_words())
                try:
                    if (await self._admin.get("/readyz")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)
        http = psutil.Process(self._process.pid)
        [engine] = http.children()
        self._processes = {"http": http, "engine": engine}

    async def kill(self, victim: str) -> list[int]:
        """SIGKILL to `http` or `engine`; ids of the processes that were left after a while."""
        processes = list(self._processes.values())
        self._processes[victim].send_signal(signal.SIGKILL)
        _, left = await asyncio.to_thread(psutil.wait_procs, processes, _END_SECONDS)
        assert self._process is not None
        await asyncio.to_thread(self._process.wait)
        for process in left:
            process.kill()
        return [process.pid for process in left]

    async def end(self) -> None:
        """Asks the replica to end."""
        if self._process is None:
            return
        await self._close_clients()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _close_clients(self) -> None:
        await self._serving.aclose()
        await self._admin.aclose()

    @property
    def ended(self) -> bool:
        """Whether the replica is no longer there."""
        return self._process is not None and self._process.poll() is not None

    def last_words(self) -> str:
        """The end of the replica's log."""
        lines = (self._folder / f"replica-{self.life}.log").read_text().splitlines()
        return "\n".join(lines[-30:])

    # admin port

    async def declare(self, fence: int, names: list[str]) -> dict[str, Any]:
        """Makes `names` the declared set; requests of others may end within a second."""
        body = {
            "fence": {"epoch": self.life, "counter": fence},
            "drainSeconds": 1,
            "adapters": [{"name": name, "digest": self._digests[name]} for name in names],
        }
        return _json(await self._admin.put("/admin/v1/adapters", json=body))

    async def push(self, name: str) -> None:
        """The bytes of an adapter, unless they are no longer wanted or being checked already."""
        body = b"".join(folder_blob(self._adapters[name]))
        answer = await self._admin.put(f"/admin/v1/blobs/{self._digests[name]}", content=body)
        if answer.status_code != 409:
            answer.raise_for_status()

    async def report(self) -> dict[str, Any]:
        """As the operator sees it."""
        return _json(await self._admin.get("/admin/v1/adapters"))

    async def load(self) -> dict[str, Any]:
        """As the gateway sees it."""
        return _json(await self._admin.get("/admin/v1/load"))

    async def sample(self) -> soak_memory.Sample:
        """What both processes hold, with no client connected."""
        await self._close_clients()
        self._serving, self._admin = (_client(str(c.base_url)) for c in (self._serving, self._admin))
        await asyncio.sleep(0.2)  # the other side sees the ends of the connections
        found = {"time": time.monotonic()}
        for who, process in self._processes.items():
            for what, value in (await asyncio.to_thread(soak_memory.read, process)).items():
                found[f"{who} {what}"] = value
        return found

    def stored(self) -> int:
        """Adapters whose bytes are on the replica's disk."""
        return len(list((self._folder / "data/blobs").iterdir()))

    # serving port

    async def complete(self, model: str, request: Request, count: int, n: int = 1) -> httpx.Response:
        """An answer with its scores. Raises HTTPStatusError whose first argument is the error's code."""
        answer = await self._serving.post("/v1/completions", json=request.body(model, count) | {"n": n})
        if answer.status_code != 200:
            raise _refusal(answer)
        return answer

    async def stream(
        self, model: str, request: Request, count: int, leave: int | None
    ) -> tuple[list[str], list[float]]:
        """The same as a stream; `leave` = go away after so many tokens. Raises as `complete` does."""
        tokens: list[str] = []
        logprobs: list[float] = []
        body = request.body(model, count) | {"stream": True}
        async with self._serving.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise _refusal(answer)
            ended = False
            async for line in answer.aiter_lines():
                if leave is not None and len(tokens) >= leave:
                    return tokens, logprobs
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    value = json.loads(line.removeprefix("data: "))
                    if "error" in value:
                        raise _refusal(answer, value["error"]["code"])
                    scored = value["choices"][0]["logprobs"]
                    if scored:
                        tokens += scored["tokens"]
                        logprobs += scored["token_logprobs"]
            if not ended:
                raise httpx.ReadError("the stream was cut")
        return tokens, logprobs


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS)
    return httpx.AsyncClient(base_url=url, timeout=300, limits=limits)


def _refusal(answer: httpx.Response, code: str | None = None) -> httpx.HTTPStatusError:
    if code is None:
        try:
            code = answer.json()["error"]["code"]
        except (ValueError, KeyError, TypeError):
            code = f"no error in OpenAI's shape: {answer.text[:100]!r}"
    return httpx.HTTPStatusError(str(code), request=answer.request, response=answer)


def _json(answer: httpx.Response) -> dict[str, Any]:
    answer.raise_for_status()
    value: dict[str, Any] = answer.json()
    return value
