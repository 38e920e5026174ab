"""Who owns which state slot, page and candidate slot.

The flat slots of the KV caches are, in this order, the pages of committed tokens and a scratch region of `rows` slots
for each state slot, where candidates live until they are published. A page may be shared by requests with the same
prefix; it is counted, and only pages that hold nothing but finished entries are shared, so that nobody writes to one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lumotree.errors import CapacityError, RequestError


@dataclass(frozen=True)
class Capacity:
    """slots: requests at a time. context: most positions of one request. pages, page_size: committed tokens in all;
    0 pages = enough for `slots` requests of full length. rows: most rows a request may verify in one cycle (tree or
    prompt chunk). Raises RequestError."""

    slots: int
    context: int
    rows: int = 32
    page_size: int = 16
    pages: int = 0

    def __post_init__(self) -> None:
        for name in ("slots", "context", "rows", "page_size"):
            value = getattr(self, name)
            if value < 1:
                raise RequestError(f"capacity: expected {name} >= 1, got {name}={value}")
        if self.pages == 0:
            object.__setattr__(self, "pages", self.slots * self.pages_for(self.context))
        if self.pages < self.pages_for(self.context):
            raise RequestError(
                f"capacity: expected at least the {self.pages_for(self.context)} pages of one request of "
                f"context={self.context}, got pages={self.pages}"
            )

    @property
    def tokens(self) -> int:
        """Committed tokens in all."""
        return self.pages * self.page_size

    @property
    def flat_slots(self) -> int:
        """Slots of a KV cache: pages, then scratch."""
        return self.tokens + self.slots * self.rows

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class Lease:
    """What a request owns: a state slot, pages in position order (the first `shared` of them read-only), scratch."""

    slot: int
    pages: tuple[int, ...]
    shared: int
    page_size: int
    scratch: NDArray[np.int64]

    def flat(self, start: int, end: int) -> NDArray[np.int64]:
        """Flat slots of positions start..end - 1."""
        position = np.arange(start, end)
        return np.asarray(self.pages, np.int64)[position // self.page_size] * self.page_size + position % self.page_size


class Slots:
    """Free lists and page counts. Every method either does all of its work or raises and changes nothing."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._slots = list(range(capacity.slots))
        self._pages = list(range(capacity.pages))
        self._count = [0] * capacity.pages

    @property
    def free_slots(self) -> int:
        """State slots that nobody owns."""
        return len(self._slots)

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._pages)

    def owners(self, page: int) -> int:
        """How many requests and stored prefixes own a page."""
        return self._count[page]

    def lease(self, tokens: int, shared: Sequence[int] = ()) -> Lease:
        """A slot and pages for `tokens` positions, the first of them the given shared ones. Raises CapacityError."""
        if not self._slots:
            raise CapacityError(f"cache: all {self.capacity.slots} state slots are in use; wait for a request to end")
        pages = self.take(self.capacity.pages_for(tokens) - len(shared))
        self.share(shared)
        slot = heapq.heappop(self._slots)
        first = self.capacity.tokens + slot * self.capacity.rows
        scratch = np.arange(first, first + self.capacity.rows)
        return Lease(slot, (*shared, *pages), len(shared), self.capacity.page_size, scratch)

    def release(self, lease: Lease) -> None:
        """Give everything back."""
        heapq.heappush(self._slots, lease.slot)
        self.drop(lease.pages)

    def take(self, count: int) -> tuple[int, ...]:
        """Own `count` fresh pages. Raises CapacityError."""
        if count > len(self._pages):
            raise CapacityError(
                f"cache: {count} pages of {self.capacity.page_size} tokens are needed, {len(self._pages)} of "
                f"{self.capacity.pages} are free; wait for a request to end or make the cache larger"
            )
        pages = tuple(heapq.heappop(self._pages) for _ in range(count))
        self.share(pages)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Count one more owner of each page."""
        for page in pages:
            self._count[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Count one owner less; a page without owner is free."""
        for page in pages:
            self._count[page] -= 1
            if not self._count[page]:
                heapq.heappush(self._pages, page)
