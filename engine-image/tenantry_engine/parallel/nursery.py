"""A process that has imported everything and forks followers: each then starts in milliseconds and shares its memory.

It never touches the model, a GPU or threads, so that forking it is safe. It ends when whoever started it does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

_lock = threading.Lock()
_control: socket.socket | None = None


def follower() -> Connection:
    """A new follower's link. The nursery is started by the first call and lives as long as this process."""
    ours, theirs = socket.socketpair()
    with _lock:
        socket.send_fds(_nursery(), [b"f"], [theirs.fileno()])
    theirs.close()
    return Connection(ours.detach())


def _nursery() -> socket.socket:
    global _control
    if _control is None:
        _control, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tenantry_engine.parallel.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would be there at the fork
            )
    return _control


def main() -> None:
    """Forks one follower for every link that arrives."""
    # Ctrl-C and a stop of the whole group are for the process that serves HTTP: this one ends with its parent's link.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for followers: their links tell of their end
    from tenantry_engine.parallel.follower import follow

    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, links, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            follow(Connection(links[0]))
        os.close(links[0])


if __name__ == "__main__":
    main()
