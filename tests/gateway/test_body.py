"""What a body may say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenantry_gateway.body import forwarded, input_bound, parse
from tenantry_gateway.errors import ApiError

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "chat", "prompt": "hi"}


def refused(body: Any, chat: bool = True) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode(), chat)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "field",
    [
        "chat_template", "chat_template_kwargs", "prompt_logprobs", "echo", "return_token_ids", "cache_salt",
        "priority", "kv_transfer_params", "lora_request", "add_generation_prompt", "x_tenant", "guided_json",
        "store", "metadata",
    ],
)  # fmt: skip
def test_fields_that_are_not_on_the_list_are_named(field: str) -> None:
    for base, chat in ((CHAT, True), (COMPLETION, False)):
        error = refused({**base, field: 1}, chat)
        assert (error.code, error.param) == ("unknown_field", field)
        assert f"`{field}`" in error.message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "cache": 1}]}, "messages[0].cache"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"seed": 1 << 70}, None),
    ],
)
def test_wrong_values_are_named(change: dict[str, Any], param: str | None) -> None:
    error = refused({**CHAT, **change})
    if param is not None:
        assert error.param == param
        assert "must" in error.message


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2]], [], {}, 5])
def test_token_id_prompts_are_refused(prompt: Any) -> None:
    assert refused({"model": "chat", "prompt": prompt}, chat=False).param == "prompt"


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b'"x"', b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100],
)
def test_what_is_not_a_flat_object_is_refused(raw: bytes) -> None:
    refused(raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_value_of_any_field_breaks_the_check(value: Any) -> None:
    for base, chat in ((CHAT, True), (COMPLETION, False)):
        for field in (
            "messages",
            "prompt",
            "n",
            "stop",
            "tools",
            "logit_bias",
            "stream_options",
            "max_tokens",
        ):
            try:
                parse(json.dumps({**base, field: value}).encode(), chat)
            except ApiError as error:
                assert error.status == 400  # noqa: PT017


def test_the_engine_is_told_model_cap_and_to_count_whatever_the_client_said() -> None:
    request = parse(json.dumps({**CHAT, "stream": True, "user": "me", "top_p": 0.5}).encode(), True)
    body = json.loads(forwarded(request, request.messages, "served", 7))
    assert body == {
        "model": "served",
        "top_p": 0.5,
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "messages": CHAT["messages"],
    }


def test_sequences_are_prompts_times_choices() -> None:
    request = parse(json.dumps({"model": "m", "prompt": ["a", "b"], "n": 2, "best_of": 3}).encode(), False)
    assert request.sequences == 6


@given(st.text(), st.text())
def test_the_bound_is_never_below_one_token_per_byte(first: str, second: str) -> None:
    messages = [
        {"role": "user", "content": first},
        {"role": "user", "content": [{"type": "text", "text": second}]},
    ]
    request = parse(json.dumps({**CHAT, "messages": messages}).encode(), True)
    assert input_bound(request, request.messages) >= len(first.encode()) + len(second.encode())
