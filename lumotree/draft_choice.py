"""Which candidates a drafter takes: pure functions and searches over laws, without a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lumotree.errors import InputError
from lumotree.select_reference import GRID
from lumotree.tree import Tree

Law = NDArray[np.float64]


def ranked(law: Law, count: int) -> list[int]:
    """The `count` likeliest tokens of a law `[V]`, the lower number first among equals; none of probability 0."""
    order = np.argsort(-law, kind="stable")[:count]
    return [int(token) for token in order if law[token] > 0]


def joined(best: list[int], other: int | None, count: int) -> list[int]:
    """At most `count` siblings: the head's first choice, another drafter's token if it differs, then the runner-ups.

    The second place is the other drafter's because shapes put their longest side branch there.
    """
    if other is None or (best and best[0] == other):
        return best[:count]
    return [*best[:1], other, *(token for token in best[1:] if token != other)][:count]


def sparse(law: Law, support: int) -> Law:
    """A law `[V]` cut to its `support` likeliest tokens and renormalised, as `ranked` orders them."""
    kept = ranked(law, support)
    cut = np.zeros_like(law)
    cut[kept] = law[kept]
    return np.asarray(cut / cut.sum())


def drawn(law: Law, coins: NDArray[np.float64]) -> list[int]:
    """Siblings drawn from a law `[V]` without replacement, one for each coin of `[k]` in [0, 1), by inverse CDF.

    Fewer where the law gives weight to fewer tokens (on the grid of 2^-52, which selection works on too).
    """
    units = np.rint(law * GRID)
    tokens = np.flatnonzero(units)
    weights = units[tokens]
    cdf, found = np.cumsum(weights), list[int]()
    mass = cdf[-1]
    for coin in coins[: len(tokens)]:  # as `select_draft` does for many walks at once
        threshold = np.floor(coin * mass)
        for place in sorted(found):
            if threshold >= cdf[place] - weights[place]:
                threshold += weights[place]
        found.append(int(np.searchsorted(cdf, threshold, side="right")))
        mass -= weights[found[-1]]
    return [int(tokens[place]) for place in found]


@dataclass(frozen=True)
class Node:
    """A candidate. value: product of the probabilities on its path, its own included."""

    parent: int
    token: int
    depth: int
    value: float


@dataclass
class BudgetSearch:
    """The `budget` candidates, closed under parents, whose values add up to most: greedy is optimal, since no node is
    worth more than its parent.

    A node's children are known once `learn` was given its law. `wanted` asks for the laws that can still change the
    outcome, so that it takes as many rounds as the tree is deep and not one for each node. Node 0 is the root, which
    costs nothing. Among equal values the earlier node wins. Raises InputError for a negative budget or depth.
    """

    budget: int
    deepest: int
    nodes: list[Node] = field(default_factory=lambda: [Node(-1, -1, 0, 1.0)])
    learned: set[int] = field(default_factory=set)
    _best: list[tuple[float, int]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.budget < 0 or self.deepest < 0:
            raise InputError(f"budget drafter: expected budget and depth >= 0, got {self.budget} and {self.deepest}")

    def chosen(self) -> list[int]:
        """The best nodes among those known, the root first, by falling value; a parent precedes its children."""
        return [0, *(number for _, number in self._best)]

    def wanted(self) -> list[int]:
        """Nodes whose law is to be learned next, ascending; empty when the choice is final."""
        chosen = self.chosen()
        # A child is worth at most its parent: below a node no better than the last one nothing gets in.
        least = self.nodes[chosen[-1]].value if len(chosen) > self.budget else 0.0
        return sorted(
            number for number in chosen
            if number not in self.learned and self.nodes[number].depth < self.deepest
            and self.nodes[number].value > least
        ) if self.budget else []  # fmt: skip

    def learn(self, number: int, law: Law) -> None:
        """Take in the law of a node's children."""
        self.learned.add(number)
        node = self.nodes[number]
        for token in ranked(law, self.budget):
            value = node.value * float(law[token])
            self._best.append((-value, len(self.nodes)))
            self.nodes.append(Node(number, token, node.depth + 1, value))
        # A node that `budget` others are better than never comes back: nodes are only added.
        self._best = sorted(self._best)[: self.budget]

    def tree(self, pending: int) -> Tree:
        """The chosen nodes as a tree, rows by falling value; `probs` are the conditional probabilities."""
        chosen = self.chosen()
        place = {number: row for row, number in enumerate(chosen)}
        nodes = [self.nodes[number] for number in chosen]
        above = [self.nodes[node.parent].value if node.parent >= 0 else 1.0 for node in nodes]
        return Tree.make(
            [place.get(node.parent, -1) for node in nodes],
            tokens=[pending, *(node.token for node in nodes[1:])],
            probs=[min(node.value / v, 1.0) if v > 0 else 0.0 for node, v in zip(nodes, above, strict=True)],
        )
