"""Event streams, cut into packets in every way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenantry_gateway.sse import MAX_EVENT, EventTooLong, Filter, Splitter, data_of, error_event


def chunk(text: str, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}], **more}).encode()


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20), max_size=10),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(1, 7), min_size=1, max_size=20),
)
def test_any_cutting_gives_the_same_events(texts: list[str], end: str, sizes: list[int]) -> None:
    whole = "".join(f"data: {text}x{end}{end}" for text in texts).encode()
    splitter, events, position, turn = Splitter(), [], 0, 0
    while position < len(whole):
        size = sizes[turn % len(sizes)]
        events += splitter.feed(whole[position : position + size])
        position, turn = position + size, turn + 1
    assert [data_of(event) for event in events] == [f"{text}x".encode() for text in texts]


def test_comments_and_split_data_lines() -> None:
    events = Splitter().feed(b": ping\n\nevent: x\ndata: a\ndata: b\n\n")
    assert [data_of(event) for event in events] == [None, b"a\nb"]


def test_an_endless_event_is_refused() -> None:
    with pytest.raises(EventTooLong):
        Splitter().feed(b"x" * (MAX_EVENT + 1))


def passed(include: bool, *events: bytes) -> tuple[list[dict[str, object]], Filter]:
    found = Filter(include)
    out = list(found.pass_on(list(events)))
    return [json.loads(event.removeprefix(b"data: ")) for event in out], found


USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def test_usage_is_stripped_for_who_did_not_ask_and_counted_all_the_same() -> None:
    last = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode()
    out, found = passed(False, chunk("a", usage={**USAGE, "completion_tokens": 1}), last, b"data: [DONE]")
    assert [set(event) for event in out] == [{"choices"}]
    assert found.done
    assert (found.tokens.input, found.tokens.cached, found.tokens.output, found.tokens.told) == (
        5,
        4,
        2,
        True,
    )


def test_who_asked_gets_it_once_at_the_end() -> None:
    last = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode()
    out, _ = passed(True, chunk("a", usage=USAGE), last)
    assert [event["usage"] for event in out] == [None, USAGE]


def test_text_that_looks_like_usage_is_text() -> None:
    text = '"usage":{"prompt_tokens":0,"completion_tokens":0}'
    out, found = passed(False, chunk(text))
    assert out[0]["choices"] == [{"delta": {"content": text}}]
    assert (found.tokens.told, found.tokens.output) == (False, 1)


def test_without_the_engines_word_chunks_are_counted() -> None:
    _, found = passed(False, chunk("a"), chunk("b"))
    assert (found.tokens.told, found.tokens.output) == (False, 2)


@pytest.mark.parametrize("usage", [{"prompt_tokens": -1, "completion_tokens": 5}, {"prompt_tokens": "5"}, []])
def test_nonsense_usage_is_not_believed(usage: object) -> None:
    _, found = passed(False, b"data: " + json.dumps({"choices": [], "usage": usage}).encode())
    assert not found.tokens.told


def test_an_error_in_mid_stream_is_passed_on_and_noticed() -> None:
    out, found = passed(False, error_event("gone", "upstream_cut").strip())
    assert out == [
        {"error": {"message": "gone", "type": "server_error", "param": None, "code": "upstream_cut"}}
    ]
    assert found.failed
