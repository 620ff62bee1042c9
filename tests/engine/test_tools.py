"""Tool calls in the forms of the families: written by the rules, read back however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import engine_world as world
import jsonschema
import pytest
import torch
from server_world import make_tool_model
from tenantry_engine import grammar
from tenantry_engine.grammar import Grammars
from tenantry_engine.sampler import Sampler
from tenantry_engine.sequence import Sampling, Sequence
from tenantry_engine.server.tools import Call, Hermes, Llama3, Reader, Tool, ToolFormat, find_format
from tenantry_engine.tokenizer import TextStream, Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"enum": ["<tool_call>", "é"]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [Tool("add", SCHEMA), Tool("get-time", {})]
FORMS = [Hermes(as_tokens=True), Hermes(as_tokens=False), Llama3()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_tool_model(tmp_path_factory.mktemp("model")).folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, tokenizer.vocab_size, [2])


def read(reader: Reader, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    content, calls = "", []
    for piece in pieces:
        text, found = reader.push(piece)
        content += text
        calls += found
    text, found = reader.finish()
    return content + text, [(call.name, call.arguments) for call in [*calls, *found]]


def cut(text: str, draw: random.Random) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = draw.randint(0, 7)
        pieces.append(text[at : at + size])
        at += size
    return pieces


ADD = ("add", '{"x": 1}')


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (0, '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>', "", [ADD]),
        (0, 'a\n<tool_call>\n{"name":"add","arguments":{"x":1}}\n</tool_call>\nb', "a\n\nb", [ADD]),
        (0, 'a <tool_call>{"name": "add", "arguments": {"x": 1}}', "a ", [ADD]),
        (0, '<tool_call>{"name": "get-time"}</tool_call>', "", [("get-time", "{}")]),
        (0, '<tool_call>{"name": "add", "arguments": 5}</tool_call>', None, []),
        (0, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
        (0, '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', None, []),
        (0, "<tool_call>" + "[" * 5000 + "</tool_call>", None, []),
        (0, '{"name": "add", "arguments": {"x": 1}}', None, []),
        (0, "a < b <tool", None, []),
        (2, '{"name": "add", "parameters": {"x": 1}}', "", [ADD]),
        (2, '{"name":"add","parameters":{"x":1}}; {"name":"get-time","parameters":{}} ', "", [ADD, ("get-time", "{}")]),
        (2, '{"name": "rm", "parameters": {}}', None, []),
        (2, '{"answer": 5}', None, []),
        (2, '{"name": "add", "parameters": {"x": 1}} and more', None, []),
        (2, 'so: {"name": "add", "parameters": {"x": 1}}', None, []),
        (2, "{" * 5000, None, []),
        (2, "", "", []),
    ],
)  # fmt: skip
def test_calls_are_read_however_the_text_is_cut(
    form: int, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    want = (text if content is None else content, calls)
    draw = random.Random(form)
    names = [tool.name for tool in TOOLS]
    assert read(FORMS[form].reader(names), [text]) == want
    for _ in range(20 if len(text) < 1000 else 2):
        assert read(FORMS[form].reader(names), cut(text, draw)) == want


def test_content_is_not_kept_waiting() -> None:
    reader = FORMS[0].reader(["add"])
    assert reader.push("hello <b") == ("hello <b", [])
    assert reader.push(" <tool") == (" ", [])
    assert reader.push("s>") == ("<tools>", [])
    assert FORMS[2].reader(["add"]).push("hello") == ("hello", [])


def answer(
    grammars: Grammars, tokenizer: Tokenizer, source: str, seed: int, bias: dict[int, float] | None = None
) -> str:
    """What random logits write under a grammar."""
    sampler = Sampler(grammars)
    asked = Sampling(
        temperature=1.0, seed=seed, grammar=source, stop_ids=frozenset({2}), logit_bias=bias or {}
    )
    one = Sequence("s", "t", [5], asked, "base")
    draw = torch.Generator().manual_seed(seed)
    stream, text = TextStream(tokenizer), ""
    for _ in range(600):
        choices = sampler.choose(torch.randn(1, tokenizer.vocab_size, generator=draw), [one])
        token = choices.tokens[one]
        one.tokens.append(token)
        if token != 2:
            text += stream.push(token)
        if one in choices.ends or token == 2:
            assert choices.ends.get(one, "stop") == "stop"
            break
    return text + stream.finish()


def check(call: Call | tuple[str, str]) -> None:
    name, arguments = call if isinstance(call, tuple) else (call.name, call.arguments)
    value: Any = json.loads(arguments)
    assert isinstance(value, dict)
    if name == "add":
        jsonschema.validate(value, SCHEMA)


@pytest.mark.parametrize("form", FORMS, ids=["tokens", "text", "llama3"])
def test_forced_calls_are_read_back(grammars: Grammars, tokenizer: Tokenizer, form: ToolFormat) -> None:
    tools = [TOOLS[0], Tool("neg", {"properties": {}, "additionalProperties": False})]
    seen = set()
    for seed in range(5):
        for parallel in (True, False):
            source = grammar.from_lark("start: calls\n" + form.rules(tools, parallel))
            content, calls = read(form.reader(["add", "neg"]), [answer(grammars, tokenizer, source, seed)])
            assert calls
            assert not content.strip()
            assert parallel or len(calls) == 1
            for call in calls:
                check(call)
                seen.add(call[0])
    assert seen == {"add", "neg"}


@pytest.mark.parametrize("form", FORMS, ids=["tokens", "text", "llama3"])
def test_strict_rules_leave_text_free_and_hold_calls(
    grammars: Grammars, tokenizer: Tokenizer, form: ToolFormat
) -> None:
    source = grammar.from_lark(form.strict_rules([TOOLS[0]]))
    mark = tokenizer.token_id("<tool_call>")
    begin = "{" if isinstance(form, Llama3) else "<"
    bias = {tokenizer.encode(begin)[0]: 4.0, mark: 4.0, 2: 2.0}  # type: ignore[dict-item]
    read_calls, read_text = 0, 0
    for seed in range(12):
        content, calls = read(form.reader(["add"]), [answer(grammars, tokenizer, source, seed, bias)])
        read_calls += len(calls)
        read_text += bool(content)
        for call in calls:
            check(call)
    assert read_text
    assert read_calls or form is FORMS[1], "spelling the mark out by chance is rare"


def test_families_are_told_by_their_templates() -> None:
    marks = ["<tool_call>", "</tool_call>"]
    qwen = find_format("{% if tools %}<tool_call>{% endif %}", marks)
    assert isinstance(qwen, Hermes)
    assert "call: <tool_call>" in qwen.rules(TOOLS, parallel=True)
    spelled = find_format("{% if tools %}<tool_call>{% endif %}", [])
    assert spelled is not None
    assert 'call: "<tool_call>"' in spelled.rules(TOOLS, parallel=True)
    llama = '{% if tools %}Environment: ipython {"name": n, "parameters": p}{% endif %}'
    assert isinstance(find_format(llama, []), Llama3)
    assert find_format(world.TEMPLATE, []) is None
    assert find_format("{% if tools %}[TOOL_CALLS]{% endif %}", []) is None
