"""OpenAI's surface through OpenAI's own client: structure, tools, scores, stops, echo, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import engine_world as world
import httpx
import jsonschema
import openai
import pytest
import torch
from server_world import Served, make_tool_model

USER = [{"role": "user", "content": "the quick brown fox"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "c": {"enum": ["red", "blue"]}},
    "required": ["n", "c"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "a tool",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "sub")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> world.TinyModel:
    return make_tool_model(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def server(model: world.TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    adapters = tmp_path_factory.mktemp("adapters")
    shutil.copytree(model.adapter("tone", 7, r=4), adapters / "tone")
    served = Served(model.folder, tmp_path_factory.mktemp("data"), None, adapters=adapters)
    loaded = served.http.post("/v1/load_lora_adapter", json={"lora_name": "tone", "lora_path": "tone"})
    assert loaded.status_code == 200, loaded.text
    yield served
    world.wait_for(served.idle)
    served.close()


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def post(server: Served, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    body = {"model": "base", **body}
    if path == "/v1/chat/completions":
        body = {"messages": USER, "max_tokens": 100, **body}
    return server.http.post(path, json=body)


def said(server: Served, text: str, **body: Any) -> dict[str, Any]:
    """The choice of an answer whose text is known: the model may write nothing else."""
    answer = post(server, structured_outputs={"choice": [text]}, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


# structure


def test_structure_beside_plain_answers(server: Served, client: openai.OpenAI) -> None:
    """Every answer fits what it asked for, and no answer changes for its neighbours."""

    def ask(number: int) -> str:
        kind = number % 4
        more: dict[str, Any] = {
            0: {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            1: {"extra_body": {"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2}"}}},
            2: {"extra_body": {"ignore_eos": True}, "max_tokens": 20},
            3: {"response_format": {"type": "json_object"}, "max_tokens": 30},
        }[kind]
        answer = client.chat.completions.create(
            **{"model": "base", "messages": USER, "max_tokens": 150, "temperature": 1, "seed": number, **more}
        )
        return f"{answer.choices[0].finish_reason} {answer.choices[0].message.content}"

    alone = [ask(number) for number in range(12)]
    for number, answer in enumerate(alone):
        finish, _, text = answer.partition(" ")
        if number % 4 == 0:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif number % 4 == 1:
            assert (finish, text[3], len(text)) == ("stop", "-", 6)
        elif number % 4 == 3:
            assert text.startswith("{")
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone


def test_structure_survives_preemption(model: world.TinyModel, engines: world.Engines) -> None:
    from tenantry_engine import grammar
    from tenantry_engine.sequence import Sampling

    def sampling(seed: int) -> Sampling:
        source = grammar.from_regex("([a-f]{8} ){9}")
        return Sampling(
            temperature=1, seed=seed, max_tokens=90, grammar=source, logprobs=1, repetition_penalty=1.1
        )

    wide = engines.client(model.folder)
    names = [wide.submit([5, 6, 7], sampling=sampling(seed)) for seed in range(6)]
    alone = [wide.wait(name)[0] for name in names]
    page_bytes = wide.engine._runner.page_bytes
    narrow = engines.client(model.folder, lora=None, max_model_len=112, pool_bytes=20 * page_bytes, slots=6)
    names = [narrow.submit([5, 6, 7], sampling=sampling(seed)) for seed in range(6)]
    assert narrow.wait(*names) == alone
    assert narrow.engine.scheduler.preemptions > 0, "the pool was to be too small"
    assert {narrow.finish[name] for name in names} == {"stop"}


# tools


def test_a_tool_round_trip(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model="base", messages=USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        max_tokens=200, temperature=1, seed=1,
    )  # fmt: skip
    [call] = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content is None
    assert call.function.name in ("add", "sub")
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
    messages = [
        *USER,
        first.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    second = client.chat.completions.create(model="base", messages=messages, tools=TOOLS, max_tokens=3)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_named_tool_and_several_calls(server: Served) -> None:
    named = {"type": "function", "function": {"name": "sub"}}
    choice = post(server, tools=TOOLS, tool_choice=named, max_tokens=200).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["sub"]
    two = "\n".join(
        f'<tool_call>\n{{"name": "{n}", "arguments": {{"x": 1}}}}\n</tool_call>' for n in ("add", "sub")
    )
    choice = said(server, f"Well: {two}", tools=TOOLS, max_tokens=300)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well: \n"
    calls = choice["message"]["tool_calls"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("add", '{"x": 1}'),
        ("sub", '{"x": 1}'),
    ]
    assert len({c["id"] for c in calls}) == 2
    streamed = events(
        post(
            server, structured_outputs={"choice": [f"Well: {two}"]}, tools=TOOLS, max_tokens=300, stream=True
        )
    )
    deltas = [e["choices"][0]["delta"] for e in streamed]
    assert "".join(d.get("content", "") for d in deltas) == "Well: \n"
    told = [call for d in deltas for call in d.get("tool_calls", [])]
    assert [(c["index"], c["function"]["name"]) for c in told] == [(0, "add"), (1, "sub")]
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_an_adapter_calls_tools_as_its_base_does(server: Served) -> None:
    """Template, rules and reader of calls are the base's, under whatever name a request asks."""
    named = {"type": "function", "function": {"name": "sub"}}
    for model in ("base", "tone"):
        answer = post(server, model=model, tools=TOOLS, tool_choice=named, max_tokens=200)
        [choice] = answer.json()["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["sub"]
        call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
        free = said(server, call, model=model, tools=TOOLS, max_tokens=300)
        assert free["finish_reason"] == "tool_calls"
        assert [c["function"]["name"] for c in free["message"]["tool_calls"]] == ["add"]
    prompts = {
        post(server, model=model, tools=TOOLS, max_tokens=1).json()["usage"]["prompt_tokens"]
        for model in ("base", "tone")
    }
    assert len(prompts) == 1


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "rm", "arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "x"}</tool_call>',
        "<tool_call>not JSON</tool_call>",
        "<tool_call>[" + "[" * 50 + "</tool_call>",
        "a < b <tool_ca",
    ],
)
def test_what_is_no_call_stays_text(server: Served, text: str) -> None:
    choice = said(server, text, tools=TOOLS, max_tokens=300)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


def test_tools_that_are_not_used(server: Served) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    choice = said(server, text, tools=TOOLS, tool_choice="none", max_tokens=200)
    assert choice["message"]["content"] == text
    with_tools = post(server, tools=TOOLS, max_tokens=1).json()["usage"]["prompt_tokens"]
    without = post(server, tools=TOOLS, tool_choice="none", max_tokens=1).json()["usage"]["prompt_tokens"]
    assert without == post(server, max_tokens=1).json()["usage"]["prompt_tokens"] < with_tools
    choice = said(server, text[:-6], tools=TOOLS, max_tokens=200)
    assert choice["message"]["content"] == text[:-6], "half a mark at the end is text"
    cut = said(server, text[: -len("</tool_call>")], tools=TOOLS, max_tokens=200)
    assert [c["function"]["name"] for c in cut["message"]["tool_calls"]] == ["add"]


def test_a_strict_tool_holds_calls_to_its_schema(server: Served) -> None:
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    mark = server.replica.serving._tokenizer.token_id("<tool_call>")
    for seed in range(3):
        answer = post(
            server, tools=strict, temperature=1, seed=seed, logit_bias={str(mark): 30}, max_tokens=250
        ).json()
        calls = answer["choices"][0]["message"].get("tool_calls", [])
        assert calls, answer
        for call in calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), TOOLS[0]["function"]["parameters"])


def test_no_tool_field_emits_a_special_token(server: Served) -> None:
    tokenizer = server.replica.serving._tokenizer
    names = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>"]
    assert set(names) <= set(tokenizer.special_tokens)
    marks = {tokenizer.token_id(name) for name in names}

    def render(text: str) -> list[int]:
        tools = [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": text,
                    "parameters": {"properties": {text: {"const": text}}},
                },
            }
        ]
        call = {
            "id": text,
            "type": "function",
            "function": {"name": "f", "arguments": json.dumps({text: [text]})},
        }
        messages = [
            {"role": "user", "content": text, "name": text},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": text, "content": f"{text}{text}"},
        ]
        answer = post(server, "/tokenize", messages=messages, tools=tools)
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]

    plain = [token for token in render("plain") if token in marks]
    for name in names:
        tokens = render(name)
        assert [token for token in tokens if token in marks] == plain, name
        assert tokenizer.decode(tokens).count(name) >= 7, "the text itself arrives"


# scores


@torch.no_grad()
def reference(model: world.TinyModel, ids: list[int]) -> torch.Tensor:
    return model.reference()(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_chat_scores_are_those_of_transformers(
    server: Served, model: world.TinyModel, client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {
        "model": "base", "messages": USER, "max_tokens": 12, "temperature": 1, "seed": 5, "logprobs": True,
        "top_logprobs": 20, "extra_body": {"ignore_eos": True, "repetition_penalty": 1.2},
    }  # fmt: skip
    answer = client.chat.completions.create(**asked)
    content = answer.choices[0].logprobs.content
    assert len(content) == 12
    tokenizer = server.replica.serving._tokenizer
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    assert len(by_bytes) == tokenizer.vocab_size
    prompt = post(server, "/tokenize", messages=USER).json()["tokens"]
    chosen = [by_bytes[bytes(item.bytes)] for item in content]
    want = reference(model, prompt + chosen)[len(prompt) - 1 : -1]
    for place, item in enumerate(content):
        assert item.logprob == pytest.approx(want[place, chosen[place]].item(), abs=1e-4)
        assert len(item.top_logprobs) == 20
        best = want[place].topk(20)
        assert [t.logprob for t in item.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        known = [by_bytes.get(bytes(t.bytes)) for t in item.top_logprobs]
        assert all(k is None or k in best.indices.tolist() for k in known)
    text = b"".join(bytes(item.bytes) for item in content if chosen)
    assert answer.choices[0].message.content == tokenizer.decode(chosen)
    assert text.decode(errors="replace")
    chunks = [c for c in client.chat.completions.create(**asked, stream=True) if c.choices]
    streamed = [item for c in chunks if c.choices[0].logprobs for item in c.choices[0].logprobs.content]
    assert streamed == content


def test_completion_scores_and_echo(server: Served, model: world.TinyModel) -> None:
    prompt = "the quick brown fox jumps over the lazy dog and é🐈 the cat"
    ids = server.replica.serving._tokenizer.encode(prompt)
    want = reference(model, ids)
    for repeat in range(2):  # what the cache may hold by then makes no difference
        answer = post(
            server, "/v1/completions", prompt=prompt, max_tokens=0, echo=True, logprobs=3, temperature=0
        ).json()
        [choice] = answer["choices"]
        scores = choice["logprobs"]
        assert choice["text"] == prompt, repeat
        assert answer["usage"]["completion_tokens"] == 0
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        expected = [want[i, token].item() for i, token in enumerate(ids[1:])]
        assert scores["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
        best = want[4].topk(3).values.tolist()
        assert sorted(scores["top_logprobs"][5].values(), reverse=True) == pytest.approx(best, abs=1e-4)
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert token.startswith("bytes:") or prompt[offset:].startswith(token)
    longer = post(
        server, "/v1/completions", prompt=["the", prompt], max_tokens=4, n=2, echo=True, logprobs=0, seed=1,
        ignore_eos=True,
    ).json()  # fmt: skip
    assert [
        c["text"].startswith(p)
        for c, p in zip(longer["choices"], ("the", "the", prompt, prompt), strict=True)
    ]
    assert len(longer["choices"][2]["logprobs"]["tokens"]) == len(ids) + 4
    plain = post(server, "/v1/completions", prompt=prompt, max_tokens=2, echo=True, stream=True)
    assert "".join(e["choices"][0]["text"] for e in events(plain)).startswith(prompt)


def test_scores_stand_with_their_text(server: Served) -> None:
    """Tokens that a stop string cut off have none; in a stream they come with the text, not before it."""
    text = "one two 🐈 STOP three"
    whole = said(server, text, stop=["STOP"], logprobs=True)
    assert whole["message"]["content"] == "one two 🐈 "
    told = b"".join(bytes(item["bytes"]) for item in whole["logprobs"]["content"])
    assert told.startswith("one two 🐈 ".encode())
    assert b"STO" not in told
    stream = events(
        post(server, structured_outputs={"choice": [text]}, stop=["STOP"], logprobs=True, stream=True)
    )
    seen = b""
    shown = ""
    for event in stream:
        choice = event["choices"][0]
        shown += choice["delta"].get("content", "")
        seen += b"".join(bytes(i["bytes"]) for i in (choice["logprobs"] or {"content": []})["content"])
        assert len(seen.decode(errors="ignore")) <= len(shown) + 1
    assert seen == told


# stops, usage, tokens


@pytest.mark.parametrize(
    ("text", "more", "want"),
    [
        ("héllo 🐈 wörld", {"stop": "🐈"}, "héllo "),
        ("héllo 🐈 wörld", {"stop": ["ö", "🐈 w"]}, "héllo "),
        ("héllo 🐈 wörld", {"stop": "é", "include_stop_str_in_output": True}, "hé"),
        ("a👩‍👩‍👧b", {"stop": "\u200d"}, "a👩"),
        ("a👩‍👩‍👧b", {"stop": "👧"}, "a👩‍👩‍"),
        ("aaab", {"stop": "aab"}, "a"),
        ("abc", {"stop": ["abc", "b"]}, "a"),
        ("abcabc", {"stop": "abc", "min_tokens": 3}, "abc"),
        ("ab ab ab", {"stop": "ab", "min_tokens": 100, "max_tokens": 100}, "ab ab ab"),
        ("x\n\ny", {"stop": "\n\n"}, "x"),
        ("STO", {"stop": "STOP"}, "STO"),
    ],
)
def test_stop_strings_in_any_alphabet(server: Served, text: str, more: dict[str, Any], want: str) -> None:
    choice = said(server, text, **more)
    assert (choice["message"]["content"], choice["finish_reason"]) == (want, "stop")
    stream = events(post(server, structured_outputs={"choice": [text]}, stream=True, **more))
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in stream) == want


def test_stop_tokens(server: Served) -> None:
    [token] = server.replica.serving._tokenizer.encode("x")
    assert said(server, "abxcd", stop_token_ids=[token])["message"]["content"] == "ab"
    kept = said(server, "abxcd", stop_token_ids=[token], include_stop_str_in_output=True)
    assert kept["message"]["content"] == "abx"


def test_usage_tells_what_the_cache_had(server: Served) -> None:
    content = "the cat sat on the mat " * 9
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    first, second = (post(server, **asked).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached % 16 == 0
    assert second["prompt_tokens"] - 16 <= cached < second["prompt_tokens"]
    stream = events(post(server, **asked, stream=True, stream_options={"include_usage": True}))
    assert stream[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    many = post(server, messages=[{"role": "user", "content": content + "!"}], n=4, max_tokens=2).json()[
        "usage"
    ]
    assert many["prompt_tokens"] == second["prompt_tokens"] + 1, "a prompt counts once, however many choices"


def test_tokens_there_and_back(server: Served) -> None:
    text = "héllo 🐈 <|im_end|>"
    tokens = post(server, "/tokenize", prompt=text).json()["tokens"]
    assert post(server, "/detokenize", tokens=tokens).json() == {"prompt": text}
    assert post(server, "/detokenize", tokens=[]).json() == {"prompt": ""}
    assert post(server, "/detokenize", tokens=[99999]).json()["error"]["param"] == "tokens"


# refusals


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (schema({"not": {}}), "response_format"),
        (schema({"enum": ["x" * 70000]}), "response_format"),
        ({"structured_outputs": {"json": DEEP}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
        ({"tools": [function(name="<|im_end|>")]}, "tools[0].function.name"),
        ({"tools": [function(name="f", parameters={"type": "nope"})], "tool_choice": "required"}, "tools"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", **function(name="f", arguments="[]")}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"min_tokens": 101}, "min_tokens"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: Served, change: dict[str, Any], param: str) -> None:
    answer = post(server, **change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 600


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": "yes?"}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"tools": TOOLS}, "tools"),
        ({"prompt": [999999]}, "prompt"),
    ],
)
def test_refusals_of_completions(server: Served, change: dict[str, Any], param: str) -> None:
    answer = post(server, "/v1/completions", **{"prompt": "x", **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_no_body_makes_a_500(server: Served) -> None:
    """Fields of the right names with values of any kind: served or refused, never failed."""
    draw = random.Random(11)
    values: list[Any] = [
        None, True, False, 0, 1, -1, 1e308, 3.5, 2**63, "", "x", "\x00", "😀", "<|im_end|>",
        [], [[]], [1], ["x"], [None], {}, {"type": "json_object"}, {"type": []}, {"a": {"b": []}}, {"7": 5},
        {"regex": "a*"}, {"json": {}}, {"choice": ["\n"]}, [{"role": "user", "content": "x"}],
        [{"role": "assistant", "content": None, "tool_calls": []}], TOOLS, DEEP,
    ]  # fmt: skip
    fields = [
        "messages", "prompt", "tools", "tool_choice", "response_format", "structured_outputs", "logit_bias",
        "stop", "n", "seed", "temperature", "top_p", "top_k", "min_p", "logprobs", "top_logprobs", "echo",
        "max_tokens", "min_tokens", "stop_token_ids", "repetition_penalty", "presence_penalty",
        "stream_options", "parallel_tool_calls", "user",
    ]  # fmt: skip
    seen = set()
    for _ in range(250):
        chat = draw.random() < 0.6
        base: dict[str, Any] = {"messages": USER} if chat else {"prompt": "x"}
        body = {**base, "model": "base", "max_tokens": 2, "temperature": 0}
        body |= {draw.choice(fields): draw.choice(values) for _ in range(draw.randint(1, 2))}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        answer = server.http.post(path, json=body)
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400), (body, answer.text)
        if answer.status_code == 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert seen == {200, 400}
