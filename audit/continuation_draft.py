"""Trees with text in them: the model's own drafter, and followers from the prompts for rows that it leaves empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from lumotree.draft import ShapeDrafter
from lumotree.draft_types import Drafter, DraftRequest, DraftState, Proposal
from lumotree.tree import Tree

Shape = Callable[[int], Tree]


def own_drafter(shape: Tree) -> Drafter:
    """The drafter of serving for a shape: MTP spine with runner-ups, in union with a suffix match."""
    return ShapeDrafter(shape, suffix=True)


class HarvestDrafter:
    """Proposes the tree of the request's cycle with every active row filled, so that each can be an accepted end.

    Rows are the own drafter's where it drafts one (a model with a head); another row's k-th child is the k-th most
    frequent follower in `texts` of the two tokens before it, siblings all different. A function of the request's tokens
    and cycle alone. shape: cycle -> topology.
    """

    name = "harvest"

    def __init__(self, texts: Sequence[Sequence[int]], shape: Shape, vocab: int, *, head: bool) -> None:
        self.shape, self.vocab, self.needs_head = shape, vocab, head
        self._after: dict[tuple[int, ...], Counter[int]] = {}
        for text in texts:
            for i, token in enumerate(text):
                for context in (tuple(text[max(i - 2, 0) : i]), tuple(text[max(i - 1, 0) : i]), ()):
                    self._after.setdefault(context, Counter())[token] += 1

    def propose(self, requests: Sequence[DraftRequest], state: DraftState) -> list[Proposal]:
        """See `lumotree.draft_types.Drafter`."""
        found = []
        for request in requests:
            shape = self.shape(request.cycle)
            own = own_drafter(shape).propose([request], state)[0].tree if self.needs_head and shape.n > 1 else None
            found.append(Proposal(self._fill(shape, request.tokens.tolist(), own)))
        return found

    def _fill(self, shape: Tree, before: Sequence[int], own: Tree | None) -> Tree:
        tokens = np.zeros(shape.n, np.int64)
        tokens[0] = before[-1]
        drafted = np.zeros(shape.n, np.bool_) if own is None else own.active
        if own is not None:
            tokens[drafted] = own.tokens[drafted]
        for row in range(shape.n):
            above = [int(tokens[r]) for r in shape.path(row)]
            taken = {int(tokens[c]) for c in shape.children(row) if drafted[c]}
            context = (*before[:-1], *above)[-2:]
            fresh = (t for t in self._followers(context) if t not in taken)
            for child in shape.children(row):
                if not drafted[child]:
                    tokens[child] = next(fresh)
        return Tree.make(shape.parents, tokens=tokens, active=shape.active)

    def _followers(self, context: tuple[int, ...]) -> list[int]:
        """Every token, the likeliest first."""
        ranked: dict[int, None] = {}
        for known in (context, context[-1:], ()):
            counts = self._after.get(known, Counter())
            ranked |= dict.fromkeys(sorted(counts, key=lambda t: (-counts[t], t)))
        return [*ranked, *(t for t in range(self.vocab) if t not in ranked)]
