"""A gateway for benches: the whole data path with a state of its own instead of an API server."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tenantry.api import names
from tenantry.api.identity import Signer
from tenantry_gateway import logs
from tenantry_gateway.main import Gateway, server
from tenantry_gateway.settings import Settings
from tenantry_gateway.state import State


async def main(folder: Path, port: int, engine_port: int, admin_port: int) -> None:
    """Serves the tenants of `objects.json` in `folder`."""
    settings = Settings(
        identity_key=folder,
        salt_file=folder,
        ledger=f"sqlite:///{folder}/ledger.db",
        host="127.0.0.1",
        port=port,
        engine_port=engine_port,
        engine_admin_port=admin_port,
    )
    signer = Signer(names.GATEWAY_ISSUER, Ed25519PrivateKey.generate())
    gateway = Gateway(settings, State(), signer, b"s" * 32)
    await gateway.start()
    objects = json.loads((folder / "objects.json").read_text())
    gateway.state.replace_tenants(objects["tenants"])
    gateway.state.replace_slices(objects["slices"])
    await server(gateway.api, settings, port).serve()


if __name__ == "__main__":
    logs.configure()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(Path(sys.argv[1]), *(int(port) for port in sys.argv[2:5])))
