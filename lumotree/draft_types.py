"""What a drafter reads and what it proposes: the boundary between the decoding cycle and `lumotree.draft`.

The drafter's own state is the fourth surface, D(m): the draft head's cache and the hidden row that it reads next. The
cycle keeps it. With m committed tokens, entries 0..m-2 of the head's cache are committed, each computed from the
target's own hidden row at its position; `hidden` is the target's row at m - 1. What a drafter computes on top goes to
scratch slots and never survives the cycle: publication recomputes the accepted entries from the target's hidden rows,
so that D depends on the accepted tokens alone and not on what was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lumotree.model_types import DraftHead
from lumotree.sampling import SamplingParams
from lumotree.state import KVCache
from lumotree.tree import Tree


@dataclass(frozen=True)
class DraftRequest:
    """One request as its drafter sees it.

    tokens: int64 `[m + 1]`, prompt and output; the last one is the pending token b*, not materialised.
    hidden: bf16 `[H]`, see the module.
    pages: int32 `[max_pages]`, the request's page table row, unused -1; it covers positions 0..m - 1 + depth. The
        draft cache uses the target's page table and flat slots.
    scratch: flat slots of the draft cache for drafted rows, at least one for each row that may be proposed.
    depth: deepest row that is of use (token budget and cache end here); 0 = propose the root alone.
    rows: most rows of the tree, the root included.
    params: sampling parameters of the request, for laws that should look like the target's.
    seed, number, cycle: address of the draft coins.
    """

    tokens: NDArray[np.int64]
    hidden: Tensor
    pages: Tensor
    scratch: NDArray[np.int64]
    depth: int
    rows: int
    params: SamplingParams
    seed: int
    number: int
    cycle: int

    @property
    def committed(self) -> int:
        """m."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class DraftState:
    """What all requests share: the head, its cache of one layer, and the page size; None and an empty cache without."""

    head: DraftHead | None
    cache: KVCache | None
    page_size: int


@dataclass(frozen=True)
class Proposal:
    """A candidate tree and the law of its tokens.

    tree: row 0 carries b*; `prefix_len` and `slots` are set by the cycle. laws: as in `lumotree.select_types.Step`,
    float64 `[N, V]`, or None for point masses.
    """

    tree: Tree
    laws: Tensor | None = None


class Drafter(Protocol):
    """Proposes trees; keeps nothing between calls, so that a request drafts the same in any batch."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    @property
    def needs_head(self) -> bool:
        """Whether `state.head` must be there."""
        ...

    def propose(self, requests: Sequence[DraftRequest], state: DraftState) -> list[Proposal]:
        """One proposal a request, in order. Writes scratch slots of the draft cache and nothing else."""
        ...
