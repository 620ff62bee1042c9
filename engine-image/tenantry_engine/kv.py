"""How sequences come by pages of K and V, share them through the prefix cache, and give them back.

The pool knows pages and keys; here is what they mean for a sequence: which of its blocks are published, what of it need
not be computed, and what it still lacks.
"""

from __future__ import annotations

from tenantry_engine.lines import Line
from tenantry_engine.pages import PagePool
from tenantry_engine.prefix import Space, extend
from tenantry_engine.sequence import Sequence


class KvPages:
    """The KV side of one pool. `space` None = no prefix cache."""

    def __init__(self, pool: PagePool, page_tokens: int, space: Space | None) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._space = space
        self.prompt_tokens = 0  # of all requests that were admitted so far
        self.cached_tokens = 0  # those of them that the prefix cache had
        self.crossed_tokens = 0  # tokens in blocks that were computed for another tenant: there must be none
        self.tenants: dict[str, None] = {}  # all that were ever admitted, in order
        self._made_for: dict[int, str] = {}  # page -> the tenant whose tokens its published block holds

    def needs(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Published blocks that a waiting sequence may refer to, and how many pages it needs besides: for all tokens
        that it has and, so that it can go on, for one page more."""
        tokens = len(sequence.tokens)
        blocks: list[bytes] = []
        if self._shares(sequence) and sequence.sampling.prompt_logprobs is None:
            self._name_blocks(sequence, tokens // self._page_tokens)
            blocks = sequence.blocks[: self._pool.matching(sequence.blocks)]
        last = sequence.prompt_len + sequence.sampling.max_tokens
        return blocks, min(self._pages(tokens) + 1, self._pages(last)) - len(blocks)

    def reserve(self, sequence: Sequence, adapter_pages: int) -> bool:
        """Takes all that the sequence needs to start, with a reference to its adapter, or nothing."""
        blocks, private = self.needs(sequence)
        pages = self._pool.reserve(private, sequence.adapter, adapter_pages, blocks)
        if pages is None:
            return False
        sequence.pages = pages
        sequence.shared = len(blocks)
        self.tenants.setdefault(sequence.tenant)
        self._witness(sequence, pages[: len(blocks)])
        # The last token is always computed: what follows it is not known. Its K and V are there, so it writes none.
        sequence.computed = min(sequence.shared * self._page_tokens, len(sequence.tokens) - 1)
        if not sequence.preempted:
            sequence.cached = sequence.computed
            self.prompt_tokens += sequence.prompt_len
            self.cached_tokens += sequence.cached
        sequence.charged = max(sequence.charged, sequence.computed)
        return True

    def grow(self, sequence: Sequence, line: Line) -> bool:
        """Makes sure that there is a page for the next token. False = no page is left."""
        if len(sequence.pages) * self._page_tokens <= sequence.computed:
            page = self._pool.reserve(1)
            if page is None:
                return False
            sequence.pages += page
            line.hold(page)
        return True

    def publish(self, sequence: Sequence, line: Line, end: int) -> None:
        """The step that filled the sequence's pages up to position `end` has ended: its tenant's others may use them.

        A later step may run already that reads a page which is given up here for an equal one, but never writes it;
        whatever comes to write it is queued behind that step.
        """
        full = end // self._page_tokens
        if full <= sequence.shared or not self._shares(sequence):
            return
        self._name_blocks(sequence, full)
        for index in range(sequence.shared, full):
            own = sequence.pages[index]
            page = self._pool.publish(own, sequence.blocks[index], sequence.adapter)
            if page == own:
                self._made_for[own] = sequence.tenant
            else:
                self._witness(sequence, [page])
                line.let_go([own])
                line.hold([page])
                sequence.pages[index] = page
        sequence.shared = full

    def release(self, sequence: Sequence) -> None:
        """Gives everything back. What was published stays cached."""
        self._pool.release(sequence.pages, sequence.adapter)
        sequence.pages = []
        sequence.shared = sequence.computed = 0

    def _witness(self, sequence: Sequence, pages: list[int]) -> None:
        """Keys keep tenants apart; whether they did is seen here from who filled the pages, whatever the keys say."""
        foreign = sum(self._made_for.get(page) != sequence.tenant for page in pages)
        self.crossed_tokens += foreign * self._page_tokens

    def _shares(self, sequence: Sequence) -> bool:
        return self._space is not None and sequence.salt is not None

    def _name_blocks(self, sequence: Sequence, count: int) -> None:
        assert self._space is not None
        assert sequence.salt is not None
        root = self._space.root(sequence.salt, sequence.adapter)
        extend(sequence.blocks, root, sequence.tokens, count, self._page_tokens)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)
