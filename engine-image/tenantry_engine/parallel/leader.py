"""Rank 0's side of tensor parallelism: starts the other ranks, tells them what to run, and notices when one is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from tenantry_engine.adapters.check import CheckedAdapter
from tenantry_engine.adapters.loading import Cut, PageLoader, host_budget
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.config import DTYPES, EngineConfig
from tenantry_engine.errors import AdapterError, EngineError
from tenantry_engine.memory import available_bytes
from tenantry_engine.parallel import nursery
from tenantry_engine.parallel.group import Joined
from tenantry_engine.parallel.messages import (
    Allocate,
    Begin,
    Failed,
    Fill,
    Filled,
    Forget,
    Loaded,
    Run,
    ToFollower,
    ToLeader,
    Wipe,
    encode,
    to_leader,
)
from tenantry_engine.rows import Rows
from tenantry_engine.worker import FAILED

log = logging.getLogger(__name__)

_MOMENT = 2.0
"""Seconds in which a lost rank's link tells of it, after a collective with it has failed."""


class Ranks:
    """The followers of one replica. `lost` is called once, with the reason, when one of them has gone."""

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.tensor_parallel_size
        self.lost: Callable[[str], None] = _end
        self._folder = TemporaryDirectory(prefix="tenantry-ranks-")
        self._meeting = Path(self._folder.name) / "meeting"
        self._device = config.device
        self._closing = False
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self._group: Joined | None = None
        if config.device == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // self.size))
        self._followers = [_Follower(rank, self._follower_gone) for rank in range(1, self.size)]
        for follower in self._followers:
            follower.send(_begin(config, follower.rank, self._meeting))

    def join(self) -> Joined:
        """The group, once every rank is there. Raises EngineError, with the reason of the rank that did not come."""
        device = self._device if self._device == "cpu" else "cuda:0"
        try:
            self._group = Joined(0, self.size, self._meeting, device)
        except RuntimeError as error:
            for follower in self._followers:
                follower.heard()
            raise EngineError(f"the ranks of the model did not meet: {error}") from error
        return self._group

    def allocate(self, pages: int, positions: int) -> None:
        """Waits until every rank has its weights, then until it has its pool. Raises EngineError."""
        for follower in self._followers:
            loaded = follower.heard()
            if isinstance(loaded, Loaded):
                follower.pid = loaded.pid
                log.info("rank %d: process %d has its part of the model", follower.rank, loaded.pid)
            follower.send(Allocate(pages, positions))
        for follower in self._followers:
            follower.heard()

    def run(self, rows: Rows) -> None:
        """Every other rank runs this step too."""
        message = encode(Run(rows))
        for follower in self._followers:
            follower.send_encoded(message)

    def wipe(self, pages: Sequence[int]) -> None:
        """Every other rank zeroes these pages of its own."""
        for follower in self._followers:
            follower.send(Wipe(list(pages)))

    def step_failed(self) -> None:
        """A step failed here: the others wait in a collective that will not come, or it failed because one is gone."""
        if not self._gone.wait(_MOMENT):
            self._lose("a step failed on rank 0")

    def fill(self, digest: str, pages: Sequence[int], ours: Callable[[], None]) -> None:
        """Every rank fills its pages, rank 0 by `ours`. Raises AdapterError when one cannot."""
        for follower in self._followers:
            follower.send(Fill(digest, list(pages)))
        try:
            ours()
        finally:
            answers = [follower.heard() for follower in self._followers]
        for follower, answer in zip(self._followers, answers, strict=True):
            if isinstance(answer, Filled) and answer.problem:
                raise AdapterError("Corrupt", f"rank {follower.rank}: {answer.problem}")

    def forget(self, digest: str) -> None:
        """No rank keeps anything of the adapter in host memory."""
        for follower in self._followers:
            follower.send(Forget(digest))

    @property
    def pids(self) -> list[int]:
        """The other ranks' processes."""
        return [follower.pid for follower in self._followers]

    def close(self) -> None:
        """Lets the followers end."""
        self._closing = True
        for follower in self._followers:
            follower.close()
        if self._group is not None:
            self._group.leave()
        self._folder.cleanup()

    def _follower_gone(self, reason: str) -> None:
        if not self._closing:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        with self._lock:
            first = not self._gone.is_set()
            self._gone.set()
        if first:
            self.lost(reason)


class _Follower:
    """One link. A thread reads it, so that its end is seen at once."""

    def __init__(self, rank: int, gone: Callable[[str], None]) -> None:
        self.rank = rank
        self.pid = 0  # known once it has loaded
        self._gone = gone
        self._link: Connection = nursery.follower()
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[ToLeader] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True)
        self._reader.start()

    def send(self, message: ToFollower) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        try:
            with self._sending:
                self._link.send_bytes(message)
        except OSError as error:
            raise EngineError(f"rank {self.rank} has gone") from error

    def heard(self) -> ToLeader:
        """The next answer. Raises EngineError when there will be none."""
        answer = self._answers.get()
        if isinstance(answer, Failed):
            self._answers.put(answer)  # for whoever asks next
            raise EngineError(f"rank {self.rank} of the model failed: {answer.reason}")
        return answer

    def close(self) -> None:
        """Ends the follower, and waits until it has let go of the link."""
        with self._sending:
            _shut(self._link)
        self._reader.join(timeout=10)
        self._link.close()

    def _read(self) -> None:
        failure = ""
        try:
            while True:
                answer = to_leader.decode(self._link.recv_bytes())
                if isinstance(answer, Failed):
                    failure = answer.reason
                else:
                    self._answers.put(answer)
        except (EOFError, OSError):
            self._answers.put(Failed(failure or "its process has ended"))
            self._gone(
                f"rank {self.rank} of the model (process {self.pid or 'starting'}) "
                + (f"failed: {failure}" if failure else "has ended")
            )


class RankedLoader(PageLoader):
    """Brings an adapter into the pages of all ranks: it is resident when every rank has its part."""

    def __init__(self, ranks: Ranks, store: BlobStore, memory: Tensor, host_bytes: int, cut: Cut) -> None:
        super().__init__(store, memory, host_bytes, cut)
        self._ranks = ranks

    def fill(
        self, digest: str, checked: CheckedAdapter, pages: Sequence[int], after: torch.cuda.Event | None
    ) -> None:
        """As in one process. Raises AdapterError when any rank cannot."""
        own = super().fill
        self._ranks.fill(digest, pages, lambda: own(digest, checked, pages, after))

    def forget(self, digest: str) -> None:
        """As in one process, on every rank."""
        super().forget(digest)
        self._ranks.forget(digest)


def _begin(config: EngineConfig, rank: int, meeting: Path) -> Begin:
    lora = config.lora
    accelerator = config.device != "cpu"
    budget = host_budget(accelerator, lora.host_bytes, available_bytes()) if lora else 0
    return Begin(
        rank=rank,
        size=config.tensor_parallel_size,
        meeting=str(meeting),
        model=str(config.model),
        dtype=next(name for name, dtype in DTYPES.items() if dtype == config.dtype),
        device=f"cuda:{rank}" if accelerator else "cpu",
        threads=torch.get_num_threads(),
        data_dir=str(config.data_dir),
        max_rank=lora.max_rank if lora else 1,
        target_modules=list(lora.target_modules) if lora else [],
        host_bytes=budget // config.tensor_parallel_size,
    )


def _shut(link: Connection) -> None:
    """The other side, and our reader, see the end of the link."""
    with socket.socket(fileno=os.dup(link.fileno())) as sock, contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _end(reason: str) -> None:
    """A replica without one of its ranks is none: it ends at once, and whoever started it starts it anew."""
    log.critical("the engine ends: %s", reason)
    logging.shutdown()
    os._exit(FAILED)
