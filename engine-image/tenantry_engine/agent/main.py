"""One replica of a pool of type VLLM: this process has both ports; vLLM runs in a container of its own beside it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from functools import partial

import uvloop

from tenantry_engine.agent.backend import Backend
from tenantry_engine.agent.metrics import Passed
from tenantry_engine.agent.options import parser
from tenantry_engine.agent.serving import Serving
from tenantry_engine.agent.smoke import smoke
from tenantry_engine.agent.vllm import Vllm
from tenantry_engine.digest import model_digest
from tenantry_engine.errors import EngineError
from tenantry_engine.identity import Verifier
from tenantry_engine.ipc.messages import Facts
from tenantry_engine.server.admin import Admin
from tenantry_engine.server.listening import Server, configuration, end, listen

log = logging.getLogger("tenantry_engine.agent")

MAX_ADAPTER_BYTES = 1 << 30


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT. Exit codes: 0 asked to end, 2 cannot start as told to."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        uvloop.run(serve(options))
    except EngineError as error:
        log.error("%s", error)
        sys.exit(2)


async def serve(options: argparse.Namespace) -> None:
    """Runs both ports until a signal. The admin port closes last: vLLM's container waits for it. Raises EngineError."""
    verifier = Verifier(options.audience, options.identity_dir)
    facts = await asyncio.to_thread(facts_of, options)
    sockets = [listen(options.host, port) for port in (options.port, options.admin_port)]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    vllm = Vllm(options.vllm)
    modules = frozenset(name.strip() for name in options.target_modules.split(",") if name.strip())
    backend = Backend(vllm, facts, modules)
    admin = Admin(backend, verifier, Passed(), partial(smoke, backend, vllm))
    serving = Serving(backend, vllm, verifier)
    servers = [Server(configuration(app, options.shutdown_seconds)) for app in (serving.app, admin.app)]
    tasks = [asyncio.create_task(s.serve([sock])) for s, sock in zip(servers, sockets, strict=True)]
    work = asyncio.create_task(backend.run())
    watch = asyncio.create_task(_tell_readiness(backend, admin))
    ports = [sock.getsockname()[1] for sock in sockets]
    log.info("agent: port %d, admin on port %d, vLLM at %s", *ports, options.vllm)
    await stop.wait()
    log.info("ending: running requests may take %.0f s to finish", options.shutdown_seconds)
    backend.draining = True
    end(servers[:1])
    await tasks[0]
    end(servers[1:])
    await tasks[1]
    for task in (work, watch):
        task.cancel()
    await asyncio.gather(work, watch, return_exceptions=True)
    await vllm.close()


def facts_of(options: argparse.Namespace) -> Facts:
    """What this replica is. Reads the model's files where they can be read. Raises EngineError."""
    digest = ""
    if options.model is not None:
        if not (options.model / "config.json").is_file():
            raise EngineError(f"`--model` must be a folder with config.json: {options.model}")
        digest = model_digest(options.model)
    if options.model_digest not in (None, digest):
        raise EngineError(
            f"`--model-digest` must be the folder's digest {digest}, not {options.model_digest}"
        )
    lora = not options.no_lora
    return Facts(
        model_name=options.model_name,
        model_digest=digest,
        max_model_len=0,
        slots=options.slots,
        max_waiting=options.max_waiting,
        stall_seconds=60.0,
        data_dir=str(options.data_dir),
        max_rank=options.max_rank if lora else 0,
        max_registered=options.max_registered if lora else 0,
        max_adapter_bytes=MAX_ADAPTER_BYTES,
    )


async def _tell_readiness(backend: Backend, admin: Admin) -> None:
    while True:
        admin.ready = backend.serves
        await asyncio.sleep(0.2)
