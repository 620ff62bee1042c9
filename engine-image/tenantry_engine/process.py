"""The engine's process, started by `tenantry-engine` with its link's file descriptor and its own arguments.

It lives as long as its link: when the HTTP process has gone, whatever the way, it ends; when its own loop is over, it
ends too, and the HTTP process with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading

import torch

from tenantry_engine.config import configure
from tenantry_engine.errors import EngineError
from tenantry_engine.ipc.messages import Refused, frame
from tenantry_engine.ipc.service import Service
from tenantry_engine.options import parser
from tenantry_engine.startup import load_engine, register_folder
from tenantry_engine.worker import FAILED, let_steps_go_first

log = logging.getLogger("tenantry_engine.process")


def main() -> None:
    """Loads, serves the link, and ends with it."""
    # Ctrl-C and a stop of the whole group are for the HTTP process, which ends this one when its requests are done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    say_it_in_the_log()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    options = parser().parse_args(sys.argv[2:])
    loaded = threading.Event()
    threading.Thread(target=_end_with, args=(sock, loaded), name="link-while-loading", daemon=True).start()
    let_steps_go_first()
    torch.set_num_threads(options.threads or allowed_cores())
    over: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    try:
        engine, facts = load_engine(configure(options))
        if options.adapters:
            register_folder(engine, options.adapters)
    except EngineError as error:
        sock.sendall(frame(Refused(str(error))))
        sys.exit(2)
    loaded.set()
    engine.ended = over.put
    service = Service(engine, facts, sock, gone=lambda: over.put(None))
    engine.start()
    service.start()
    reason = over.get()
    if reason is not None:
        log.critical("the engine ends: %s", reason)
    service.close()
    logging.shutdown()
    # Not sys.exit: that would wait for threads that load or check adapters, and nobody waits for them any more.
    os._exit(FAILED if reason is not None else 0)


def _end_with(link: socket.socket, loaded: threading.Event) -> None:
    """Ends this process with its link until the service reads it: loading takes minutes that nobody waits for."""
    with contextlib.suppress(OSError):
        link.recv(
            1, socket.MSG_PEEK
        )  # returns at the link's end, or with the first that is said when all is loaded
    if not loaded.is_set():
        os._exit(0)


def say_it_in_the_log() -> None:
    """Both processes log alike."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


def allowed_cores() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its cgroup where that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        pass  # no limit that this machine tells
    return cores


if __name__ == "__main__":
    main()
