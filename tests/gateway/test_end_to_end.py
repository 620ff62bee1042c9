"""A client's request through the gateway to an engine and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway_world import chat

if TYPE_CHECKING:
    from gateway_world import World


async def test_openai_client_gets_an_answer(world: World) -> None:
    answer = await world.client("acme").chat.completions.create(**chat())
    assert answer.choices[0].message.content == "w0 w1 w2"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    await world.settled()
    (row,) = await world.rows()
    assert (row["outcome"], row["input_tokens"], row["output_tokens"]) == ("done", 3, 3)
