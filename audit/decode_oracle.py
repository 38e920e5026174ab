"""A drafter that knows the answer: the path to a chosen row carries what plain decoding emits, all other rows do not.

With it every row of a tree is an accepted end sooner or later, however bad a model's own drafts are, so that what is
published for long paths is compared, and faults are reached, with any checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lumotree.draft_types import DraftRequest, DraftState, Proposal
from lumotree.tree import Tree


@dataclass(frozen=True)
class OracleDrafter:
    """Fills `shape`; greedy requests only.

    known: request -> prompt and plain greedy output. In cycle c of request n the path that ends at the
    (5 c + 9 n)-th active row is the right one.
    """

    shape: Tree
    vocab: int
    known: Mapping[int, Sequence[int]]
    name: str = "oracle"
    needs_head: bool = False

    def propose(self, requests: Sequence[DraftRequest], state: DraftState) -> list[Proposal]:
        """See `lumotree.draft_types.Drafter`."""
        return [self._one(request) for request in requests]

    def _one(self, request: DraftRequest) -> Proposal:
        shape, known = self.shape, self.known[request.number]
        rows = shape.active_rows
        right = set(shape.path(rows[(5 * request.cycle + 9 * request.number) % len(rows)]))
        tokens = np.zeros(shape.n, np.int64)
        tokens[0] = request.tokens[-1]
        for row in range(1, shape.n):
            at = request.committed + int(shape.depth[row])
            answer = known[at] if at < len(known) else 0
            tokens[row] = answer if row in right else (answer + row) % self.vocab
        return Proposal(Tree.make(shape.parents, tokens=tokens, active=shape.active))
