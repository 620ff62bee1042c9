"""Adapters as vLLM wants them: a PEFT folder each, made of a verified blob and named by its digest alone."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Set
from pathlib import Path

from tenantry_engine.adapters import peft_config
from tenantry_engine.adapters.hostile import unsupported
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.digest import CONFIG_FILE, WEIGHTS_FILE, split_blob
from tenantry_engine.errors import AdapterError


class Folders:
    """The folders of one replica. `modules` are those that may be adapted; empty: any."""

    def __init__(self, data: Path, store: BlobStore, max_rank: int, modules: Set[str]) -> None:
        self._root = data / "peft"
        self._store = store
        self._max_rank = max_rank
        self._modules = modules
        self._root.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        return self._root / digest.removeprefix("sha256:")

    def make(self, digest: str) -> int:
        """Writes the folder of a digest whose blob is here, all of it or nothing; its rank. Raises AdapterError.

        Not what vLLM checks itself: that the tensors fit the base model, which it finds out when it loads them.
        """
        with self._store.verified(digest) as blob, memoryview(blob) as view:
            config, weights = split_blob(view)
            try:
                rank = self._check(bytes(config))
                folder = self.path(digest)
                if not folder.exists():
                    temporary = self._root / f".{secrets.token_hex(8)}"
                    temporary.mkdir()
                    (temporary / CONFIG_FILE).write_bytes(config)
                    (temporary / WEIGHTS_FILE).write_bytes(weights)
                    os.replace(temporary, folder)
            finally:
                config.release()
                weights.release()
        return rank

    def prune(self, keep: Set[str]) -> None:
        """Removes every folder whose digest is not in `keep`."""
        names = {digest.removeprefix("sha256:") for digest in keep}
        for name in os.listdir(self._root):
            if name not in names:
                shutil.rmtree(self._root / name, ignore_errors=True)

    def _check(self, raw: bytes) -> int:
        config = peft_config.parse(raw)
        rank = int(config.get("r", 8))
        if config.get("rank_pattern") or config.get("alpha_pattern"):
            raise unsupported(
                "`rank_pattern` and `alpha_pattern` must be empty: vLLM computes one rank and scale"
            )
        if rank > self._max_rank:
            raise AdapterError("RankTooLarge", f"its rank {rank} must be at most {self._max_rank}")
        targets = config["target_modules"]
        if self._modules:
            listed = (
                [] if isinstance(targets, str) else [str(target).rpartition(".")[2] for target in targets]
            )
            wrong = [target for target in listed if target not in self._modules]
            if not listed or wrong:
                allowed = ", ".join(sorted(self._modules))
                raise unsupported(f"`target_modules` must be a list of some of {allowed}")
        return rank
