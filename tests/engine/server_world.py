"""A replica behind real HTTP, for the tests of the server."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import engine_world as world
import httpx
from tenantry_engine.config import EngineConfig, LoraConfig
from tenantry_engine.identity import Verifier
from tenantry_engine.replica import Replica
from tenantry_engine.server.listening import Server, configuration, listen
from tokenizers import AddedToken, Tokenizer

TOOL_TEMPLATE = """{% if tools %}<|im_start|>system
Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them by <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
"""A chat template of the Hermes family."""


def make_tool_model(folder: Path) -> world.TinyModel:
    """A tiny model whose template takes tools, with `<tool_call>` and its like as tokens that are not special."""
    world.make_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>", "<tool_response>")]
    )
    size = tokenizer.get_vocab_size()
    model = world.TinyModel.make(folder, vocab_size=size, max_position_embeddings=1536)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return model


class Served:
    """A replica on two real ports."""

    def __init__(
        self,
        model: Path,
        data: Path,
        verifier: Verifier | None,
        *,
        adapters: Path | None = None,
        **config: Any,
    ) -> None:
        self.adapters = adapters
        settings = {"slots": 4, "step_tokens": 64, "lora": LoraConfig(max_rank=32), **config}
        self.replica = Replica.load(
            EngineConfig(model, "base", data, dtype=world.torch.float32, **settings),
            verifier,
            adapters=adapters,
        )
        self.engine = self.replica.engine
        sockets = [listen("127.0.0.1", 0) for _ in range(2)]
        self._servers = [
            Server(configuration(app)) for app in (self.replica.serving.app, self.replica.admin.app)
        ]
        self.url, self.admin_url = (f"http://127.0.0.1:{s.getsockname()[1]}" for s in sockets)

        async def serve() -> None:
            self.replica.start(asyncio.get_running_loop())
            await asyncio.gather(*(s.serve([sock]) for s, sock in zip(self._servers, sockets, strict=True)))

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()))
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.admin = httpx.Client(base_url=self.admin_url, timeout=60)
        world.wait_for(lambda: all(server.started for server in self._servers))

    def idle(self) -> bool:
        """Nothing is held for any request."""
        engine = self.engine
        counts = engine.call(engine.pool.counts).result(timeout=60)
        return not engine.scheduler.in_flight and counts.kv == 0 and self.replica.serving.in_flight == 0

    def close(self) -> None:
        self.http.close()
        self.admin.close()
        for server in self._servers:
            server.should_exit = True
        self._thread.join(timeout=60)
        self.engine.stop()
        self.engine.pool.check()
