"""The agent's command line. The operator writes it (`tenantry.desired.vllm`)."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="tenantry_engine.agent", description="Serve tenants by a vLLM beside it."
    )
    p.add_argument("--vllm", required=True, help="where vLLM listens, e.g. http://127.0.0.1:8100")
    p.add_argument(
        "--model-name", required=True, help="served name of the base model, vLLM's --served-model-name"
    )
    p.add_argument(
        "--model", type=Path, help="folder of the base model, where it can be read: its digest is told"
    )
    p.add_argument("--model-digest", help="refuse to start unless the folder has this digest")
    p.add_argument("--audience", required=True, help="uid of the pool; tokens must be made for it")
    p.add_argument(
        "--identity-dir", type=Path, required=True, help="folder with the certificates of those who may ask"
    )
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--admin-port", type=int, default=8001)
    p.add_argument(
        "--data-dir", type=Path, required=True, help="adapters' bytes, readable by vLLM under the same path"
    )
    p.add_argument("--slots", type=int, default=16, help="sequences that vLLM runs at once")
    p.add_argument("--max-waiting", type=int, default=512, help="requests beyond these get 503")
    p.add_argument("--no-lora", action="store_true", help="serve the base model alone")
    p.add_argument("--max-rank", type=int, default=64)
    p.add_argument("--max-registered", type=int, default=2000)
    p.add_argument(
        "--target-modules", default="", help="modules that may be adapted, with commas; default: any"
    )
    p.add_argument(
        "--shutdown-seconds", type=float, default=60.0, help="at the end, running requests may take this long"
    )
    return p
