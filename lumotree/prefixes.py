"""Prefix reuse: what a request has committed, kept for later prompts that begin with the same tokens.

Full pages are shared by counting their owners. The draft head's entry at position n - 1 is only known with the token
after it, and differs between requests that go on differently; so of a prefix of n tokens the pages that hold positions
0..n - 2 in full are shared, and everything behind them is copied. No shared page is ever written to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lumotree.slots import Lease, Slots
from lumotree.surfaces import Surfaces


@dataclass(frozen=True)
class Prefix:
    """A stored prefix. tokens: its n tokens. pages: the shared ones. tail: its surfaces, with the keys and values (and
    draft entries) of the positions behind the shared pages only."""

    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    tail: Surfaces

    @property
    def committed(self) -> int:
        """n."""
        return len(self.tokens)


def tail_start(tokens: int, page_size: int) -> int:
    """First position behind the pages that are shared of a prefix of `tokens` >= 1 tokens."""
    return (tokens - 1) // page_size * page_size


class PrefixStore:
    """Stored prefixes, least recently used first. Their pages go back when a request needs them."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._stored: dict[tuple[int, ...], Prefix] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, tokens: tuple[int, ...], lease: Lease, tail: Surfaces) -> Prefix:
        """Store a prefix of at least one token from the request that has committed it; needs no free page.

        tail: as in `Prefix`, from position `tail_start` on.
        """
        self.forget(tokens)
        shared = lease.pages[: tail_start(len(tokens), lease.page_size) // lease.page_size]
        prefix = self._stored[tokens] = Prefix(tokens, shared, tail)
        self._slots.share(prefix.pages)
        return prefix

    def forget(self, tokens: tuple[int, ...]) -> None:
        """Drop a stored prefix, if there is one of these tokens."""
        prefix = self._stored.pop(tokens, None)
        if prefix is not None:
            self._slots.drop(prefix.pages)

    def longest(self, prompt: Sequence[int]) -> Prefix | None:
        """The longest stored prefix that leaves at least one prompt token to feed (its logits start the output)."""
        fitting = [p for t, p in self._stored.items() if len(t) < len(prompt) and t == tuple(prompt[: len(t)])]
        return max(fitting, key=lambda p: p.committed, default=None)

    def lease(self, tokens: int, prefix: Prefix | None) -> Lease:
        """A lease for `tokens` positions that begins with a prefix's shared pages; makes room by forgetting others.

        Raises CapacityError, with nothing forgotten, when that would not be enough.
        """
        shared = () if prefix is None else prefix.pages
        need = self._slots.capacity.pages_for(tokens) - len(shared)
        others = [p for p in self._stored.values() if p is not prefix]
        if need > self._slots.free_pages + self._reclaimable(others) or not self._slots.free_slots:
            return self._slots.lease(tokens, shared)  # which says what is missing
        for other in others:
            if need <= self._slots.free_pages:
                break
            self.forget(other.tokens)
        if prefix is not None:  # now the most recently used
            self._stored[prefix.tokens] = self._stored.pop(prefix.tokens)
        return self._slots.lease(tokens, shared)

    def _reclaimable(self, prefixes: Sequence[Prefix]) -> int:
        holders = Counter(page for prefix in prefixes for page in prefix.pages)
        return sum(self._slots.owners(page) == count for page, count in holders.items())
