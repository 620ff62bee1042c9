"""The process: wires the parts together, runs both ports, ends without breaking a stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
import uvloop
from tenantry.api import names
from tenantry.api.identity import IdentityError, Signer
from tenantry.api.tls import Credentials

from . import logs
from .app import Api, Health
from .dispatch import Dispatcher
from .forward import Forwarder, Identities
from .ledger import Ledger, LedgerError
from .limits import Limiter
from .metrics import Metrics
from .prepare import Preparer
from .protocol import bounded
from .replicas import POLL_SECONDS, Replicas
from .serve import Completions
from .settings import Settings, parse
from .state import State
from .upstream import Upstream
from .watch import ApiServer, follow, kinds

log = logging.getLogger(__name__)
MIN_SALT = 32
SWEEP_SECONDS = 1.0


class ConfigurationError(Exception):
    """Something given at start is wrong; the text names it."""


class Gateway:
    """All parts of one gateway, without its ports; tests drive it with a state of their own."""

    def __init__(
        self,
        settings: Settings,
        state: State,
        signer: Signer,
        salt: bytes,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        if len(salt) < MIN_SALT:
            raise ConfigurationError(f"`--salt-file` must hold at least {MIN_SALT} bytes")
        self.settings = settings
        self.state = state
        self.metrics = Metrics()
        self.ledger = Ledger.parse(settings.ledger)
        self.credentials = _credentials(settings)
        self.upstream = Upstream(tls=None if self.credentials is None else self.credentials.client())
        self.limiter = Limiter(settings.timeouts.lease, self.ledger.month_total)
        self.replicas = Replicas(
            state,
            signer,
            self.upstream,
            port=settings.engine_port,
            admin_port=settings.engine_admin_port,
            poll_seconds=poll_seconds,
        )
        self.dispatcher = Dispatcher(
            state, self.limiter, self.replicas, queue_seconds=settings.timeouts.queue
        )
        forwarder = Forwarder(
            upstream=self.upstream,
            dispatcher=self.dispatcher,
            identities=Identities(signer, salt),
            port=settings.engine_port,
            timeouts=settings.timeouts,
        )
        self.completions = Completions(
            settings=settings,
            state=state,
            preparer=Preparer(self.replicas, self.dispatcher, forwarder),
            dispatcher=self.dispatcher,
            forwarder=forwarder,
            ledger=self.ledger,
            metrics=self.metrics,
        )
        self.draining = False
        self.api = Api(settings, state, self.completions, self.ledger, self.metrics)
        self.health = Health(self)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises LedgerError."""
        self.ledger.start()
        self.replicas.start()
        self._tasks = [asyncio.create_task(self._sweep())]
        if self.credentials is not None:
            self._tasks.append(asyncio.create_task(self.credentials.watch()))

    async def stop(self) -> None:
        """After the last request: everything written, everything closed."""
        for task in self._tasks:
            task.cancel()
        await self.replicas.stop()
        self.upstream.close()
        await asyncio.to_thread(self.ledger.stop)

    async def _sweep(self) -> None:
        """Now and then: drop idle connections and leases that nothing settled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.upstream.sweep()
            if expired := self.limiter.expire(time.monotonic()):
                self.metrics.expired_leases.inc(len(expired))
                log.error(
                    "leases expired that nothing settled", extra={"leases": [lease.id for lease in expired]}
                )
                self.dispatcher.pump_all()


def _credentials(settings: Settings) -> Credentials | None:
    folder = settings.certificates_dir
    if folder is None:
        return None
    return Credentials(folder / "gateway.crt", settings.identity_key, folder / names.AUTHORITY_FILE)


class Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again before the ledger is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server(app: Callable[..., Any], settings: Settings, port: int) -> Server:
    return Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=port,
            loop="none",
            http=bounded(settings.timeouts.header),
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(settings.timeouts.keep_alive),
            timeout_graceful_shutdown=settings.grace_seconds,
        )
    )


async def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs."""
    signer = Signer.load(names.GATEWAY_ISSUER, settings.identity_key)
    gateway = Gateway(settings, State(only=settings.tenant), signer, settings.salt_file.read_bytes())
    await gateway.start()
    api_server = await ApiServer.connect(settings.kubeconfig)
    front, back = (
        server(gateway.api, settings, settings.port),
        server(gateway.health, settings, settings.metrics_port),
    )
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    followers = [asyncio.create_task(follow(api_server, kind)) for kind in kinds(gateway.state)]
    servers = [asyncio.create_task(one.serve()) for one in (front, back)]
    log.info("serving", extra={"port": settings.port})
    waiting = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([waiting, *servers, *followers], return_when=asyncio.FIRST_COMPLETED)
        gateway.draining = True
        if waiting in done:
            # Endpoints forget us a moment after the signal: serve on for so long, unready.
            log.info("draining", extra={"count": gateway.limiter.in_flight()})
            await asyncio.sleep(settings.drain_seconds)
        front.should_exit = True
        await servers[0]
        back.should_exit = True
        await servers[1]
        for task in done - {waiting}:
            task.result()
    finally:
        for task in (waiting, *followers):
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        await api_server.close()
        await gateway.stop()
        log.info("ended")


def main() -> None:
    """The command `tenantry-gateway`."""
    settings = parse()
    logs.configure()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(settings))
    except (ConfigurationError, IdentityError, LedgerError, OSError, ValueError) as error:
        log.error("cannot start", extra={"why": str(error)})
        sys.exit(1)
