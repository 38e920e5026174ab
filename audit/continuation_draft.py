"""Trees with text in them: rows follow their parent as bytes follow each other in the prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from lumotree.draft_types import DraftRequest, DraftState, Proposal
from lumotree.tree import Tree

Shape = Callable[[int], Tree]


class ContextDrafter:
    """Proposes the tree of the request's cycle; a row's k-th child is the k-th most frequent follower of the two tokens
    before it in `texts`, siblings all different. A function of the request's tokens and cycle alone.

    shape: cycle -> topology. Stands in for any drafter: what is drafted must not matter to what is published.
    """

    name, needs_head = "context", False

    def __init__(self, texts: Sequence[Sequence[int]], shape: Shape, vocab: int) -> None:
        self.shape, self.vocab = shape, vocab
        self._after: dict[tuple[int, ...], Counter[int]] = {}
        for text in texts:
            for i, token in enumerate(text):
                for context in (tuple(text[max(i - 2, 0) : i]), tuple(text[max(i - 1, 0) : i]), ()):
                    self._after.setdefault(context, Counter())[token] += 1

    def propose(self, requests: Sequence[DraftRequest], state: DraftState) -> list[Proposal]:
        """See `lumotree.draft_types.Drafter`."""
        return [Proposal(self._fill(self.shape(r.cycle), r.tokens.tolist())) for r in requests]

    def _fill(self, tree: Tree, before: Sequence[int]) -> Tree:
        tokens = np.zeros(tree.n, np.int64)
        tokens[0] = before[-1]
        for row in range(tree.n):
            above = [int(tokens[r]) for r in tree.path(row)]
            context = (*before[:-1], *above)[-2:]
            for child, token in zip(tree.children(row), self._followers(context), strict=False):
                tokens[child] = token
        return Tree.make(tree.parents, tokens=tokens, active=tree.active)

    def _followers(self, context: tuple[int, ...]) -> list[int]:
        """Every token, the likeliest first."""
        ranked: dict[int, None] = {}
        for known in (context, context[-1:], ()):
            counts = self._after.get(known, Counter())
            ranked |= dict.fromkeys(sorted(counts, key=lambda t: (-counts[t], t)))
        return [*ranked, *(t for t in range(self.vocab) if t not in ranked)]
