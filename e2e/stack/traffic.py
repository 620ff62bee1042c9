"""Clients as users have them: the `openai` package, unchanged, against the gateway."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import openai

SERVED, LIMIT = "x-tenantry-served", "x-ratelimit-limit-requests"


@dataclass(frozen=True)
class Answer:
    """What came back: `status` 200 with text, served name and the limit that it counted against (requests a minute),
    or the error's status, code and Retry-After."""

    status: int
    text: str = ""
    served: str = ""
    limit: str = ""
    code: str = ""
    message: str = ""
    retry_after: str | None = None
    seconds: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class Client:
    """One tenant's client."""

    url: str
    key: str

    def _openai(self, seconds: float) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=seconds)

    def ask(
        self, model: str, text: str, *, max_tokens: int = 24, seconds: float = 120, user: str | None = None
    ) -> Answer:
        """One greedy chat completion. Never raises for what the server says; connection failures are status 0."""
        start = time.monotonic()
        with self._openai(seconds) as client:
            try:
                raw = client.chat.completions.with_raw_response.create(
                    model=model,
                    messages=[{"role": "user", "content": text}],
                    max_tokens=max_tokens,
                    temperature=0,
                    user=user if user is not None else openai.omit,
                )
                parsed = raw.parse()
                return Answer(
                    200,
                    text=parsed.choices[0].message.content or "",
                    served=raw.headers.get(SERVED, ""),
                    limit=raw.headers.get(LIMIT, ""),
                    seconds=time.monotonic() - start,
                    tokens=parsed.usage.completion_tokens if parsed.usage else 0,
                )
            except openai.APIStatusError as error:
                return _refused(error, time.monotonic() - start)
            except openai.APIConnectionError as error:
                return Answer(0, message=repr(error.__cause__ or error), seconds=time.monotonic() - start)

    def ask_streamed(self, model: str, text: str, *, max_tokens: int = 24, seconds: float = 120) -> Answer:
        """The same, streamed. A stream that breaks, or ends without saying why, is status 0."""
        start = time.monotonic()
        pieces: list[str] = []
        ended = False
        with self._openai(seconds) as client:
            try:
                raw = client.chat.completions.with_raw_response.create(
                    model=model,
                    messages=[{"role": "user", "content": text}],
                    max_tokens=max_tokens,
                    temperature=0,
                    stream=True,
                )
                with raw.parse() as chunks:
                    for choice in (choice for chunk in chunks for choice in chunk.choices):
                        pieces.append(choice.delta.content or "")
                        ended = ended or choice.finish_reason is not None
            except openai.APIStatusError as error:
                return _refused(error, time.monotonic() - start)
            except (openai.APIError, httpx.HTTPError) as error:
                return Answer(0, message=repr(error), seconds=time.monotonic() - start)
        return Answer(
            200 if ended else 0,
            text="".join(pieces),
            served=raw.headers.get(SERVED, ""),
            limit=raw.headers.get(LIMIT, ""),
            message="" if ended else "the stream ended without a `finish_reason`",
            seconds=time.monotonic() - start,
        )

    def stream(self, model: str, text: str, *, max_tokens: int = 24, seconds: float = 120) -> Iterator[str]:
        """The pieces of a streamed answer."""
        with (
            self._openai(seconds) as client,
            client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text}],
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
            ) as pieces,
        ):
            for piece in pieces:
                if piece.choices and piece.choices[0].delta.content:
                    yield piece.choices[0].delta.content

    def models(self) -> list[str]:
        """Names that this key may ask for."""
        with self._openai(30) as client:
            return sorted(model.id for model in client.models.list())


def _refused(error: openai.APIStatusError, seconds: float) -> Answer:
    body = error.body if isinstance(error.body, dict) else {}
    return Answer(
        error.status_code,
        code=str(body.get("code") or ""),
        message=str(body.get("message") or error.message),
        retry_after=error.response.headers.get("retry-after"),
        seconds=seconds,
    )


def together(*calls: Callable[[], Answer]) -> list[Answer]:
    """All calls at once; answers in the order of the calls."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@dataclass
class Steady:
    """Light traffic in the background, `workers` calls at a time, until the block ends; every answer is kept.

    with Steady(lambda: client.ask("tone", "hello")) as traffic:
        ...
    traffic.failures
    """

    call: Callable[[], Answer]
    workers: int = 2
    pause: float = 0.05
    answers: list[tuple[float, Answer]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Steady:
        for _ in range(self.workers):
            thread = threading.Thread(target=self._run, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            answer = self.call()
            self.answers.append((time.monotonic(), answer))
            self._stop.wait(self.pause)

    @property
    def failures(self) -> list[Answer]:
        return [answer for _, answer in self.answers if answer.status != 200]

    @property
    def outcomes(self) -> Counter[str]:
        """How often each outcome came: `200`, `503 no_capacity`, `0 connection`..."""
        return Counter(
            f"{a.status} {a.code}".strip() if a.status else "0 connection" for _, a in self.answers
        )

    @property
    def served(self) -> Counter[str]:
        return Counter(answer.served for _, answer in self.answers if answer.status == 200)

    def longest_gap(self) -> float:
        """Longest time in seconds between two good answers."""
        times = [when for when, answer in self.answers if answer.status == 200]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)
