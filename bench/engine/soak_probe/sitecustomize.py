"""Python loads this into every process of a replica under soak: it tells what lives in the process's memory.

What a process takes of the machine also grows while an allocator's holes fill; only what lives tells a leak from that.
One thread answers, on a socket named after the process, with the bytes that malloc has given out (of Python's larger
objects, torch and all libraries) and the blocks that Python's own allocator has (of its small objects), after a
collection of garbage. Needs Linux and glibc 2.33.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
import threading

_FIELDS = (
    "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # of struct mallinfo2
)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def _serve() -> None:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0tenantry-soak-{os.getpid()}")
        server.listen()
        while True:
            client, _ = server.accept()
            with client:
                gc.collect()
                memory = mallinfo()
                told = {
                    "live bytes": memory.uordblks + memory.hblkhd,
                    "holes bytes": memory.fordblks,
                    "blocks": sys.getallocatedblocks(),
                }
                client.sendall(json.dumps(told).encode())


if os.environ.get("TENANTRY_SOAK"):
    threading.Thread(target=_serve, name="soak", daemon=True).start()
