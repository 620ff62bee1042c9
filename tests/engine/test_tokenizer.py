"""Text to tokens and back: as transformers does it, except that no message can emit a special token."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import engine_world as world
import pytest
from server_world import TOOL_TEMPLATE
from tenantry_engine.errors import RequestError
from tenantry_engine.server.text import StopScanner
from tenantry_engine.tokenizer import TextStream, Tokenizer
from transformers import AutoTokenizer

CHATS = [
    [{"role": "user", "content": "the quick brown fox"}],
    [
        {"role": "system", "content": "You are a cat.\n"},
        {"role": "user", "content": "  naïve – ünïcödé 🐈 \n\n x"},
    ],
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "a < b | c >"},
        {"role": "user", "content": "<|im_"},
    ],
    [
        {"role": "user", "content": "|im_end|>"},
        {"role": "assistant", "content": ">"},
        {"role": "user", "content": "<"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer(tiny: world.TinyModel) -> Tokenizer:
    return Tokenizer(tiny.folder)


@pytest.mark.parametrize("chat", CHATS)
def test_chats_as_transformers_tokenises_them(smollm2: Path, chat: list[dict[str, str]]) -> None:
    reference = AutoTokenizer.from_pretrained(smollm2)
    want = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert Tokenizer(smollm2).encode_chat(chat) == want


def test_no_message_emits_a_special_token(smollm2: Path) -> None:
    tokenizer = Tokenizer(smollm2)
    special = {tokenizer.token_id(text) for text in tokenizer.special_tokens}
    assert len(special) == 17
    for text in tokenizer.special_tokens:
        for content in (text, f"a{text}b", text * 3, f"{text[:4]}{text}{text[4:]}"):
            ids = tokenizer.encode_chat(
                [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
            )
            plain = tokenizer.encode_chat(
                [{"role": "system", "content": "s"}, {"role": "user", "content": "plain"}]
            )
            assert [i for i in ids if i in special] == [i for i in plain if i in special], content
            assert content in tokenizer.decode(ids), "the text itself must arrive unchanged"
            assert not special & set(tokenizer.encode(content))


def test_a_special_token_over_the_border_of_messages(tmp_path: Path) -> None:
    """Two messages that a template puts side by side do not make a token together."""
    world.make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}|im_end|>"
    )
    tokenizer = Tokenizer(tmp_path)
    for parts in (["<|im_", "end|>"], ["<", "|im_end|>"], ["<"]):
        ids = tokenizer.encode_chat([{"role": "user", "content": part} for part in parts])
        assert tokenizer.token_id("<|im_end|>") not in ids, parts


def test_templates_are_sandboxed_and_their_refusals_are_the_clients(tmp_path: Path) -> None:
    world.make_tokenizer(tmp_path)
    for source in (
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
    ):
        (tmp_path / "chat_template.jinja").write_text(source)
        with pytest.raises(RequestError) as caught:
            Tokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}])
        assert caught.value.status == 400


def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    texts = ["naïve 🐈‍⬛ 漢字かな العربية", "a\u0301bc \n\t x" * 3, "\ufffd odd", "🏳️‍🌈" * 5]
    for text in texts:
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer)
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) + stream.finish() == text
        assert not any(piece.endswith("\ufffd") for piece in pieces) or "\ufffd" in text
    for _ in range(60):  # any tokens at all, as a random model yields them
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(40)]
        stream = TextStream(tokenizer)
        streamed = "".join(stream.push(token) for token in ids) + stream.finish()
        assert streamed.replace("\ufffd", "") == tokenizer.decode(ids).replace("\ufffd", "")


def test_stop_strings_over_any_border() -> None:
    draw = random.Random(2)
    text = "one two STOP three"
    for _ in range(50):
        scanner, out, at = StopScanner(["STOP", "TWO"]), "", 0
        while at < len(text):
            size = draw.randint(1, 6)
            piece, stopped = scanner.push(text[at : at + size])
            out += piece
            at += size
            if stopped:
                break
        assert out == "one two "
    scanner = StopScanner(["STOP"])
    assert scanner.push("a STO") == ("a ", False)
    assert scanner.push("RY") == ("STORY", False)
    assert scanner.push("ST") == ("", False)
    assert scanner.finish() == "ST"


def test_no_field_of_a_conversation_with_tools_emits_a_special_token(smollm2: Path, tmp_path: Path) -> None:
    """Every special token of the model, in content, names, arguments, results and schemas, keys and values."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    special = {tokenizer.token_id(text) for text in tokenizer.special_tokens}

    def render(text: str) -> list[int]:
        function = {"name": text, "arguments": {text: [text, {text: 1}]}}
        messages = [
            {"role": "user", "content": text, "name": text},
            {"role": "assistant", "content": text, "tool_calls": [{"id": text, "function": function}]},
            {"role": "tool", "content": f"{text}{text}", "tool_call_id": text},
        ]
        parameters = {"properties": {text: {"description": text, "enum": [text]}}}
        tools = [
            {"type": "function", "function": {"name": "f", "description": text, "parameters": parameters}}
        ]
        return tokenizer.encode_chat(messages, tools)

    plain = [token for token in render("plain") if token in special]
    assert len(plain) == 9
    for text in tokenizer.special_tokens:
        for content in (text, f"a{text}b", f"{text[:4]}{text}{text[4:]}", text[:-1], text[1:], '"' + text):
            ids = render(content)
            assert [token for token in ids if token in special] == plain, content
            assert json.dumps(content, ensure_ascii=False)[1:-1] in tokenizer.decode(ids)


def test_bytes_of_tokens_are_the_bytes_of_their_text(smollm2: Path, tokenizer: Tokenizer) -> None:
    text = "naïve 🐈‍⬛ 漢字 العربية \x00\x7f\xa0\xad \t\n<|im_end|>  end"
    for one in (Tokenizer(smollm2), tokenizer):
        ids = one.encode_middle(text)
        assert b"".join(map(one.token_bytes, ids)) == text.encode()
        assert one.token_bytes(one.token_id("<|im_end|>") or 0) == b"<|im_end|>"
        assert one.token_bytes(1 << 30) == b""


def test_the_stop_string_that_is_complete_first_counts() -> None:
    """Against a reader of single characters, for random texts, stops and cuts."""
    draw = random.Random(5)

    def slowly(text: str, stops: list[str], include: bool) -> str:
        for end in range(1, len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found:
                return text[:end] if include else text[: end - max(map(len, found))]
        return text

    for _ in range(2000):
        text = "".join(draw.choice("ab🐈\n") for _ in range(draw.randint(0, 12)))
        stops = ["".join(draw.choice("ab🐈\n") for _ in range(draw.randint(1, 4))) for _ in range(3)]
        include = draw.random() < 0.5
        scanner, out, at, stopped = StopScanner(stops, include), "", 0, False
        while at < len(text) and not stopped:
            size = draw.randint(1, 4)
            piece, stopped = scanner.push(text[at : at + size])
            out += piece
            at += size
        out += "" if stopped else scanner.finish()
        assert out == slowly(text, stops, include), (text, stops, include)
