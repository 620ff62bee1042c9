"""The far end of the gateway benches: an engine that streams chunks which carry the moment at which they were sent."""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

CHUNKS = 48
STEP_SECONDS = 0.02
LOAD = (
    b'{"ready":true,"draining":false,"slots":4096,"running":0,"waiting":0,"outstandingTokens":0,'
    b'"registered":[],"resident":[]}'
)
MODELS = b'{"data":[{"id":"base","max_model_len":100000}]}'


class Steps:
    """All streams move together, one chunk a step, as in an engine with continuous batching."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def run(self) -> None:
        moment = time.monotonic()
        while True:
            moment += STEP_SECONDS
            await asyncio.sleep(max(0.0, moment - time.monotonic()))
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def next(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, steps: Steps) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = next(
                (int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")),
                0,
            )
            await reader.readexactly(length)
            path = head.split(" ", 2)[1]
            if path != "/v1/chat/completions":
                body = LOAD if path == "/admin/v1/load" else MODELS
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                continue
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-tenantry-served: base\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            for index in range(CHUNKS):
                if index:
                    await steps.next()
                event = (
                    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"base","choices":'
                    b'[{"index":0,"delta":{"content":"%020d"},"logprobs":null,"finish_reason":null}],'
                    b'"usage":{"prompt_tokens":9,"completion_tokens":%d,"total_tokens":%d}}\n\n'
                ) % (time.monotonic_ns(), index + 1, index + 10)
                writer.write(b"%x\r\n" % len(event) + event + b"\r\n")
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    steps = Steps()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer, steps)

    servers = [await asyncio.start_server(connection, "127.0.0.1", int(port)) for port in sys.argv[1:]]
    print("ready", flush=True)
    await asyncio.gather(steps.run(), *(server.serve_forever() for server in servers))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
