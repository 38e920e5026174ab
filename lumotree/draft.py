"""Drafters: MTP spine with runner-ups, suffix match, their union in a named tree, and a node budget spent best.

`drafter(name)` makes one. All keep nothing between calls, and what is drafted for a request depends on nothing else in
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lumotree.coins import draft_coins_at
from lumotree.draft_choice import BudgetSearch, drawn, joined, ranked, sparse
from lumotree.draft_head import Growth, Law, run_head
from lumotree.draft_types import Drafter, DraftRequest, DraftState, Proposal
from lumotree.errors import InputError, TreeError
from lumotree.sampling import GREEDY_TEMPERATURE
from lumotree.suffix import continuation, next_token
from lumotree.tree import Tree
from lumotree.tree_named import hydra27, named

#: Rows below one another that the head drafts in a shape: those of `mtp5`.
STEPS = 5
SUFFIX_TOKENS = 15
#: Most tokens of a law that drafts are drawn from: the rest would hardly be drawn and never accepted.
SUPPORT = 64
#: Candidates of `hydra27`.
BUDGET = 27
DEEPEST = 11

_SAMPLED = "-sampled"


@dataclass(frozen=True)
class SuffixDrafter:
    """A chain of at most `count` tokens that followed the longest earlier match; the root alone without one."""

    count: int = SUFFIX_TOKENS
    name: str = "suffix"
    needs_head: bool = False

    def propose(self, requests: Sequence[DraftRequest], state: DraftState) -> list[Proposal]:
        """See Drafter."""
        return [self._one(request) for request in requests]

    def _one(self, request: DraftRequest) -> Proposal:
        count = min(self.count, request.depth, request.rows - 1)
        tokens = [int(request.tokens[-1]), *continuation(request.tokens, count)]
        return Proposal(Tree.make(np.arange(len(tokens)) - 1, tokens=tokens))


@dataclass(frozen=True)
class ShapeDrafter:
    """Fills a given shape.

    Rows less deep than `steps` get their children from the head: its likeliest tokens, best first, so that the path of
    first children is the MTP spine and the others are runner-ups. With `suffix`, the second child is the token that a
    suffix match proposes, if it is not the first already, and deeper rows have a suffix match as their one child.
    Candidates that nobody proposes are inactive rows. All are point masses.

    sampled: for requests that sample, the head's children are drawn without replacement from its law at the request's
    temperature, cut to its SUPPORT likeliest tokens, with draft coins, and proposals declare that law; a suffix match
    is then used below the head's rows only, where its law is a point mass.
    """

    shape: Tree
    steps: int = STEPS
    suffix: bool = False
    sampled: bool = False
    name: str = "shape"
    needs_head: bool = True

    def propose(self, requests: Sequence[DraftRequest], state: DraftState) -> list[Proposal]:
        """See Drafter."""
        fillings = [_Filling(self, request) for request in requests]
        for level in range(self.steps):
            new = [filling.open_rows(level) for filling in fillings]
            if not any(new):
                break
            rows = [
                range(len(filling.growth.parents)) if opened else ()
                for filling, opened in zip(fillings, new, strict=True)
            ]
            run_head([filling.growth for filling in fillings], rows, state)
            for filling, opened in zip(fillings, new, strict=True):
                for row in opened:
                    filling.draft(row)
        return [filling.finished() for filling in fillings]


class _Filling:
    """One request's shape while it is filled. `place`: row of the shape -> row of the growth."""

    def __init__(self, drafter: ShapeDrafter, request: DraftRequest) -> None:
        shape = drafter.shape
        self.drafter, self.request = drafter, request
        self.parents = shape.parents[: request.rows]
        self.usable = (shape.active & (shape.depth <= request.depth))[: request.rows]
        self.tokens = np.zeros(len(self.parents), np.int64)
        self.tokens[0] = request.tokens[-1]
        self.active = np.zeros(len(self.parents), np.bool_)
        self.active[0] = True
        self.growth = Growth(request)
        self.place = {0: 0}
        self.laws: dict[int, Law] = {}
        self.coins: NDArray[np.float64] | None = None
        self.sampled = drafter.sampled and request.params.temperature > GREEDY_TEMPERATURE

    def open_rows(self, level: int) -> list[int]:
        """Rows of a level that the head is to run over: those with children of use. They join the growth."""
        rows = [
            row for row in range(len(self.parents))
            if self.active[row] and self.drafter.shape.depth[row] == level and self._children(row)
        ]  # fmt: skip
        for row in rows:
            if row:
                self.place[row] = self.growth.add(self.place[int(self.parents[row])], int(self.tokens[row]))
        return rows

    def draft(self, row: int) -> None:
        """Give a row's children their tokens."""
        law = self.growth.laws[self.place[row]]
        assert law is not None, "the head has run over the row"
        children = self._children(row)
        if self.sampled:
            self.laws[row] = sparse(law, SUPPORT)
            tokens = drawn(self.laws[row], self._coins(children))
        else:
            other = self._matched(row) if self.drafter.suffix else None
            tokens = joined(ranked(law, len(children)), other, len(children))
        self._assign(children, tokens)

    def finished(self) -> Proposal:
        """The proposal, rows below the head's filled by suffix matches."""
        if self.drafter.suffix:
            for row in range(len(self.parents)):
                children = self._children(row)
                if self.active[row] and children and row not in self.place:
                    self._match(row, children)
        tree = Tree.make(self.parents, tokens=self.tokens, active=self.active)
        return Proposal(tree, self._declared() if self.sampled else None)

    def _match(self, row: int, children: list[int]) -> None:
        token = self._matched(row)
        if token is None:
            return
        self._assign(children, [token])
        if self.sampled:
            first = next(iter(self.laws.values()))
            self.laws[row] = np.zeros_like(first)
            self.laws[row][token] = 1.0

    def _matched(self, row: int) -> int | None:
        path = []
        while row:
            path.append(self.tokens[row])
            row = int(self.parents[row])
        return next_token(np.concatenate([self.request.tokens, np.array(path[::-1], np.int64)]))

    def _children(self, row: int) -> list[int]:
        return [c for c in self.drafter.shape.children(row) if c < len(self.parents) and self.usable[c]]

    def _coins(self, rows: list[int]) -> NDArray[np.float64]:
        if self.coins is None:
            r = self.request
            self.coins = draft_coins_at(r.seed, r.number, r.cycle, range(len(self.parents)))
        return self.coins[rows]

    def _assign(self, children: list[int], tokens: list[int]) -> None:
        for child, token in zip(children, tokens, strict=False):
            self.tokens[child], self.active[child] = token, True

    def _declared(self) -> Tensor | None:
        """float64 `[N, V]`, zeros in rows without drafted children; None if nothing was drafted."""
        if not self.laws:
            return None
        laws = np.zeros((len(self.parents), len(next(iter(self.laws.values())))))
        for row, law in self.laws.items():
            laws[row] = law
        return torch.from_numpy(laws)


@dataclass(frozen=True)
class BudgetDrafter:
    """The `budget` candidates whose path probabilities under the head add up to most, that is, the tree of that size
    from which most tokens would be accepted if the head's law were the target's. All are point masses."""

    budget: int = BUDGET
    deepest: int = DEEPEST
    name: str = "budget"
    needs_head: bool = True

    def propose(self, requests: Sequence[DraftRequest], state: DraftState) -> list[Proposal]:
        """See Drafter."""
        plans = [_Plan(self, request) for request in requests]
        while True:
            wanted = [plan.search.wanted() for plan in plans]
            if not any(wanted):
                return [Proposal(plan.search.tree(int(plan.request.tokens[-1]))) for plan in plans]
            rows = [plan.rows(new) for plan, new in zip(plans, wanted, strict=True)]
            run_head([plan.growth for plan in plans], rows, state)
            for plan, new in zip(plans, wanted, strict=True):
                plan.learn(new)


@dataclass
class _Plan:
    """One request's search and the head's rows for it. `place`: node -> row of the growth."""

    drafter: BudgetDrafter
    request: DraftRequest
    place: dict[int, int] = field(default_factory=lambda: {0: 0})

    def __post_init__(self) -> None:
        budget = min(self.drafter.budget, self.request.rows - 1)
        self.search = BudgetSearch(budget, min(self.drafter.deepest, self.request.depth))
        self.growth = Growth(self.request)

    def rows(self, wanted: list[int]) -> list[int]:
        """Rows of the growth that the next forward runs over: the wanted nodes and their ancestors."""
        needed: set[int] = set()
        for number in wanted:
            if number not in self.place:
                node = self.search.nodes[number]
                self.place[number] = self.growth.add(self.place[node.parent], node.token)
            row = self.place[number]
            while row >= 0:
                needed.add(row)
                row = self.growth.parents[row]
        return sorted(needed)

    def learn(self, wanted: list[int]) -> None:
        """Hand the laws of the wanted nodes to the search."""
        for number in wanted:
            law = self.growth.laws[self.place[number]]
            assert law is not None, "the head has run over the row"
            self.search.learn(number, law)


def _shape(spec: str) -> Drafter:
    sampled = spec.endswith(_SAMPLED)
    shape = named(spec.removesuffix(_SAMPLED))
    return ShapeDrafter(shape, sampled=sampled, suffix=shape == hydra27(), name=spec)


_SIZED: dict[str, Callable[[int, str], Drafter]] = {
    "suffix": lambda count, name: SuffixDrafter(count, name=name),
    "budget": lambda count, name: BudgetDrafter(count, name=name),
}
_DEFAULT = {"suffix": SUFFIX_TOKENS, "budget": BUDGET}


def drafter(spec: str) -> Drafter:
    """The drafter that `spec` names.

    "suffix" or "suffix:COUNT"; "budget" or "budget:NODES"; or a tree of `tree_named.named` filled by the MTP head, as
    "mtp5", "chain:4" or "star:8", of which "hydra27" is the union with a suffix match. A tree's name may end in
    "-sampled": children are then drawn from the head's law. Raises InputError listing what is allowed.
    """
    name, colon, size = spec.strip().lower().partition(":")
    try:
        if name in _SIZED and (not colon or (size.isascii() and size.isdigit() and 1 <= int(size) <= 4095)):
            return _SIZED[name](int(size) if colon else _DEFAULT[name], spec)
        return _shape(spec.strip().lower())
    except TreeError as cause:
        raise InputError(
            f"unknown drafter {spec!r}; allowed: suffix, suffix:1..4095, budget, budget:1..4095, or a tree, also with "
            f"{_SAMPLED} behind it ({cause})"
        ) from cause
