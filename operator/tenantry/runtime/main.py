"""The operator's process: wires client, store, watches, leadership and controllers together."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kubernetes.aio.config import ConfigException
from pydantic import ValidationError
from yaml import YAMLError

from tenantry.api import OperatorConfig
from tenantry.api.identity import IdentityError, Signer, Verifier, key_id
from tenantry.api.names import METRICS_PORT, OPERATOR_ISSUER
from tenantry.attestation.authority import AuthorityError
from tenantry.attestation.trust import Trust
from tenantry.cluster import ApiError, Client, Recorder

from . import logs
from .controller import Controller, Setup
from .health import HealthServer
from .hub import Hub
from .leadership import Leadership
from .patience import patiently
from .resync import Resync
from .schema import SchemaMismatch, check_schema
from .store import Store
from .tracing import tracing
from .watching import watch
from .workers import Workers

log = logging.getLogger(__name__)

STALL_SECONDS = 60.0
"""A loop that has not come round for so long is stuck."""


@dataclass(frozen=True)
class Options:
    config: Path
    identity_key: Path | None
    identity_dir: Path | None
    namespace: str | None
    kubeconfig: Path | None
    metrics_port: int
    resync_seconds: float | None
    authority_dir: Path | None = None


Build = Callable[[Setup], list[Controller]]


class StartError(Exception):
    """The operator cannot start; the text says what must be changed."""


class Beat:
    """When the main event loop came round last."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    async def run(self) -> None:
        while True:
            self.at = time.monotonic()
            await asyncio.sleep(1.0)


def load_config(options: Options) -> OperatorConfig:
    try:
        config = OperatorConfig.load(options.config)
    except (OSError, YAMLError, ValidationError) as error:
        raise StartError(f"`--config` must name a valid configuration: {error}") from error
    return config.model_copy(update={"release_namespace": options.namespace}) if options.namespace else config


def load_signer(options: Options) -> Signer | None:
    """The operator's key; checked against the certificates that others hold, where a folder is given."""
    if options.identity_key is None:
        return None
    try:
        signer = Signer.load(OPERATOR_ISSUER, options.identity_key)
        if options.identity_dir is not None:
            known = Verifier.load(OPERATOR_ISSUER, options.identity_dir).keys
            issuer, _ = known.get(key_id(signer.key.public_key()), (None, None))
            if issuer != OPERATOR_ISSUER:
                raise StartError(
                    f"`--identity-dir` must hold the certificate of `--identity-key` for {OPERATOR_ISSUER}: "
                    "engines would refuse this operator otherwise"
                )
    except (OSError, ValueError, IdentityError) as error:
        raise StartError(f"`--identity-key` cannot be used: {error}") from error
    return signer


def load_trust(options: Options, config: OperatorConfig) -> Trust | None:
    """The authority that signs certificates for mutual TLS, where one is given."""
    if options.authority_dir is None or options.identity_key is None:
        return None
    try:
        return Trust.make(
            options.authority_dir, options.identity_key, config.certificate_seconds, time.time()
        )
    except (AuthorityError, IdentityError, OSError) as error:
        raise StartError(f"`--authority-dir` cannot be used: {error}") from error


def build_controllers(setup: Setup) -> list[Controller]:
    """The controllers of this release."""
    module = importlib.import_module("tenantry.controllers")
    controllers: list[Controller] = module.build(setup)
    return controllers


async def operate(options: Options, build: Build = build_controllers) -> None:
    """Run until a signal ends it, or raise what ended it."""
    config, signer = load_config(options), load_signer(options)
    try:
        client = await Client.connect(options.kubeconfig)
    except (ConfigException, OSError) as error:
        raise StartError(f"`--kubeconfig` must be given outside of a cluster: {error}") from error
    try:
        with tracing():
            await _operate(options, config, signer, client, build)
    finally:
        await client.close()


async def _operate(
    options: Options, config: OperatorConfig, signer: Signer | None, client: Client, build: Build
) -> None:
    hub = Hub(Store())
    leadership = Leadership(options.kubeconfig, config.release_namespace)
    recorder = Recorder(client, instance=leadership.me)
    trust = load_trust(options, config)
    setup = Setup(client, hub.store, config, recorder, signer, hub.enqueue, leadership.fence, trust)
    for controller in build(setup):
        hub.register(controller)
    client.on_object, client.on_gone = hub.answered, hub.left
    resync = Resync(client, hub, options.resync_seconds or config.resync_seconds)
    workers, beat = Workers(hub, setup, leadership.leads), Beat()

    def alive() -> list[str]:
        now = time.monotonic()
        problems = [f"watch of {kind} tells nothing" for kind in resync.blind]
        if now - beat.at > STALL_SECONDS:
            problems.append("the event loop is stuck")
        if leadership.ident is not None and not leadership.beats(within=STALL_SECONDS):
            problems.append("the leadership thread is stuck")
        for name, queue in hub.queues.items():
            if queue.oldest_processing() > hub.controllers[name].deadline_seconds + STALL_SECONDS:
                problems.append(f"a worker of {name} is stuck")
        return problems

    health = HealthServer(
        options.metrics_port, alive, lambda: [] if hub.synced.is_set() else ["the store is not complete yet"]
    )

    async def manage() -> None:
        await resync.complete()
        await leadership.elected.wait()
        await workers.run()

    async def resync_forever() -> None:
        await hub.synced.wait()
        await resync.run()

    health.start()
    work = [asyncio.create_task(beat.run())]
    try:
        await patiently("start", partial(check_schema, client))
        leadership.start()
        work += [asyncio.create_task(part) for part in (manage(), resync_forever(), recorder.run())]
        await first_to_end([asyncio.create_task(watch(hub, lambda: _cancel(work))), *work])
    finally:
        _cancel(work)
        await asyncio.to_thread(leadership.stop)
        health.stop()


def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


async def first_to_end(tasks: list[asyncio.Task[None]]) -> None:
    """Run until one ends by itself; end the others, and raise what it raised."""
    done: set[asyncio.Task[None]] = set()
    running = set(tasks)
    try:
        while running and not any(task for task in done if not task.cancelled()):
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        _cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        if not task.cancelled():
            task.result()


def parse(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="tenantry-operator", description="Reconciles tenants, pools and adapters."
    )
    parser.add_argument("--config", type=Path, required=True, help="operator configuration (YAML)")
    parser.add_argument(
        "--identity-key", type=Path, help="Ed25519 private key (PEM) that signs what replicas are told"
    )
    parser.add_argument("--identity-dir", type=Path, help="folder of the certificates that all parts hold")
    parser.add_argument(
        "--authority-dir", type=Path, help="folder with tls.crt and tls.key that sign certificates"
    )
    parser.add_argument("--namespace", help="release namespace; overrides the configuration")
    parser.add_argument("--kubeconfig", type=Path, help="outside of a cluster: how to reach the API server")
    parser.add_argument("--metrics-port", type=int, default=METRICS_PORT, help="/healthz, /readyz, /metrics")
    parser.add_argument("--resync-seconds", type=float, help="overrides the configuration")
    return Options(**vars(parser.parse_args(arguments)))


def main() -> None:
    """Entry point of `tenantry-operator`."""
    options = parse()
    logs.configure()
    if options.kubeconfig is not None:
        os.environ["KUBECONFIG"] = str(options.kubeconfig)  # kopf logs in by it
    try:
        asyncio.run(operate(options))
    except (StartError, SchemaMismatch, ApiError) as error:
        log.critical("%s", error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except asyncio.CancelledError:
        log.info("stopped")
