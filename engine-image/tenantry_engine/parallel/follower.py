"""One rank other than 0: runs the steps that rank 0 announces, on its own part of the model and of the adapters.

The link is read by a thread of its own, so that the end of rank 0 is noticed even inside a step.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tenantry_engine.adapters.base import Base, weights_of
from tenantry_engine.adapters.loading import PageLoader
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.config import DTYPES, LoraConfig
from tenantry_engine.errors import EngineError
from tenantry_engine.executor import Executor
from tenantry_engine.loader import Weights
from tenantry_engine.models import Model, load_model
from tenantry_engine.models.split import split
from tenantry_engine.parallel.group import Joined
from tenantry_engine.parallel.messages import (
    Allocate,
    Allocated,
    Begin,
    Failed,
    Fill,
    Forget,
    Loaded,
    Run,
    ToFollower,
    ToLeader,
    Wipe,
    encode,
    to_follower,
)
from tenantry_engine.parallel.parts import Parts
from tenantry_engine.worker import FAILED, let_steps_go_first

log = logging.getLogger(__name__)


def follow(link: Connection) -> None:
    """The whole life of a follower; does not return."""
    code = 0
    try:
        inbox = _read(link)
        begin = inbox.get()
        assert isinstance(begin, Begin), "the first message must be Begin"
        logging.basicConfig(
            level=logging.INFO,
            format=f"%(asctime)s %(levelname)s rank {begin.rank}: %(message)s",
            stream=sys.stderr,
        )
        _Follower(begin, link, inbox).run()
    except EngineError as error:
        link.send_bytes(encode(Failed(str(error))))
        code = FAILED
    except BaseException as error:
        log.exception("this rank cannot go on")
        link.send_bytes(encode(Failed(f"{type(error).__name__}: see its log")))
        code = FAILED
    finally:
        logging.shutdown()
        os._exit(code)  # the reader's thread may wait for ever


def _read(link: Connection) -> queue.SimpleQueue[ToFollower]:
    """The messages of rank 0, in their order. When the link ends, so does this process."""
    inbox: queue.SimpleQueue[ToFollower] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                inbox.put(to_follower.decode(link.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, name="link", daemon=True).start()
    return inbox


class _Follower:
    """`run` owns model, pool and group; adapters are filled on a thread of their own, as on rank 0."""

    def __init__(self, begin: Begin, link: Connection, inbox: queue.SimpleQueue[ToFollower]) -> None:
        self._begin = begin
        self._link = link
        self._inbox = inbox
        self._sending = threading.Lock()

    def run(self) -> None:
        """Loads, then does what rank 0 says."""
        begin = self._begin
        let_steps_go_first()
        if begin.device == "cpu":
            torch.set_num_threads(begin.threads)
        else:
            torch.cuda.set_device(begin.device)
        group = Joined(begin.rank, begin.size, Path(begin.meeting), begin.device)
        with Weights(Path(begin.model), DTYPES[begin.dtype], begin.device) as weights:
            model = load_model(weights, group)
        self._send(Loaded(os.getpid()))
        allocate = self._inbox.get()
        assert isinstance(allocate, Allocate), "the second message must be Allocate"
        model.prepare(allocate.positions)
        executor = Executor(
            model, allocate.pages, begin.device, positions=allocate.positions, max_rank=begin.max_rank
        )
        store = BlobStore(Path(begin.data_dir))
        loader = PageLoader(store, executor.memory, begin.host_bytes, model.part.cut_lora)
        limits = LoraConfig(begin.max_rank, target_modules=tuple(begin.target_modules))
        base = _base(model, allocate.pages, Path(begin.model))
        adapters = Parts(store, loader, base, limits, self._send)
        self._send(Allocated())
        while True:
            message = self._inbox.get()
            if isinstance(message, Run):
                for _ in executor.run(message.rows, adapters.paged):
                    pass
            elif isinstance(message, Wipe):
                executor.wipe(tuple(message.pages))
                adapters.wiped(message.pages)
            elif isinstance(message, Fill):
                adapters.fill(message)
            elif isinstance(message, Forget):
                adapters.forget(message.digest)

    def _send(self, message: ToLeader) -> None:
        with self._sending:
            self._link.send_bytes(encode(message))


def _base(model: Model, pages: int, folder: Path) -> Base:
    """What this rank must know to find its part of an adapter that rank 0 has accepted."""
    return Base(
        shape=split(model.config, 0, 1).lora_shape,
        page_elems=model.kv_shape.page_elems,
        dtype=model.dtype,
        max_pages=pages,
        tied=model.config.tied,
        weight=weights_of(folder),
        part=model.lora_shape,
    )
