"""Text to tokens and back. Only the chat template may emit special tokens; text of tenants and users never does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from tenantry_engine.errors import EngineError, RequestError

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Unicode's noncharacters: reserved for use inside a program, never for interchange."""


_TOOL_MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
"""Tokens that a reader of tool calls must see in the output, also where a model calls them special."""

_SENTINEL = "\x02"

_WORDS_OF_MODELS = ("<think>", "</think>")
"""Added tokens that a model's own earlier answers hold, and that templates look for in them."""


class Tokenizer:
    """The tokenizer and chat template of a model folder. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise EngineError(f"`--model` must hold a tokenizer.json: {path}")
        raw = json.loads(path.read_text(encoding="utf-8"))
        listed = raw.get("added_tokens") or []
        self._silent_ids = frozenset(
            token["id"] for token in listed if token["special"] and token["content"] not in _TOOL_MARKS
        )
        for token in listed:
            # `<tool_response>` and its like say who speaks as much as a special token does
            if _is_tag(token["content"]) and token["content"] not in _WORDS_OF_MODELS:
                token["special"] = True
        self._tokenizer: Any = HfTokenizer.from_str(json.dumps(raw))
        self._tokenizer.encode_special_tokens = True  # special tokens in a text are text
        added: Mapping[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: (number, token) for number, token in added.items() if token.special}
        self._added = {number: token.content for number, token in added.items()}
        self._byte_level = _uses_byte_level(raw)
        longest_first = sorted(self._special, key=len, reverse=True)
        self._split = (
            re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if self._special else None
        )
        settings = _read_json(folder / "tokenizer_config.json")
        self._names = {
            name: _token_text(settings.get(name))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        sources = _template_sources(folder, settings)
        self._source = sources.get("tool_use") or sources.get("default") or ""
        self._templates = {name: _compile(source) for name, source in sources.items()}
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_tokens(self) -> dict[str, int]:
        """All tokens that the template alone may emit: their texts and ids."""
        return {text: number for text, (number, _) in self._special.items()}

    @property
    def template_source(self) -> str:
        """The chat template that conversations with tools are rendered by; empty when there is none."""
        return self._source

    def encode_middle(self, text: str) -> list[int]:
        """Text as it is tokenised in the middle of other text; special tokens in it are text."""
        if self._byte_level:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        # others put a space before what they think is a beginning
        ids = self._tokenizer.encode(_SENTINEL + text, add_special_tokens=False).ids
        for count in range(1, len(ids) + 1):
            if b"".join(map(self.token_bytes, ids[:count])).endswith(_SENTINEL.encode()):
                return ids[count:]
        raise ValueError("the tokenizer does not keep a text as it is")

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for: its part of the text in UTF-8, perhaps not whole characters."""
        if token in self._added:
            return self._added[token].encode()
        text: str | None = self._tokenizer.id_to_token(token)
        if text is None:
            return b""  # the model's table is longer than the vocabulary
        if self._byte_level:
            return b"".join(
                bytes([_BYTE_OF[char]]) if char in _BYTE_OF else char.encode("utf-8", "replace")
                for char in text
            )
        if _BYTE_FALLBACK.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()

    def token_id(self, text: str) -> int | None:
        """The id of a token, by its text."""
        number: int | None = self._tokenizer.token_to_id(text)
        return number

    def encode(self, text: str) -> list[int]:
        """A prompt of `/v1/completions`: with the model's own beginning, its text without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The template's rendering of a conversation, ready for the model to answer.

        Special tokens that stand in a message or a tool are made harmless before rendering and become plain text
        after it. Raises RequestError where the template refuses the messages.
        """
        template = self._templates.get("tool_use" if tools else "default", self._templates.get("default"))
        if template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions",
                code="no_chat_template",
                param="messages",
            )
        mark = self._unused_mark([messages, tools])
        try:
            text = template.render(
                messages=_map_strings(messages, lambda s: self._defuse(s, mark)),
                tools=_map_strings(tools, lambda s: self._defuse(s, mark)) if tools else None,
                add_generation_prompt=True,
                **self._names,
            )
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise RequestError(
                f"`messages` must suit the model's chat template: {str(error)[:200]}", param="messages"
            ) from error
        return self._encode_rendered(text, mark)

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens to text; special tokens leave nothing."""
        text: str = self._tokenizer.decode(
            [i for i in ids if i not in self._silent_ids], skip_special_tokens=False
        )
        return text

    def _encode_rendered(self, text: str, mark: str) -> list[int]:
        pieces = self._split.split(text) if self._split else [text]
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._special[piece][0])
                continue
            before = self._special[pieces[index - 1]][1] if index else None
            after = self._special[pieces[index + 1]][1] if index + 1 < len(pieces) else None
            plain = piece.replace(mark, "")
            plain = plain.lstrip() if before is not None and before.rstrip else plain
            plain = plain.rstrip() if after is not None and after.lstrip else plain
            if plain:
                ids += self._tokenizer.encode(plain, add_special_tokens=False).ids
        return ids

    def _defuse(self, text: str, mark: str) -> str:
        """Breaks every special token in a text by a mark, also one that the text begins or ends in the middle of."""
        if self._split is None:
            return text
        text = self._split.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        for size in range(min(len(text), max(map(len, self._special)) - 1), 0, -1):
            if any(token.startswith(text[-size:]) for token in self._special if len(token) > size):
                text = text[: len(text) - size + 1] + mark + text[len(text) - size + 1 :]
                break
        for size in range(min(len(text), max(map(len, self._special)) - 1), 0, -1):
            if any(token.endswith(text[:size]) for token in self._special if len(token) > size):
                return text[: size - 1] + mark + text[size - 1 :]
        return text

    def _unused_mark(self, value: Any) -> str:
        used = json.dumps(value, ensure_ascii=False)
        for mark in _MARKS:
            if mark not in used:
                return mark
        raise RequestError("`messages` must not use all of Unicode's noncharacters", param="messages")


class TextStream:
    """Turns tokens into text as they come. Text is held back while its last character may still be incomplete."""

    _WINDOW = 8

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = 0  # first token of the window that is decoded each time
        self._read = 0  # tokens whose text was given out

    def push(self, token: int) -> str:
        """The text that this token makes certain; often empty for tokens that end inside a character."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        now = self._tokenizer.decode(self._ids[self._begin :])
        if now.endswith("\ufffd") and len(self._ids) - self._read < self._WINDOW:
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """What was held back."""
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        now = self._tokenizer.decode(self._ids[self._begin :])
        self._begin = self._read = len(self._ids)
        return now[len(before) :]


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, change) for item in value]
    return value


def _is_tag(text: str) -> bool:
    return text.startswith("<") and text.endswith(">") and len(text) > 2


def _bytes_of_byte_level() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves and the others as the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _bytes_of_byte_level()
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")


def _uses_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    decoder = tokenizer.get("decoder") or {}
    return "ByteLevel" in [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders") or [])]


def _template_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        return {str(t.get("name")): str(t["template"]) for t in source}
    return {"default": source} if source else {}


def _compile(source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise EngineError(f"the chat template of `--model` must be valid Jinja: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """As transformers gives it to templates; never escaped, or the marks would not be found again."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value or "")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
