"""The work that the engine's benchmarks share: adapters of the rank cycle, prompts, a client, a replica to ask."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "e2e"))

from cluster.process import dying_with_me, free_port

RANKS = (8, 16, 8, 16, 32, 8, 16, 64)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONCURRENT, INPUT, OUTPUT = 16, 64, 48


def model_folder() -> Path:
    """SmolLM2-135M as examples/models/convert_smollm2.py leaves it."""
    folder = Path(os.environ.get("TENANTRY_MODEL_DIR", Path.home() / ".cache/tenantry/models/smollm2-135m"))
    if not (folder / "model.safetensors").is_file():
        script = Path(__file__).resolve().parents[2] / "examples/models/convert_smollm2.py"
        subprocess.run([sys.executable, str(script)], check=True)
    return folder


def make_adapters(model: Path, folder: Path, count: int) -> list[str]:
    """PEFT folders over all seven projections with the rank cycle; their names. Small random weights."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    width = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = dict(
        zip(
            PROJECTIONS,
            [
                (hidden, width),
                (hidden, kv),
                (hidden, kv),
                (width, hidden),
                (hidden, inner),
                (hidden, inner),
                (inner, hidden),
            ],
            strict=True,
        )
    )
    names = []
    for index in range(count):
        rank = RANKS[index % len(RANKS)]
        generator = torch.Generator().manual_seed(index)
        tensors = {}
        for layer in range(layers):
            for name, (wide_in, wide_out) in shapes.items():
                block = "self_attn" if name in PROJECTIONS[:4] else "mlp"
                prefix = f"base_model.model.model.layers.{layer}.{block}.{name}"
                for half, shape in (("lora_A", (rank, wide_in)), ("lora_B", (wide_out, rank))):
                    values = torch.randn(shape, generator=generator) * 0.01
                    tensors[f"{prefix}.{half}.weight"] = values.bfloat16()
        path = folder / f"adapter-{index:04d}"
        path.mkdir(parents=True)
        save_file(tensors, str(path / "adapter_model.safetensors"))
        (path / "adapter_config.json").write_text(
            json.dumps(
                {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(PROJECTIONS),
                 "task_type": "CAUSAL_LM", "base_model_name_or_path": model.name}
            )
        )  # fmt: skip
        names.append(path.name)
    return names


def prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 64 tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(100, vocab) for _ in range(INPUT)] for _ in range(count)]


@dataclass
class Server:
    """Anything that answers OpenAI's completions on a port of this machine."""

    port: int

    async def generate(self, served: list[str], asked: list[list[int]]) -> float:
        """All requests, 16 at a time, over HTTP; output tokens per second."""
        waiting = list(zip(served, asked, strict=True))
        waiting.reverse()
        made = 0
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=600) as client:

            async def work() -> None:
                nonlocal made
                while waiting:
                    model, prompt = waiting.pop()
                    body = {
                        "model": model,
                        "prompt": prompt,
                        "max_tokens": OUTPUT,
                        "temperature": 0,
                        "ignore_eos": True,
                    }
                    answer = await client.post("/v1/completions", json=body)
                    answer.raise_for_status()
                    made += answer.json()["usage"]["completion_tokens"]

            started = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(CONCURRENT)))
            return made / (time.perf_counter() - started)


@dataclass
class Replica(Server):
    """A replica of Tenantry's engine, and its second port."""

    admin: int

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a series over its labels, or over those that hold `label`."""
        text = httpx.get(f"http://127.0.0.1:{self.admin}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line.startswith(name + "{") and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _last_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()[-20:]


@contextmanager
def replica(
    model: Path, data: Path, *arguments: str, log: Path | None = None, open_to_all: bool = True
) -> Iterator[Replica]:
    """A replica of its own process, ready; it ends with the block. Served without identities when `open_to_all`."""
    port, admin = free_port(), free_port()
    opened = ["--dev-open"] if open_to_all else []
    command = [
        sys.executable, "-m", "tenantry_engine.main", "--model", str(model), "--model-name", "base",
        "--port", str(port), "--admin-port", str(admin), "--data-dir", str(data), *opened, *arguments,
    ]  # fmt: skip
    output = (log or data.with_suffix(".log")).open("w")
    process = subprocess.Popen(dying_with_me(command), stdout=output, stderr=output)
    try:
        running = Replica(port, admin)
        until = time.monotonic() + 300
        while True:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the replica did not start: see {output.name}")
            try:
                ready = httpx.get(f"http://127.0.0.1:{admin}/readyz", timeout=2).status_code == 200
            except httpx.HTTPError:
                ready = False
            if ready:
                break
            time.sleep(0.2)
        yield running
    except BaseException:
        if process.poll() is not None:
            print(f"the replica ended with {process.returncode}:", *_last_lines(output.name), sep="\n")
        raise
    finally:
        process.terminate()
        process.wait(timeout=120)
        output.close()
