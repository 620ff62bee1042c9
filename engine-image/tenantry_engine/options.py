"""The command line of `tenantry-engine`, which both of its processes read. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

DTYPE_NAMES = ("bfloat16", "float16", "float32")


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
        "--tls-dir", type=Path, help="folder with tls.crt, tls.key, ca.pem: both ports by mutual TLS"
    )
    p.add_argument(
        "--health-port", type=int, help="with --tls-dir: /healthz and /readyz without TLS, for the kubelet"
    )
    p.add_argument(
        "--lease", type=Path, help="run only while this file, which a gate writes, has not expired"
    )
    p.add_argument(
        "--data-dir", type=Path, default=Path.home() / ".cache/tenantry/engine", help="adapters' bytes"
    )
    p.add_argument("--dtype", choices=DTYPE_NAMES, default="bfloat16")
    p.add_argument("--device", default="cpu")
    p.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="processes (on GPUs: one each) that hold the model",
    )
    p.add_argument(
        "--max-model-len", type=int, help="most tokens of a prompt and its answer (default: the model's)"
    )
    p.add_argument("--slots", type=int, default=16, help="most sequences that run at once")
    p.add_argument("--step-tokens", type=int, default=256, help="most tokens of one step")
    p.add_argument(
        "--target-token-gap",
        type=float,
        help="seconds that a step with running requests should stay below (default: 0.1 on a CPU, else 0.05)",
    )
    p.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
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
    p.add_argument(
        "--adapter-host-bytes", type=int, help="pinned host memory for adapters on a GPU; default: an eighth"
    )
    p.add_argument(
        "--target-modules", help="modules that may be adapted, with commas (default: all that can be)"
    )
    p.add_argument("--adapters", type=Path, help="folder of PEFT folders to serve at once (development)")
    p.add_argument(
        "--threads", type=int, help="CPU threads for the model (default: the cores that this process may use)"
    )
    p.add_argument(
        "--shutdown-seconds", type=float, default=60.0, help="at the end, running requests may take this long"
    )
    return p
