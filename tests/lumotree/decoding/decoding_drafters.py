"""Drafters for tests: any tree shape, tokens from an oracle that is right with a given probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lumotree.draft_types import DraftRequest, DraftState, Proposal
from lumotree.tree import Tree

Shape = Callable[[DraftRequest], Tree]


class GuessDrafter:
    """Draws a tree's tokens from a law that knows the future with some probability.

    future: request number -> its greedy tokens, prompt included; shape: the tree of a request and cycle. Tokens are a
    function of request and cycle alone, as a drafter's must be.
    """

    needs_head = False

    def __init__(self, shape: Shape, vocab: int, future: dict[int, Sequence[int]] | None = None, hit: float = 0.7,
                 laws: bool = False) -> None:  # fmt: skip
        self.name, self.shape, self.vocab, self.future, self.hit, self.laws = "guess", shape, vocab, future, hit, laws

    def propose(self, requests: Sequence[DraftRequest], state: DraftState) -> list[Proposal]:
        return [self._one(request) for request in requests]

    def _one(self, request: DraftRequest) -> Proposal:
        tree = self.shape(request)
        rng = np.random.default_rng((request.number, request.cycle))
        tokens = rng.integers(0, self.vocab, tree.n)
        tokens[0] = request.tokens[-1]
        known = (self.future or {}).get(request.number, ())
        for row in range(1, tree.n):
            at = request.committed + int(tree.depth[row])
            if at < len(known) and rng.random() < self.hit:
                tokens[row] = known[at]
        laws = None
        if self.laws:
            tokens = self._distinct(tree, tokens)
            laws = torch.full((tree.n, self.vocab), 1 / self.vocab, dtype=torch.float64)
        return Proposal(Tree.make(tree.parents, tokens=tokens, active=tree.active), laws)

    def _distinct(self, tree: Tree, tokens: np.ndarray) -> np.ndarray:
        """Siblings drawn without replacement differ."""
        for row in range(tree.n):
            used: set[int] = set()
            for child in tree.active_children(row):
                while int(tokens[child]) in used:
                    tokens[child] = (tokens[child] + 1) % self.vocab
                used.add(int(tokens[child]))
        return tokens


def random_shapes(seed: int, most: int) -> Shape:
    """Another random tree in each cycle, the same in any batch."""
    from lumotree.tree_named import random_tree

    def shape(request: DraftRequest) -> Tree:
        rng = np.random.default_rng((seed, request.number, request.cycle))
        return random_tree(rng, int(rng.integers(1, most + 1)), inactive_fraction=0.2)

    return shape
