"""`tenantry-fetcher`: reads the flags, builds the parts, serves until SIGTERM."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI

from tenantry.api import names
from tenantry.api.identity import IdentityError, Signer
from tenantry.api.tls import Credentials
from tenantry.engines.http import new_client

from .app import create_app
from .auth import Authenticator
from .cache import Cache
from .net import OriginPolicy
from .push import Pusher
from .sources import Sources
from .transfers import Transfers
from .trust import Trust


def parser() -> argparse.ArgumentParser:
    """The flags of the process."""
    p = argparse.ArgumentParser(prog="tenantry-fetcher", description=__doc__)
    p.add_argument("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104
    p.add_argument("--port", type=int, default=names.FETCHER_PORT)
    p.add_argument("--identity-key", type=Path, required=True, help="Ed25519 private key (PEM)")
    p.add_argument("--identity-dir", type=Path, required=True, help="folder with the certificates of callers")
    p.add_argument(
        "--certificates-dir",
        type=Path,
        help="folder with fetcher.crt and ca.pem: for engines with mutual TLS",
    )
    p.add_argument("--cache-dir", type=Path, required=True)
    p.add_argument("--cache-bytes", type=int, default=20 << 30, help="the cache's limit (default 20 GiB)")
    p.add_argument("--max-bytes", type=int, default=2 << 30, help="an adapter's limit (default 2 GiB)")
    p.add_argument("--pull-seconds", type=float, default=600.0, help="time limit of one pull")
    p.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="a registry, object store or hub (or a token or storage host of one) that may be read; repeat for more",
    )
    p.add_argument(
        "--allow-private",
        action="store_true",
        help="listed origins may have private or loopback addresses; link-local ones stay refused",
    )
    p.add_argument(
        "--plain-http",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="a listed origin that speaks plain HTTP; repeat for more",
    )
    p.add_argument(
        "--read-secrets",
        action="store_true",
        help="read the Secrets that Adapters name, where a Role in their namespace allows it",
    )
    p.add_argument(
        "--trust-dir",
        type=Path,
        help="folder with public keys (NAME.pub) and Sigstore's trusted_root.json",
    )
    return p


def build(options: argparse.Namespace) -> FastAPI:
    """The application of the given flags. Raises ValueError, IdentityError or OSError."""
    policy = OriginPolicy.build(options.allow_origin, options.plain_http, options.allow_private)
    signer = Signer.load(names.FETCHER_ISSUER, options.identity_key)
    credentials = None
    if options.certificates_dir is not None:
        folder = options.certificates_dir
        credentials = Credentials(folder / "fetcher.crt", options.identity_key, folder / names.AUTHORITY_FILE)
    client = new_client(httpx.Timeout(60.0, connect=3.0), credentials)
    secrets = None
    if options.read_secrets:
        from .secrets import Secrets

        secrets = Secrets()
    sources = Sources(
        policy,
        options.max_bytes,
        options.pull_seconds,
        secrets=secrets,
        trust=Trust(options.trust_dir),
    )
    transfers = Transfers(
        sources,
        Pusher(signer, client),
        Cache(options.cache_dir, options.cache_bytes),
    )
    return create_app(Authenticator(options.identity_dir), transfers, credentials)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exits with 2 and one line when a flag or a file is not what it must be."""
    options = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        app = build(options)
    except (ValueError, IdentityError, OSError) as error:
        sys.stderr.write(f"tenantry-fetcher: {error}\n")
        sys.exit(2)
    logging.info("serving on %s:%d", options.host, options.port)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=10)


if __name__ == "__main__":
    main()
