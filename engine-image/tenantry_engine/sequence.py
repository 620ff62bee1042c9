"""One sequence on its way through the engine, and what its request asks of the sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

UNKNOWN = -1
"""Stands for the token that a step draws, until the step has ended."""


class Phase(Enum):
    """Where a sequence is. Pages and an adapter reference are held from LOADING to DECODE."""

    WAITING = "waiting"
    LOADING = "loading"  # admitted; its adapter's pages are being filled
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(frozen=True)
class Scores:
    """How likely the model found a token, and what it found most likely there: natural logarithms."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and what is told about it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int = 16
    stop_ids: frozenset[int] = frozenset()
    repetition_penalty: float = 1.0
    grammar: str | None = (
        None  # source of `tenantry_engine.grammar`, prepared before the sequence is admitted
    )
    logprobs: int | None = None  # scores of each output token, with so many of the most likely ones
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, which must all be computed for it

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters which tokens the sequence holds."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def edits_logits(self) -> bool:
        """Whether logits change before a token is chosen, but by a grammar."""
        return bool(self.counts_tokens or self.logit_bias or (self.min_tokens and self.stop_ids))


@dataclass(eq=False)
class Sequence:
    """A prompt and what was generated for it. Owned by the scheduler once added."""

    id: str
    tenant: str
    tokens: list[int]  # prompt, then output; while a step runs that draws one, the last may be `UNKNOWN`
    sampling: Sampling
    served: str  # the served name
    adapter: str | None = None  # digest
    weight: int = 1
    cap: int = 1 << 30
    bulk: bool = False
    deadline: float | None = None
    salt: str | None = field(default=None, repr=False)  # root of the tenant's cached blocks; None = no cache

    prompt_len: int = field(init=False)
    phase: Phase = field(default=Phase.WAITING, init=False)
    arrival: int = field(default=0, init=False)  # order of arrival, kept over preemption
    computed: int = field(default=0, init=False)  # leading tokens that need not be computed any more
    charged: int = field(default=0, init=False)  # leading tokens paid for, or found in the prefix cache
    pages: list[int] = field(default_factory=list, init=False)
    cached: int = field(default=0, init=False)  # prompt tokens that the prefix cache had at first admission
    blocks: list[bytes] = field(default_factory=list, init=False, repr=False)  # keys of leading full blocks
    shared: int = field(default=0, init=False)  # leading pages with published blocks: never written again
    overtaken: int = field(default=0, init=False)  # requests admitted while this one was passed over
    passed_at: int | None = field(default=None, init=False)  # step in which it was first passed over
    preempted: int = field(default=0, init=False)  # times it gave way
    under_way: int = field(default=0, init=False)  # steps that run now with rows of it

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def missing(self) -> int:
        """Known tokens that no step has computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed
