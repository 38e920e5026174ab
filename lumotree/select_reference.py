"""The selection rules, one walk at a time, in plain Python: what the vectorised rules must agree with.

Numbers may be floats or `fractions.Fraction`. Target rows and declared laws are *weights*: what counts is a weight over
its row's sum. Floats are first put on the grid of 2^-52 (`snap`): sums of such numbers below 2 are exact in float64,
so that a dense and a sparse implementation, summing in any order, decide alike. It moves a probability by at most
2^-53. Fractions are left alone. Nothing is validated here (`select_prepare` does).

Every rule reads `accept[r]`, the coin of row r, at most once and `residual[r]` at most once a row, and takes a row
iff coin < probability, strictly: a coin of 0 never takes a row of probability 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: float or Fraction; Any, because a rule only needs + - * / and <, which no standard protocol spells.
Number = Any

GRID = 2.0**52


@dataclass(frozen=True)
class OneWalk:
    """Arguments of one selection.

    children[r]: active children of row r in the order they are tried. tokens[r]: drafted token. target[r]: V weights of
    the token after row r. laws[r]: V weights of the first child of row r, or laws is None for point masses. accept[r],
    residual[r]: coins.
    """

    children: Sequence[Sequence[int]]
    tokens: Sequence[int]
    target: Sequence[Sequence[Number]]
    laws: Sequence[Sequence[Number]] | None
    accept: Sequence[Number]
    residual: Sequence[Number]


@dataclass(frozen=True)
class Outcome:
    """last: last accepted row. bonus: the pending token, drawn at `last`. refused: a child of `last` was refused."""

    last: int
    bonus: int
    refused: bool


def snap(value: Number) -> Number:
    """The nearest multiple of 2^-52 (ties to even) of a float; any other number unchanged."""
    return round(value * GRID) / GRID if isinstance(value, float) else value


def draw(weights: Sequence[Number], mass: Number, coin: Number) -> int:
    """Inverse CDF: the first token whose cumulative weight exceeds coin * mass; it has a weight above zero.

    mass: sum of the weights, above zero. Rounding a float threshold down to the grid changes no comparison with a
    cumulative weight, which is on the grid, and keeps it below `mass` for every coin up to 1 - 2^-53.
    """
    threshold = coin * mass
    if isinstance(threshold, float):
        threshold = math.floor(threshold * GRID) / GRID
    total = mass - mass
    for token, weight in enumerate(weights):
        total = total + weight
        if threshold < total:
            return token
    raise AssertionError("a coin below 1 always stops at a token of positive weight")


class RowLaw:
    """What is left at one row: the target's residual and the draft law of the child tried next."""

    def __init__(self, walk: OneWalk, row: int) -> None:
        self.weights = [snap(weight) for weight in walk.target[row]]
        self.mass = sum(self.weights[1:], start=self.weights[0])
        self.law: list[Number] | None = None
        if walk.laws is not None and walk.children[row]:
            self.law = [snap(weight) for weight in walk.laws[row]]
            self.law_mass = sum(self.law[1:], start=self.law[0])

    def draft(self, token: int) -> list[Number]:
        """Law of the child tried now: the declared one without earlier siblings, renormalised, or a point mass."""
        if self.law is None:
            return [1 if index == token else 0 for index in range(len(self.weights))]
        return [weight / self.law_mass for weight in self.law]

    def ratio(self, token: int, reach: Number = 1) -> Number:
        """min(1, reach * p / q) of the drafted token; with q = 0 it is 1 if p > 0, otherwise 0."""
        p, q = self.weights[token] / self.mass * reach, self.draft(token)[token]
        if q == 0:
            return 1 if p > 0 else 0
        return min(1, p / q)

    def refuse(self, token: int, reach: Number = 1) -> Number:
        """Replace p by norm([reach * p - q]_+), take the token out of the draft law, return the new reach.

        The new reach is S / (S + 1 - reach) with S the mass of [reach * p - q]_+. Weights are kept unnormalised: they
        lose min(weight, mass * q / reach). Where nothing is left (p = q, a refusal of probability zero) p stays.
        """
        cuts = [
            min(w, self.mass * q / reach) if reach else 0 for w, q in zip(self.weights, self.draft(token), strict=True)
        ]
        cuts = [snap(cut) for cut in cuts]
        left = self.mass - sum(cuts)
        if self.law is not None:
            self.law_mass = self.law_mass - self.law[token]
            self.law[token] = self.law[token] - self.law[token]
        if left == 0 or reach == 0:
            return reach if reach == 1 else 0
        remaining = reach * left / self.mass
        self.weights = [weight - cut for weight, cut in zip(self.weights, cuts, strict=True)]
        self.mass = left
        return remaining / (remaining + (1 - reach))


def greedy(walk: OneWalk) -> Outcome:
    """Follow the first child that carries the row's argmax (the first of tied tokens)."""
    return _follow(walk, lambda row: walk.target[row].index(max(walk.target[row])))


def naive(walk: OneWalk) -> Outcome:
    """Draw the next token from the target with the row's residual coin; follow the first child that carries it."""

    def next_token(row: int) -> int:
        law = RowLaw(walk, row)
        return draw(law.weights, law.mass, walk.residual[row])

    return _follow(walk, next_token)


def multi_round(walk: OneWalk) -> Outcome:
    """Try the children in order against the residual of the earlier refusals; draw from what is left at the end."""
    row = 0
    while True:
        law = RowLaw(walk, row)
        for child in walk.children[row]:
            if walk.accept[child] < law.ratio(walk.tokens[child]):
                row = child
                break
            law.refuse(walk.tokens[child])
        else:
            return Outcome(row, draw(law.weights, law.mass, walk.residual[row]), bool(walk.children[row]))


def traversal(walk: OneWalk) -> Outcome:
    """Test leaves first; a refused leaf is deleted and changes its parent's residual and reach, until one is taken."""
    outcome = _visit(walk, 0, 1)
    assert outcome is not None, "the reach of row 0 stays 1 and a coin is below 1"
    return outcome


def _visit(walk: OneWalk, row: int, reach: Number) -> Outcome | None:
    """Settle the subtree of `row`, whose probability to be taken if it were a leaf is `reach`; None if deleted."""
    law = RowLaw(walk, row)
    for child in walk.children[row]:
        token = walk.tokens[child]
        outcome = _visit(walk, child, law.ratio(token, reach))
        if outcome is not None:
            return outcome
        reach = law.refuse(token, reach)
    if row == 0 or walk.accept[row] < reach:
        return Outcome(row, draw(law.weights, law.mass, walk.residual[row]), bool(walk.children[row]))
    return None


def _follow(walk: OneWalk, next_token: Any) -> Outcome:
    row = 0
    while True:
        token = next_token(row)
        follower = next((child for child in walk.children[row] if walk.tokens[child] == token), None)
        if follower is None:
            return Outcome(row, token, bool(walk.children[row]))
        row = follower


def cut(walk: OneWalk, outcome: Outcome, parents: Sequence[int], eos: int | None, budget: int | None) -> Outcome:
    """End what is emitted after the first end-of-sequence token and after `budget` tokens.

    Emitted are the tokens of the accepted candidates, then the bonus. If it ends at an accepted candidate, that
    candidate's token becomes the pending token b*, and the path ends at its parent: b* is never materialised, exactly
    as in plain decoding.
    """
    path = [outcome.last]
    while path[-1]:
        path.append(parents[path[-1]])
    for depth, row in enumerate(path[-2::-1], start=1):
        if walk.tokens[row] == eos or depth == budget:
            siblings = walk.children[parents[row]]
            return Outcome(parents[row], walk.tokens[row], siblings[0] != row)
    return outcome
