"""Structured output: a grammar says which tokens may come next, so that an answer is always of the form asked for.

The grammars themselves are llguidance's (JSON schema, regular expressions, Lark). Here they get bounds, one compiled
copy per tenant, and errors that a client can act on. A `source` is llguidance's own text of a grammar; it is what
crosses from the server to the engine, and the engine compiles it off the step path before the request is admitted.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import llguidance
import orjson

from tenantry_engine.errors import RequestError
from tenantry_engine.tokenizer import Tokenizer

MAX_SCHEMA_BYTES = 64 << 10
MAX_REGEX_CHARS = 4096

_KEPT = 32
"""Compiled grammars kept for the next request."""

_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms of compiling
    step_lexer_fuel=100_000,  # about 7 ms of one step
    step_max_items=20_000,  # about 1 ms of one step
    max_lexer_states=10_000,  # about 20 MB
    max_grammar_size=100_000,
    verbose_errors=False,
)
_JSON: Any = {
    # A weak model may write blanks for ever where JSON lets it.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}",
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}


def from_schema(schema: dict[str, Any] | bool) -> str:
    """JSON that a schema (draft 2020-12, the parts that llguidance knows) describes. Raises RequestError."""
    try:
        text = orjson.dumps(schema)
    except TypeError as error:
        raise RequestError("a JSON schema must be nested less deeply") from error
    if len(text) > MAX_SCHEMA_BYTES:
        raise RequestError(f"a JSON schema must be at most {MAX_SCHEMA_BYTES} bytes, not {len(text)}")
    if b'"x-guidance"' in text:
        raise RequestError("a JSON schema must not use `x-guidance`")
    return str(llguidance.LLMatcher.grammar_from_json_schema(text.decode(), overrides=_JSON))


def any_object() -> str:
    """Any JSON object."""
    return from_schema({"type": "object"})


def from_regex(pattern: str) -> str:
    """Text that a regular expression (Rust's syntax, no look-around) matches from its beginning to its end."""
    if len(pattern) > MAX_REGEX_CHARS:
        raise RequestError(f"a regex must be at most {MAX_REGEX_CHARS} characters, not {len(pattern)}")
    return str(llguidance.LLMatcher.grammar_from_regex(pattern))


def from_choice(choices: Sequence[str]) -> str:
    """One of some texts. Raises RequestError."""
    rules = "start: " + " | ".join(json.dumps(text) for text in choices)
    if len(rules) > MAX_SCHEMA_BYTES:
        raise RequestError(f"choices must be at most {MAX_SCHEMA_BYTES} bytes together, not {len(rules)}")
    return from_lark(rules)


def from_lark(rules: str) -> str:
    """Text that rules in llguidance's Lark dialect describe."""
    return str(llguidance.LLMatcher.grammar_from_lark(rules))


def with_json_options(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema for use inside Lark rules (`%json`), with the same options as `from_schema`."""
    return {**schema, "x-guidance": _JSON}


class Matching:
    """Where one sequence stands in its grammar. Survives preemption: tokens computed again are not read again."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """One bit per token, least significant first: whether it may come next."""
        mask: bytes = self._matcher.compute_bitmask()
        return mask

    def read(self, token: int) -> str | None:
        """The chosen token -> why the sequence ends now: `stop` (complete), `grammar` (beyond a bound), or None."""
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            return "grammar"
        return "stop" if self._matcher.is_stopped() else None

    @property
    def failed(self) -> bool:
        """Whether a bound was met; `allowed` then says nothing."""
        return bool(self._matcher.is_error())


class _Vocabulary:
    """The tokenizer as llguidance asks for it. Given tokenizer.json, it would read special tokens into plain text."""

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = [tokenizer.token_id(text) for text in tokenizer.special_tokens]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_middle(text.decode(errors="replace"))


class Grammars:
    """Compiles grammars for one tokenizer. `prepare` is called on any thread, `start` on the engine's."""

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int, eos: Collection[int]) -> None:
        """`load` gives the tokenizer, when it is first needed; `vocab_size` is the width of the model's logits."""
        self._load = load
        self._vocab_size = vocab_size
        self._eos = sorted(eos)
        self._tokenizer: Any = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def prepare(self, tenant: str, source: str) -> None:
        """Compiles a grammar unless the tenant has it compiled. Raises RequestError. Takes milliseconds to seconds.

        Tenants share no compiled grammar, so that none learns from the time taken what another has asked for.
        """
        with self._lock:
            key = (tenant, source)
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return
            matcher = llguidance.LLMatcher(self._vocabulary(), source, log_level=0, limits=_LIMITS)
            if matcher.is_error():
                raise RequestError(
                    f"the grammar must be one that can be served: {_reason(matcher.get_error())}"
                )
            self._compiled[key] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)

    def start(self, tenant: str, source: str) -> Matching:
        """The beginning of a prepared grammar."""
        while True:
            with self._lock:
                matcher = self._compiled.get((tenant, source))
            if matcher is not None:
                return Matching(matcher.deep_copy())
            self.prepare(tenant, source)  # left the cache since: rare, and right all the same

    def _vocabulary(self) -> Any:
        if self._tokenizer is None:
            try:
                words = _Vocabulary(self._load(), self._eos[0] if self._eos else 0)
                self._tokenizer = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(words),
                    n_vocab=max(self._vocab_size, len(words.tokens)),
                    eos_token=self._eos or None,
                )
            except (ValueError, TypeError, RuntimeError) as error:
                raise RequestError(
                    "structured output must be left out: it cannot be had with this model's tokenizer",
                    code="unsupported_parameter",
                ) from error
        return self._tokenizer


def _reason(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip() and not set(line) <= set(" |^")]
    plain = " ".join(line for line in lines if not line[:1].isdigit())
    return re.sub(r"at \d+\(\d+\): ", "", plain)[:300] or "it is too complex"
