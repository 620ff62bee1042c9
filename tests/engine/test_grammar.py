"""Grammars: answers are of the form asked for, bounds hold, and no tenant learns of another's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import engine_world as world
import jsonschema
import llguidance
import pytest
import torch
from tenantry_engine import grammar
from tenantry_engine.errors import RequestError
from tenantry_engine.grammar import Grammars
from tenantry_engine.sampler import Sampler
from tenantry_engine.sequence import Sampling, Sequence
from tokenizers import Tokenizer

VOCAB = 330
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    world.make_tokenizer(folder)
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def grammars(tokenizer: Path) -> Grammars:
    return Grammars(tokenizer.read_text, VOCAB, [EOS])


def write(grammars: Grammars, tokenizer: Path, source: str, seed: int) -> tuple[str, str]:
    """What random logits write under a grammar, and why it ended."""
    sampler = Sampler(grammars)
    one = Sequence("s", "t", [5], Sampling(temperature=1.0, seed=seed, grammar=source), "base")
    draw = torch.Generator().manual_seed(seed)
    for _ in range(3000):
        choices = sampler.choose(torch.randn(1, VOCAB, generator=draw), [one])
        one.tokens.append(choices.tokens[one])
        if one in choices.ends:
            return Tokenizer.from_file(str(tokenizer)).decode(one.tokens[1:]), choices.ends[one]
    raise AssertionError("the structure never ended")


NODE = {
    "type": "object",
    "properties": {"v": {"type": "null"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
    "required": ["v"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 3, "maximum": 40},
            "b": {"enum": ["x", 1, None]},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "string", "maxLength": 8},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"type": "string", "format": "date"},
    {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
    {"const": {"k": [1, "é🐈"]}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=[str(i) for i in range(len(SCHEMAS))])
def test_every_answer_fits_its_schema(grammars: Grammars, tokenizer: Path, schema: dict[str, Any]) -> None:
    for seed in range(4):
        text, end = write(grammars, tokenizer, grammar.from_schema(schema), seed)
        assert end == "stop"
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-(foo|bar)", r"é+ß", r"(a|bc)*x", r"\d\w\s", "🐈{2}"])
def test_every_answer_matches_its_regex(grammars: Grammars, tokenizer: Path, pattern: str) -> None:
    for seed in range(3):
        text, end = write(grammars, tokenizer, grammar.from_regex(pattern), seed)
        assert end == "stop"
        assert re.fullmatch(pattern, text), (pattern, text)


def test_choices_hold_any_text(grammars: Grammars, tokenizer: Path) -> None:
    choices = ['say "no"', "back\\slash", "line\nbreak", "é🐈", "start: x", "/", "<[5]>"]
    seen = {write(grammars, tokenizer, grammar.from_choice(choices), seed)[0] for seed in range(40)}
    assert seen <= set(choices)
    assert len(seen) > 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammar.from_schema({"type": "nope"}),
        lambda: grammar.from_schema({"not": {}}),
        lambda: grammar.from_schema({"$ref": "#/nowhere"}),
        lambda: grammar.from_schema({"$ref": "http://127.0.0.1:1/x"}),
        lambda: grammar.from_schema({"$ref": "file:///etc/passwd"}),
        lambda: grammar.from_schema({"type": "string", "pattern": "(?=a)"}),
        lambda: grammar.from_schema({"properties": {"a": {"x-guidance": {"lenient": True}}}}),
        lambda: grammar.from_schema({"enum": ["x" * 70_000]}),
        lambda: grammar.from_regex("(a"),
        lambda: grammar.from_regex("(?=a)b"),
        lambda: grammar.from_regex("x" * 5000),
        lambda: grammar.from_choice(["x" * 70_000]),
        lambda: grammar.from_lark("start: nowhere"),
    ],
)
def test_what_cannot_be_followed_is_a_400(grammars: Grammars, make: Any) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.prepare("t", make())
    assert caught.value.status == 400
    assert "must" in caught.value.message
    assert len(caught.value.message) < 500


def test_a_structure_that_outgrows_its_bounds_ends(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(step_max_items=30, verbose_errors=False)
    monkeypatch.setattr(grammar, "_LIMITS", limits)
    small = Grammars(tokenizer.read_text, VOCAB, [EOS])
    source = grammar.from_lark("start: a a a a a a\na: b | b b | b b b\nb: c | c c\nc: /x/ | /x/ /x/")
    _, end = write(small, tokenizer, source, 0)
    assert end == "grammar"


def test_tenants_share_no_compiled_grammar(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = llguidance.LLMatcher

    class Counted:
        def __new__(cls, *arguments: Any, **more: Any) -> Any:
            compiled.append(arguments[1])
            return real(*arguments, **more)

    grammars = Grammars(tokenizer.read_text, VOCAB, [EOS])
    source = grammar.from_regex("ab")
    monkeypatch.setattr(grammar.llguidance, "LLMatcher", Counted)
    for tenant in ("t", "t", "u", "u"):
        grammars.prepare(tenant, source)
    assert len(compiled) == 2
    monkeypatch.setattr(grammar.llguidance, "LLMatcher", real)
    for number in range(100):
        grammars.prepare("t", grammar.from_regex(f"x{number}"))
    assert len(grammars._compiled) == grammar._KEPT
    assert grammars.start("u", source).read(1) == "grammar", "one that was dropped is compiled again"


def test_sequences_of_one_grammar_stand_at_their_own_places(grammars: Grammars, tokenizer: Path) -> None:
    source = grammar.from_choice(["ab", "cd"])
    encode = Tokenizer.from_file(str(tokenizer)).encode
    a, d = encode("a").ids[0], encode("d").ids[0]
    first, second = grammars.start("t", source), grammars.start("t", source)
    assert first.read(a) is None
    assert second.read(encode("c").ids[0]) is None
    assert second.read(d) == "stop"
    assert first.read(d) == "grammar"
