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
from tenantry_engine.server.text import Choice
from tenantry_engine.server.text import Form as TextForm
from tenantry_engine.server.tools import Call, Hermes, Llama3, Mistral, Reader, Tool, ToolFormat, find_format
from tenantry_engine.tokenizer import TextStream, Tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"enum": ["<tool_call>", "é"]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [Tool("add", SCHEMA), Tool("get-time", {})]
MARKS = {"[TOOL_CALLS]": 900, "[ARGS]": 901}
FORMS = [Hermes(as_tokens=True), Hermes(as_tokens=False), Llama3(), Mistral({}, named=False)]
NAMES = ["tokens", "text", "llama3", "mistral-text", "mistral-list", "mistral-named"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = make_tool_model(tmp_path_factory.mktemp("model")).folder
    file = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    file.add_special_tokens([AddedToken(text, special=True) for text in MARKS])
    file.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(params=NAMES)
def form(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> ToolFormat:
    """Every form; Mistral's both ones with marks that are tokens, as its models have them."""
    mistral = [Mistral(tokenizer.special_tokens, named=named) for named in (False, True)]
    return dict(zip(NAMES, [*FORMS, *mistral], strict=True))[request.param]


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
        (3, '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}]', "", [ADD]),
        (3, 'a\n[TOOL_CALLS][{"name":"add","arguments":{"x":1},"id":"abcdefghi"}]b', "a\nb", [ADD]),
        (3, '[TOOL_CALLS] [{"name": "get-time"}, {"name": "add", "arguments": {"x": 1}}]', "",
         [("get-time", "{}"), ADD]),
        (3, '[TOOL_CALLS]add[ARGS]{"x": 1}', "", [ADD]),
        (3, '[TOOL_CALLS] add [TOOL_CALLS]add[ARGS] {"x": 1}', "[TOOL_CALLS] add ", [ADD]),
        (3, 'a[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS]get-time[ARGS]{}', "a", [ADD, ("get-time", "{}")]),
        (3, '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"x": 1}', "", [ADD]),
        (3, '[TOOL_CALLS]add{"x": 1}', "", [ADD]),
        (3, '[TOOL_CALLS]add[ARGS]{"x": 1, "s": "}]\\"[TOOL_CALLS]\\\\"}', "",
         [("add", '{"x": 1, "s": "}]\\"[TOOL_CALLS]\\\\"}')]),
        (3, '[TOOL_CALLS][TOOL_CALLS]add[ARGS]{"x": 1}', "[TOOL_CALLS]", [ADD]),
        (3, '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}, {"name": "rm", "arguments": {}}]', None, []),
        (3, '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}', None, []),
        (3, "[TOOL_CALLS] []", None, []),
        (3, '[TOOL_CALLS] [["add"], 5, null, "add"]', None, []),
        (3, '[TOOL_CALLS] [{"name": ["add"], "arguments": {}}]', None, []),
        (3, '[TOOL_CALLS]rm[ARGS]{"x": 1}', None, []),
        (3, '[TOOL_CALLS]add[ARGS]{"x": 1', None, []),
        (3, "[TOOL_CALLS]add[ARGS]{x}", None, []),
        (3, '[TOOL_CALLS]add[ARGS]["x"]', None, []),
        (3, '[TOOL_CALLS]add[ARGS] so {"x": 1}', None, []),
        (3, "[TOOL_CALLS]add[ARGS]", None, []),
        (3, "[TOOL_CALLS] " + "[" * 5000, None, []),
        (3, "[TOOL_CALLS] " + "[" * 3000 + "]" * 3000, None, []),
        (3, "[TOOL_CALLS]" + "x" * 400 + '{"x": 1}', None, []),
        (3, "[TOOL_CALLS]" * 40, None, []),
        (3, "a [TOOL_CA", None, []),
        (3, '[{"name": "add", "arguments": {"x": 1}}]', None, []),
        (3, 'add[ARGS]{"x": 1}', None, []),
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


@pytest.mark.parametrize("value", [r'"\ud800"', "NaN", "1e999", "-Infinity"])
def test_what_json_cannot_say_again_is_no_call(value: str) -> None:
    for form, text in (
        (0, f'<tool_call>{{"name": "add", "arguments": {{"x": {value}}}}}</tool_call>'),
        (2, f'{{"name": "add", "parameters": {{"x": {value}}}}}'),
        (3, f'[TOOL_CALLS]add[ARGS]{{"x": {value}}}'),
        (3, f'[TOOL_CALLS] [{{"name": "add", "arguments": {{"x": {value}}}}}]'),
    ):
        assert read(FORMS[form].reader(["add"]), [text]) == (text, [])


def test_content_is_not_kept_waiting() -> None:
    reader = FORMS[0].reader(["add"])
    assert reader.push("hello <b") == ("hello <b", [])
    assert reader.push(" <tool") == (" ", [])
    assert reader.push("s>") == ("<tools>", [])
    assert FORMS[2].reader(["add"]).push("hello") == ("hello", [])
    reader = FORMS[3].reader(["add"])
    assert reader.push("hello [TOOL") == ("hello ", [])
    assert reader.push("S] [TOOL_CALLS] x{") == ("[TOOLS] [TOOL_CALLS] x{", [])
    assert reader.push("[TOOL_CALLS]" + "y" * 300)[0].startswith("[TOOL_CALLS]y"), "a name has an end"


def test_calls_of_mistral_come_at_once_with_ids_that_its_templates_take_back() -> None:
    reader = FORMS[3].reader(["add"])
    ids = []
    for piece in ('[TOOL_CALLS]add[ARGS]{"x": 1}', '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1}}]'):
        content, [call] = reader.push(piece)
        assert (content, call.name, call.arguments) == ("", *ADD)
        ids.append(call.id)
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert len(set(ids)) == 2


@pytest.mark.parametrize("text", ['[{"name": "add", "arguments": {"x": 1}}]', 'add[ARGS]{"x": 1}'])
def test_marks_that_are_special_tokens_reach_the_reader(tokenizer: Tokenizer, text: str) -> None:
    marks = tokenizer.special_tokens
    ids = [marks["[TOOL_CALLS]"]]
    for index, part in enumerate(text.split("[ARGS]")):
        ids += [marks["[ARGS]"]] * (index > 0) + tokenizer.encode_middle(part)
    choice = Choice(0, tokenizer, TextForm(), reader=FORMS[3].reader(["add"]))
    deltas = [choice.take(token, None) for token in ids] + [choice.take(None, "stop")]
    assert "".join(delta.text for delta in deltas) == ""
    assert [(call.name, call.arguments) for call in choice.whole.calls] == [ADD]
    assert choice.finish == "tool_calls"
    assert tokenizer.encode_middle("[TOOL_CALLS]") != [marks["[TOOL_CALLS]"]], (
        "a message never says the token"
    )


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


def test_strict_rules_leave_text_free_and_hold_calls(
    grammars: Grammars, tokenizer: Tokenizer, form: ToolFormat
) -> None:
    source = grammar.from_lark(form.strict_rules([TOOLS[0]]))
    mark = tokenizer.token_id("[TOOL_CALLS]" if isinstance(form, Mistral) else "<tool_call>")
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
    assert read_calls or form in (FORMS[1], FORMS[3]), "spelling the mark out by chance is rare"


def test_families_are_told_by_their_templates() -> None:
    marks = {"<tool_call>": 5, "</tool_call>": 6}
    qwen = find_format("{% if tools %}<tool_call>{% endif %}", marks)
    assert isinstance(qwen, Hermes)
    assert "call: <tool_call>" in qwen.rules(TOOLS, parallel=True)
    spelled = find_format("{% if tools %}<tool_call>{% endif %}", {})
    assert spelled is not None
    assert 'call: "<tool_call>"' in spelled.rules(TOOLS, parallel=True)
    llama = '{% if tools %}Environment: ipython {"name": n, "parameters": p}{% endif %}'
    assert isinstance(find_format(llama, {}), Llama3)
    assert find_format(world.TEMPLATE, {}) is None
    older = find_format("{% if tools %}[TOOL_CALLS] [{{ calls }}]{% endif %}", MARKS)
    assert isinstance(older, Mistral)
    assert older.rules(TOOLS, parallel=True).startswith("calls: <[900]> body\n")
    newer = find_format("{% if tools %}[TOOL_CALLS]f[ARGS]{{ arguments }}{% endif %}", MARKS)
    assert newer is not None
    assert '"add" <[901]> arguments_0' in newer.rules(TOOLS, parallel=True)
    assert find_format("[TOOL_CALLS]", MARKS) is None
