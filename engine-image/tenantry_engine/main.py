"""`tenantry-engine`: one replica. This process has HTTP and the tokenizer; the engine is a process of its own.

They live and die together: a replica with half of it gone would take requests that it cannot serve.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import uvloop

from tenantry_engine.errors import EngineError
from tenantry_engine.identity import Verifier
from tenantry_engine.ipc.link import EngineLink
from tenantry_engine.lease import Lease
from tenantry_engine.options import parser
from tenantry_engine.server.front import Front
from tenantry_engine.server.listening import Server, configuration, end, listen
from tenantry_engine.server.tls import ServerTls
from tenantry_engine.server.tracing import tracing
from tenantry_engine.tokenizer import Tokenizer

log = logging.getLogger("tenantry_engine")

_LAST_WORDS_SECONDS = 2
"""How long answers that the engine's end cut may take to say so."""

_ENGINE_END_SECONDS = 10

_LEASE_ENDED = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT; then ends what runs, and itself.

    Exit codes: 0 asked to end, 1 the engine ended, 2 cannot start as told to, 3 the lease ended.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        with tracing() as traces:
            if traces is not None:
                log.info("traces: to %s", traces)
            code = uvloop.run(serve(options, words))
    except EngineError as error:
        log.error("%s", error)
        code = 2
    sys.exit(code)


async def serve(options: argparse.Namespace, words: list[str]) -> int:
    """Runs both ports until a signal or the engine's end; the exit code. Raises EngineError."""
    started = time.monotonic()
    if not options.dev_open and options.identity_dir is None:
        raise EngineError("`--identity-dir` must be given (or `--dev-open`, which serves everybody)")
    verifier = None if options.dev_open else Verifier(options.audience, options.identity_dir)
    tls = None if options.tls_dir is None else ServerTls(options.tls_dir)
    lease = None if options.lease is None else Lease(options.lease)
    if lease is not None and lease.left() <= 0:
        log.critical("not started: the lease in `%s` has ended", options.lease)
        return _LEASE_ENDED
    ports = [options.port, options.admin_port]
    ports += [] if options.health_port is None else [options.health_port]
    sockets = [listen(options.host, port) for port in ports]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    link = EngineLink()
    with engine_process(words) as (process, sock):
        await link.connect(sock)
        tokenizer = await asyncio.to_thread(Tokenizer, options.model)
        ready = asyncio.ensure_future(link.ready())
        ended = asyncio.ensure_future(lease.ended() if lease is not None else asyncio.Event().wait())
        await _first(asyncio.wait([ready]), asyncio.wait([ended]), stop.wait())
        if ended.done():
            return _out_of_lease(process)
        if stop.is_set():
            ready.cancel()
            process.kill()  # it reads weights, and nobody waits for them any more
            return 0
        facts = await ready
        front = Front.make(link, options.model, tokenizer, verifier, adapters=options.adapters)
        context = None if tls is None else tls.context
        configs = [
            configuration(app, options.shutdown_seconds, context)
            for app in (front.serving.app, front.admin.app)
        ]
        if options.health_port is not None:
            configs.append(configuration(front.admin.health))
        servers = [Server(config) for config in configs]
        watching = None if tls is None else asyncio.create_task(tls.watch())
        tasks = [asyncio.create_task(s.serve([sock])) for s, sock in zip(servers, sockets, strict=True)]
        front.admin.ready = True
        ports = [sock.getsockname()[1] for sock in sockets]
        log.info(
            "ready after %.1f s: %s://%s:%d serves `%s`%s, admin on port %d",
            time.monotonic() - started, "http" if tls is None else "https", options.host, ports[0], facts.model_name,
            " to everybody (--dev-open)" if options.dev_open else "", ports[1],
        )  # fmt: skip
        await _first(stop.wait(), link.lost.wait(), asyncio.wait([ended]))
        if ended.done():
            return _out_of_lease(process)
        if link.lost.is_set():
            log.critical("the engine ended (%s); this replica ends with it", await _end_of(process))
            end(servers)
            await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)
            return 1
        log.info("ending: running requests may take %.0f s to finish", options.shutdown_seconds)
        link.draining = True
        stop.clear()
        end(servers)
        await _first(asyncio.wait(tasks), stop.wait(), link.lost.wait(), asyncio.wait([ended]))
        if watching is not None:
            watching.cancel()
        if ended.done():
            return _out_of_lease(process)
        ended.cancel()
    return 0


def _out_of_lease(process: subprocess.Popen[bytes]) -> int:
    """Nothing runs on: what is not answered by now is cut."""
    log.critical("the lease has ended: this replica ends at once")
    process.kill()
    return _LEASE_ENDED


@contextlib.contextmanager
def engine_process(words: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """The engine's process and our end of the link to it; it ends with the block, by force if need be."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tenantry_engine.process", str(theirs.fileno()), *words],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # the pool and the weights in huge pages: fewer misses when a step reads them all
            env={"THP_MEM_ALLOC_ENABLE": "1", **os.environ},
        )
        theirs.close()
        try:
            yield process, ours
        finally:
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)  # tells the engine to end
            try:
                process.wait(_ENGINE_END_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("the engine's process did not end when told to: it is killed")
                process.kill()
                process.wait()


async def _first(*waits: Awaitable[Any]) -> None:
    """Until one of them is over; the others are given up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _end_of(process: subprocess.Popen[bytes]) -> str:
    """How it ended, in words."""
    try:
        code = await asyncio.to_thread(process.wait, _ENGINE_END_SECONDS)
    except subprocess.TimeoutExpired:
        return "its link broke, its process is still there"
    if code >= 0:
        return f"exit code {code}"
    hint = "; killed from outside, perhaps for its memory" if code == -signal.SIGKILL else ""
    return f"signal {-code}{hint}"


if __name__ == "__main__":
    main()
