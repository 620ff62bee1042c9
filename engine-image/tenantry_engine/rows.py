"""What one step runs, as plain numbers on the host.

Rows are sorted by adapter, so that each adapter's rows are one segment. Every rank of a replica gets the same rows;
`batch` makes tensors of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
from tenantry_kernels import PAGE_TOKENS

from tenantry_engine.sequence import UNKNOWN, Sequence
from tenantry_engine.work import Work


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """T rows of B sequences, of which some are sampled."""

    tokens: list[int]  # [T]; -1 - i = the token that the step before draws for its sampled row i
    positions: list[int]  # [T]
    slots: list[int]  # [T]: page * 16 + offset; negative = nothing is written
    tables: list[list[int]]  # [B]: pages that each sequence reads
    starts: list[int]  # [B + 1]: first row of each sequence
    lengths: list[int]  # [B]: tokens that each sequence has after the step
    runs: list[tuple[str | None, int]]  # [B]: adapter and rows of each sequence
    sampled: list[int]  # [S], ascending
    scored: list[tuple[int, int]]  # first row and count of the prompts whose tokens are to be scored

    @property
    def decodes(self) -> bool:
        """Whether every sequence brings one row, which is sampled."""
        return len(self.sampled) == len(self.lengths) == len(self.tokens) and not self.scored


@dataclass(frozen=True)
class Scored:
    """`count` rows that hold a sequence's prompt from `position` on."""

    sequence: Sequence
    position: int
    count: int


@dataclass(frozen=True)
class Plan:
    """Rows, and whose they are."""

    rows: Rows
    sampled: tuple[Sequence, ...]  # in the order of `rows.sampled`
    scored: tuple[Scored, ...]  # in the order of `rows.scored`


def plan(works: list[Work], before: Mapping[Sequence, int] = MappingProxyType({})) -> Plan:
    """Base rows come first, then adapter by adapter. `before`: whose the sampled rows of a step are that still runs."""
    ordered = sorted(works, key=lambda w: (w.sequence.adapter or "", w.sequence.arrival))
    rows = Rows([], [], [], [], [0], [], [], [], [])
    sampled: list[Sequence] = []
    scored: list[Scored] = []
    for work in ordered:
        sequence, begin, end = work.sequence, work.start, work.start + work.count
        pages, first = sequence.pages, rows.starts[-1]
        rows.tokens.extend(sequence.tokens[begin:end])
        if rows.tokens[-1] == UNKNOWN:
            rows.tokens[-1] = -1 - before[sequence]
        rows.positions.extend(range(begin, end))
        written = (
            sequence.shared * PAGE_TOKENS
        )  # K and V of earlier positions are there, and others read them
        rows.slots.extend(
            pages[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS if at >= written else -1
            for at in range(begin, end)
        )
        rows.tables.append(pages[: -(-end // PAGE_TOKENS)])
        rows.starts.append(first + work.count)
        rows.lengths.append(end)
        rows.runs.append((sequence.adapter, work.count))
        if sequence.sampling.prompt_logprobs is not None and begin < sequence.prompt_len:
            rows.scored.append((first, work.count))
            scored.append(Scored(sequence, begin, work.count))
        if work.samples:
            rows.sampled.append(first + work.count - 1)
            sampled.append(sequence)
    return Plan(rows, tuple(sampled), tuple(scored))
