"""`tenantry-engine`: one replica from its command line to its two ports."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import uvicorn

from tenantry_engine.config import DTYPES, PROJECTIONS, EngineConfig, LoraConfig
from tenantry_engine.errors import EngineError
from tenantry_engine.identity import Verifier
from tenantry_engine.replica import Replica

log = logging.getLogger("tenantry_engine")

_SWITCH_SECONDS = 0.0005
"""How long one thread may keep Python's lock while another wants it: HTTP must not hold up a step for 5 ms."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT; then drains and ends."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(serve(options))
    except EngineError as error:
        log.error("%s", error)
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="tenantry-engine", description="Serve one base model and its LoRA adapters."
    )
    p.add_argument(
        "--model", type=Path, required=True, help="folder with config.json, safetensors, tokenizer.json"
    )
    p.add_argument("--model-name", help="served name of the base model (default: the folder's name)")
    p.add_argument("--model-digest", help="refuse to start unless the folder has this digest")
    p.add_argument("--audience", default="", help="uid of the pool; tokens must be made for it")
    p.add_argument(
        "--identity-dir", type=Path, help="folder with the certificates of gateway, operator and fetcher"
    )
    p.add_argument(
        "--dev-open", action="store_true", help="serve everybody, without identities (development)"
    )
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--admin-port", type=int, default=8001)
    p.add_argument(
        "--data-dir", type=Path, default=Path.home() / ".cache/tenantry/engine", help="adapters' bytes"
    )
    p.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    p.add_argument("--device", default="cpu")
    p.add_argument(
        "--max-model-len", type=int, help="most tokens of a prompt and its answer (default: the model's)"
    )
    p.add_argument("--slots", type=int, default=16, help="most sequences that run at once")
    p.add_argument("--step-tokens", type=int, default=256, help="most tokens of one step")
    p.add_argument("--max-waiting", type=int, default=512, help="requests beyond these get 503")
    p.add_argument(
        "--pool-bytes", type=int, help="memory for KV cache and adapters (default: by slots and memory)"
    )
    p.add_argument(
        "--stall-seconds", type=float, default=60.0, help="/healthz fails when work waits this long"
    )
    p.add_argument("--no-lora", action="store_true", help="serve the base model alone")
    p.add_argument("--max-rank", type=int, default=64)
    p.add_argument("--max-registered", type=int, default=2000)
    p.add_argument("--target-modules", default=",".join(PROJECTIONS), help="projections that may be adapted")
    p.add_argument("--adapters", type=Path, help="folder of PEFT folders to serve at once (development)")
    p.add_argument("--threads", type=int, help="CPU threads for the model (default: all cores)")
    return p


def read_config(options: argparse.Namespace) -> EngineConfig:
    """The options as a configuration. Raises EngineError."""
    lora = None
    if not options.no_lora:
        targets = tuple(name.strip() for name in options.target_modules.split(",") if name.strip())
        lora = LoraConfig(options.max_rank, options.max_registered, targets)
    return EngineConfig(
        model=options.model,
        model_name=options.model_name or options.model.resolve().name,
        data_dir=options.data_dir,
        dtype=DTYPES[options.dtype],
        device=options.device,
        max_model_len=options.max_model_len,
        slots=options.slots,
        pool_bytes=options.pool_bytes,
        step_tokens=options.step_tokens,
        max_waiting=options.max_waiting,
        stall_seconds=options.stall_seconds,
        model_digest=options.model_digest,
        lora=lora,
    )


async def serve(options: argparse.Namespace) -> None:
    """Runs both ports until a signal ends them."""
    started = time.monotonic()
    sys.setswitchinterval(_SWITCH_SECONDS)
    if options.threads:
        torch.set_num_threads(options.threads)
    if not options.dev_open and options.identity_dir is None:
        raise EngineError("`--identity-dir` must be given (or `--dev-open`, which serves everybody)")
    verifier = None if options.dev_open else Verifier(options.audience, options.identity_dir)
    config = read_config(options)
    replica = Replica.load(config, verifier)
    if options.adapters:
        replica.register_folder(options.adapters)
    sockets = [_listen(options.host, port) for port in (options.port, options.admin_port)]
    servers = [_Server(_uvicorn(app)) for app in (replica.serving.app, replica.admin.app)]
    replica.start(asyncio.get_running_loop())
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(s.serve([sock])) for s, sock in zip(servers, sockets, strict=True)]
    ports = [sock.getsockname()[1] for sock in sockets]
    log.info(
        "ready after %.1f s: http://%s:%d serves `%s`%s, admin on port %d",
        time.monotonic() - started, options.host, ports[0], config.model_name,
        " to everybody (--dev-open)" if options.dev_open else "", ports[1],
    )  # fmt: skip
    await stop.wait()
    log.info("ending: running requests finish first")
    replica.engine.draining = True
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)
    replica.engine.stop()


class _Server(uvicorn.Server):
    """Two servers share the process, so signals are ours to handle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=60,
        server_header=False,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise EngineError(f"`--port` and `--admin-port` must be free: {host}:{port}: {error}") from error


if __name__ == "__main__":
    main()
