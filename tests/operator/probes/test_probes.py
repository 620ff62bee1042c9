"""The probe's tool on real sockets: it must see what is open, and say why something is not."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster.process import free_port
from tenantry.probes import look
from tenantry.probes.__main__ import look as carry_out
from tenantry.probes.__main__ import main


async def listener(host: str = "127.0.0.1") -> tuple[asyncio.Server, int]:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), host, 0)
    return server, server.sockets[0].getsockname()[1]


async def test_open_and_refused_are_told_apart() -> None:
    server, port = await listener()
    assert await look.reach("127.0.0.1", port) == "open"
    server.close()
    await server.wait_closed()
    assert await look.reach("127.0.0.1", port) == "refused"


async def test_silence_is_a_timeout() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        with socket.socket() as first, socket.socket() as second:
            for one in (first, second):
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            assert await look.reach("127.0.0.1", port, seconds=0.3) == "timeout"


async def test_a_dns_question_is_answered_or_not() -> None:
    class Server(asyncio.DatagramProtocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: Any) -> None:
            assert struct.unpack(">H", data[4:6]) == (1,), "one question"
            assert data[12:].startswith(b"\x0akubernetes\x07default\x03svc\x07cluster\x05local\x00")
            self.transport.sendto(b"\0\0" + data[2:], addr)  # of another question: not an answer
            self.transport.sendto(data[:2] + b"\x81\x83" + data[4:], addr)

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Server, local_addr=("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    assert await look.reach("127.0.0.1", port, query=True) == "open", "NXDOMAIN is an answer"
    transport.close()
    await asyncio.sleep(0)
    assert await look.reach("127.0.0.1", port, query=True, seconds=1) in ("refused", "timeout")


def plan(*targets: tuple[str, int], **more: Any) -> dict[str, Any]:
    listed = [{"id": name, "host": "127.0.0.1", "port": port, "query": False} for name, port in targets]
    return {
        "targets": listed,
        "allowed": free_port(),
        "closed": free_port(),
        "settle": 0.2,
        "deadline": 8,
        **more,
    }


async def connect(port: int) -> asyncio.StreamWriter:
    """Once it is listened on."""
    async with asyncio.timeout(10):
        while True:
            try:
                return (await asyncio.open_connection("127.0.0.1", port))[1]
            except OSError:
                await asyncio.sleep(0.02)


async def test_a_probe_ends_when_its_allowed_caller_lets_it_go() -> None:
    server, port = await listener()
    wanted = plan(("there", port), ("not", free_port()))
    running = asyncio.create_task(carry_out(wanted, "127.0.0.1"))
    (await connect(wanted["allowed"])).write(b"done\n")
    seen = await asyncio.wait_for(running, 5)
    assert seen["reached"] == {"there": "open", "not": "refused"}
    assert seen["accepted"] == {str(wanted["allowed"]): 1, str(wanted["closed"]): 0}
    assert seen["kernel"]
    server.close()


async def test_a_stranger_s_word_on_the_closed_port_ends_nothing() -> None:
    wanted = plan(deadline=1)
    running = asyncio.create_task(carry_out(wanted, "127.0.0.1"))
    (await connect(wanted["closed"])).write(b"done\n")
    seen = await asyncio.wait_for(running, 5)
    assert seen["accepted"] == {str(wanted["allowed"]): 0, str(wanted["closed"]): 1}


async def test_what_closes_in_time_was_never_open() -> None:
    came = asyncio.Event()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        came.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    wanted = plan(("late", server.sockets[0].getsockname()[1]), settle=20, deadline=30)
    running = asyncio.create_task(carry_out(wanted, "127.0.0.1"))
    await asyncio.wait_for(came.wait(), 10)
    server.close()
    await server.wait_closed()
    (await connect(wanted["allowed"])).write(b"done\n")
    seen = await asyncio.wait_for(running, 5)
    assert seen["reached"] == {"late": "refused"}


@pytest.mark.parametrize("words", [[], ["{"], ["{}"], ['{"targets": 1}']])
def test_a_plan_that_cannot_be_read_is_said(words: list[str], tmp_path: Path) -> None:
    assert main(words, tmp_path / "log") == 2
    assert json.loads((tmp_path / "log").read_text())["fault"]


def test_it_is_python_alone() -> None:
    """A tiny process: it starts without any package of ours or of others."""
    code = (
        "import sys, tenantry.probes.__main__ as m; "
        "print([n for n in sys.modules if n.split('.')[0] in ('pydantic', 'kubernetes', 'yaml', 'httpx', 'kopf')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_nameserver_of_a_pod(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("search x\nnameserver 10.96.0.10\nnameserver 8.8.8.8\n")
    assert look.nameserver(str(path)) == "10.96.0.10"
    assert look.nameserver(str(tmp_path / "none")) is None
