"""What the gateway is told at start."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tenantry.api import names

from .auth import Network


@dataclass(frozen=True)
class Timeouts:
    """Seconds. `lease` must exceed the longest silence that `first_byte` and `idle` allow."""

    body: float = 30.0
    queue: float = 30.0
    first_byte: float = 120.0
    idle: float = 60.0
    total: float = 900.0
    lease: float = 240.0
    header: float = 10.0
    keep_alive: float = 75.0


@dataclass(frozen=True)
class Settings:
    identity_key: Path
    salt_file: Path
    ledger: str
    host: str = "0.0.0.0"  # noqa: S104 - a pod is reached at its address; NetworkPolicies say by whom
    port: int = names.GATEWAY_PORT
    metrics_port: int = names.METRICS_PORT
    kubeconfig: Path | None = None
    certificates_dir: Path | None = None
    tenant: str | None = None
    trusted_proxies: tuple[Network, ...] = ()
    max_body_bytes: int = 4 << 20
    drain_seconds: float = 3.0
    grace_seconds: int = 60
    engine_port: int = names.ENGINE_PORT
    engine_admin_port: int = names.ENGINE_ADMIN_PORT
    timeouts: Timeouts = Timeouts()


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line. Exits with a usage message where it is wrong."""
    parser = argparse.ArgumentParser("tenantry-gateway", description="OpenAI API for many tenants.")
    add = parser.add_argument
    add("--host", default=Settings.host, help="address to listen on (%(default)s)")
    add("--port", type=int, default=Settings.port, help="port of the OpenAI API (%(default)s)")
    add(
        "--metrics-port",
        type=int,
        default=Settings.metrics_port,
        help="port of /healthz, /readyz and /metrics (%(default)s)",
    )
    add(
        "--identity-key",
        type=Path,
        required=True,
        help="Ed25519 private key (PEM) that signs identities for engines",
    )
    add(
        "--salt-file",
        type=Path,
        required=True,
        help="at least 32 secret bytes, from which tenants' cache salts are derived",
    )
    add("--ledger", required=True, help="sqlite:////path/ledger.db")
    add(
        "--certificates-dir",
        type=Path,
        help="folder with gateway.crt and ca.pem: for engines that are reached by mutual TLS",
    )
    add("--tenant", help="serve this tenant alone; without it, all that have no gateway of their own")
    add("--kubeconfig", type=Path, help="instead of the pod's own service account")
    add(
        "--trusted-proxy",
        type=ipaddress.ip_network,
        action="append",
        default=[],
        metavar="CIDR",
        help="whose X-Forwarded-For counts; may be repeated",
    )
    add("--max-body-bytes", type=int, default=Settings.max_body_bytes, help="largest request (%(default)s)")
    add(
        "--drain-seconds",
        type=float,
        default=Settings.drain_seconds,
        help="how long to serve on after SIGTERM, unready (%(default)s)",
    )
    add(
        "--grace-seconds",
        type=int,
        default=Settings.grace_seconds,
        help="how long open streams may take after that (%(default)s)",
    )
    add("--engine-port", type=int, default=Settings.engine_port, help="serving port of engines (%(default)s)")
    add(
        "--engine-admin-port",
        type=int,
        default=Settings.engine_admin_port,
        help="admin port of engines (%(default)s)",
    )
    given = vars(parser.parse_args(arguments))
    return Settings(trusted_proxies=tuple(given.pop("trusted_proxy")), **given)
