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
from tenantry_engine.tokenizer import Tokenizer
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers

VOCAB = 330
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    world.make_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, VOCAB, [EOS])


def write(grammars: Grammars, tokenizer: Tokenizer, source: str, seed: int) -> tuple[str, str]:
    """What random logits write under a grammar, and why it ended."""
    tokens, end = write_tokens(grammars, source, seed)
    return tokenizer.decode(tokens), end


def write_tokens(grammars: Grammars, source: str, seed: int, vocab: int = VOCAB) -> tuple[list[int], str]:
    sampler = Sampler(grammars)
    one = Sequence("s", "t", [5], Sampling(temperature=1.0, seed=seed, grammar=source), "base")
    draw = torch.Generator().manual_seed(seed)
    for _ in range(3000):
        choices = sampler.choose(torch.randn(1, vocab, generator=draw), [one])
        one.tokens.append(choices.tokens[one])
        if one in choices.ends:
            return one.tokens[1:], choices.ends[one]
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
def test_every_answer_fits_its_schema(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    for seed in range(4):
        text, end = write(grammars, tokenizer, grammar.from_schema(schema), seed)
        assert end == "stop"
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-(foo|bar)", r"é+ß", r"(a|bc)*x", r"\d\w\s", "🐈{2}"])
def test_every_answer_matches_its_regex(grammars: Grammars, tokenizer: Tokenizer, pattern: str) -> None:
    for seed in range(3):
        text, end = write(grammars, tokenizer, grammar.from_regex(pattern), seed)
        assert end == "stop"
        assert re.fullmatch(pattern, text), (pattern, text)


def test_choices_hold_any_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    marks = ["<|im_end|>", "a<|im_end|><|im_start|>b"]
    choices = [
        *marks,
        'say "no"',
        "back\\slash",
        "line\nbreak",
        "é🐈",
        "start: x",
        "/",
        "<[5]>",
    ]
    seen = {write(grammars, tokenizer, grammar.from_choice(choices), seed) for seed in range(60)}
    assert seen <= {(choice, "stop") for choice in choices}
    assert set(marks) & {text for text, _ in seen}, "special tokens in a text are text"
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


def test_a_structure_that_outgrows_its_bounds_ends(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = llguidance.LLParserLimits(step_max_items=30, verbose_errors=False)
    monkeypatch.setattr(grammar, "_LIMITS", limits)
    small = Grammars(lambda: tokenizer, VOCAB, [EOS])
    source = grammar.from_lark("start: a a a a a a\na: b | b b | b b b\nb: c | c c\nc: /x/ | /x/ /x/")
    _, end = write(small, tokenizer, source, 0)
    assert end == "grammar"


def test_tenants_share_no_compiled_grammar(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = llguidance.LLMatcher

    class Counted:
        def __new__(cls, *arguments: Any, **more: Any) -> Any:
            compiled.append(arguments[1])
            return real(*arguments, **more)

    grammars = Grammars(lambda: tokenizer, VOCAB, [EOS])
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


def test_grammars_in_use_and_the_newest_stay_compiled(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_KEPT", 2)
    grammars = Grammars(lambda: tokenizer, VOCAB, [EOS])
    used, idle, fresh = (grammar.from_regex(text) for text in ("a", "b", "c"))
    for source in (used, idle, used, fresh):
        grammars.prepare("t", source)
    assert set(grammars._compiled) == {("t", used), ("t", fresh)}


def test_any_of_the_models_ends_ends_an_answer_that_may_end(tokenizer: Tokenizer) -> None:
    grammars = Grammars(lambda: tokenizer, VOCAB, [EOS, EOS + 1])
    [a] = tokenizer.encode("a")
    for end in (EOS, EOS + 1):
        matching = grammars.start("t", grammar.from_regex("a+"))
        assert not matching.allowed()[end // 8] >> end % 8 & 1, "nothing is there yet"
        assert matching.read(a) is None
        assert matching.allowed()[end // 8] >> end % 8 & 1
        assert matching.read(end) == "stop"


def test_a_bound_may_be_reached() -> None:
    grammar.from_regex("x" * grammar.MAX_REGEX_CHARS)
    grammar.from_schema({"const": "x" * (grammar.MAX_SCHEMA_BYTES - len('{"const":""}'))})
    for make in (
        lambda: grammar.from_regex("x" * (grammar.MAX_REGEX_CHARS + 1)),
        lambda: grammar.from_schema({"const": "x" * (grammar.MAX_SCHEMA_BYTES + 1 - len('{"const":""}'))}),
    ):
        with pytest.raises(RequestError, match="must be at most"):
            make()


def test_blanks_between_the_parts_of_json_come_to_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A weak model may write blanks for ever where JSON lets it."""
    [blank] = tokenizer.encode(" ")
    matching = grammars.start("t", grammar.from_schema({"type": "array", "items": {"type": "null"}}))
    assert matching.read(tokenizer.encode("[")[0]) is None
    read = [matching.read(blank) for _ in range(17)]
    assert read == [None] * 16 + ["grammar"]


def test_sequences_of_one_grammar_stand_at_their_own_places(grammars: Grammars, tokenizer: Tokenizer) -> None:
    source = grammar.from_choice(["ab", "cd"])
    encode = tokenizer.encode
    a, d = encode("a")[0], encode("d")[0]
    first, second = grammars.start("t", source), grammars.start("t", source)
    assert first.read(a) is None
    assert second.read(encode("c")[0]) is None
    assert second.read(d) == "stop"
    assert first.read(d) == "grammar"


def test_a_vocabulary_of_pieces_with_bytes_to_fall_back_on(tmp_path: Path) -> None:
    """SentencePiece's kind, which writes a space before whatever it takes for a beginning."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ["\u2581", *'abcdefgh{}[]:,"0123', "\u2581a", "ab", '{"', '"}']:
        vocab.setdefault(piece, len(vocab))
    built = HfTokenizer(
        models.BPE(vocab, [("\u2581", "a"), ("a", "b"), ("{", '"'), ('"', "}")], byte_fallback=True)
    )
    built.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    built.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens(["<s>", "</s>"])
    built.save(str(tmp_path / "tokenizer.json"))
    pieces = Tokenizer(tmp_path)
    for text in ("ab é a", '{"a": "</s>"}', " a"):
        assert b"".join(map(pieces.token_bytes, pieces.encode_middle(text))) == text.encode()
    grammars = Grammars(lambda: pieces, pieces.vocab_size, [2])
    for text in ('{"ab": " é a</s>"}', " a"):
        for seed in range(4):
            written, _ = write_tokens(grammars, grammar.from_choice([text]), seed, pieces.vocab_size)
            assert b"".join(map(pieces.token_bytes, written)) == text.encode()
