"""Rules as data, and what a rule does at one row: the arithmetic under every exact law.

Vectors are numpy arrays, either of `Fraction` (dtype object; then everything below is exact) or of float64 (large
vocabularies). This module shares no code with `lumotree.select`: the two are independent statements of the rules.

A faulty rule is a `Rule` with one field changed. Coins that are shared between two decisions are not simulated: a
decision is a piecewise constant function of its coin, so conditioning on an earlier decision leaves the coin uniform on
an interval, over which the later decision is integrated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[Any]
Number = Any
"""Fraction or float."""

Interval = tuple[Number, Number]
UNIT: Interval = (0, 1)


def identity(row: Vector) -> Vector:
    """Leave a row alone."""
    return row


def point(size: int, token: int, like: Vector) -> Vector:
    """Return the point mass on `token`, in the number type of `like`."""
    mass = np.zeros_like(like, shape=size)
    if mass.dtype == object:
        mass[:] = Fraction(0)
    mass[token] = mass[token] + 1
    return mass


def without_replacement(law: Vector, earlier: Sequence[int]) -> Vector | None:
    """Return the law given the earlier siblings: their tokens removed, renormalised; None if nothing is left."""
    if not earlier:
        return law
    left = law.copy()
    left[list(earlier)] = left[list(earlier)] * 0
    total = left.sum()
    return left / total if total > 0 else None


def clamped(residual: Vector, target: Vector, law: Vector) -> Vector:
    """Return max(p - q, 0), the weights that remain after a refusal."""
    kept: Vector = np.maximum(residual - law, residual * 0)
    return kept


@dataclass(frozen=True)
class Rule:
    """A selection rule, right or with one fault.

    kind: "naive" (draw from the target, follow a child that carries the token), "rejection" (multi-round over the
    siblings; with fixed drafts the rule for deterministic proposals) or "traversal" (bottom-up).
    truth: the law that the rule should follow, from a target row; greedy follows the point mass on the first argmax.
    reshape: the row that the rule reads instead of the target row. roll: it reads the row of tree row r - roll.
    draw(q, earlier): law of the next sibling as drafted. declare(q, earlier): the law that the rule divides by.
    certain: the rule takes the drafted token for a point mass whatever it was drawn from.
    ratio_one: the accept test divides by 1; the residual still subtracts q.
    residual(r, p, q): weights after a refusal. normalise: divide them by their (positive) sum.
    accept_coin: "fresh", "zero", or "draft" (the coin that drew the token).
    bonus_coin: "fresh", "half" (always 0.5), or "accept" (after a refusal, the coin of the last child refused).
    bonus_row: without a refusal the bonus is drawn at the walk's "own" last row or at that row's "parent".
    bonus_greedy: the bonus is the first argmax of its weights. reverse: siblings are tried from last to first.
    second_try: a duplicate sibling is tried against the weights from before its token was refused.
    """

    name: str
    summary: str
    kind: Literal["naive", "rejection", "traversal"] = "rejection"
    truth: Callable[[Vector], Vector] = identity
    reshape: Callable[[Vector], Vector] = identity
    roll: int = 0
    draw: Callable[[Vector, Sequence[int]], Vector | None] = without_replacement
    declare: Callable[[Vector, Sequence[int]], Vector | None] = without_replacement
    certain: bool = False
    ratio_one: bool = False
    residual: Callable[[Vector, Vector, Vector], Vector] = clamped
    normalise: bool = True
    accept_coin: Literal["fresh", "zero", "draft"] = "fresh"
    bonus_coin: Literal["fresh", "half", "accept"] = "fresh"
    bonus_row: Literal["own", "parent"] = "own"
    bonus_greedy: bool = False
    reverse: bool = False
    second_try: bool = False


@dataclass(frozen=True)
class RowLaw:
    """What happens at a row that the walk has reached. take[i]: probability that child i is accepted. bonus: mass of
    each bonus token drawn here; together they sum to 1. refused: whether some child was tried."""

    take: tuple[Number, ...]
    bonus: Vector
    refused: bool


def row_law(rule: Rule, target: Vector, above: Vector, law: Vector | None, tokens: Sequence[int | None]) -> RowLaw:
    """Return what a "naive" or "rejection" rule does at a row.

    target, above: normalised target rows here and at the parent (`target` itself at row 0). law: draft law of the first
    child, None for fixed drafts. tokens: drafted token of each child in row order, None where the law had run dry.
    """
    if rule.kind == "naive":
        return _naive(rule, target, above, tokens)
    return _rejection(rule, target, above, law, tokens)


def _naive(rule: Rule, target: Vector, above: Vector, tokens: Sequence[int | None]) -> RowLaw:
    weights = rule.reshape(target)
    drafted = [token for token in tokens if token is not None]
    mass = draw_mass(rule, rule.reshape(above) if not drafted and rule.bonus_row == "parent" else weights)
    left, take = mass.copy(), []
    for token in tokens:
        take.append(left[token] if token is not None else 0)
        if token is not None:
            left[token] = left[token] * 0
    return RowLaw(tuple(take), left, bool(drafted))


def _rejection(rule: Rule, target: Vector, above: Vector, law: Vector | None, tokens: Sequence[int | None]) -> RowLaw:
    p = rule.reshape(target)
    weights, reach, coin = p, p[0] * 0 + 1, UNIT
    take: list[Number] = [reach * 0] * len(tokens)
    earlier: list[int] = []
    before: dict[int, Vector] = {}
    refused = False
    for i in reversed(range(len(tokens))) if rule.reverse else range(len(tokens)):
        token = tokens[i]
        declared = None if token is None else declared_law(rule, law, earlier, token, p)
        if token is None or declared is None or not reach > 0:
            continue
        weights = before.get(token, weights) if rule.second_try else weights
        threshold = ratio(weights[token], 1 if rule.ratio_one else declared[token])
        chance = accept_chance(rule, threshold, draft_interval(rule, law, tokens, i))
        take[i] = reach * chance
        reach, refused, coin = reach * (1 - chance), True, (threshold, 1)
        before.setdefault(token, weights)
        earlier.append(token)
        weights = remaining(rule, weights, p, declared)
    if not refused and rule.bonus_row == "parent":
        weights = rule.reshape(above)
    fresh = not refused or rule.bonus_coin != "accept"
    return RowLaw(tuple(take), reach * draw_mass(rule, weights, UNIT if fresh else coin), refused)


def declared_law(rule: Rule, law: Vector | None, earlier: Sequence[int], token: int, like: Vector) -> Vector | None:
    """Return the law that the rule divides by for a sibling, None if that law has run dry (the sibling is skipped)."""
    if law is None or rule.certain:
        return point(len(like), token, like)
    return rule.declare(law, earlier)


def ratio(weight: Number, probability: Number) -> Number:
    """Return min(1, p/q) within [0, 1]; with q = 0 (a token that the law cannot have drawn) 1 if p > 0, otherwise 0."""
    if weight <= 0:
        return weight * 0
    return weight * 0 + 1 if probability <= 0 else min(weight / probability, weight * 0 + 1)


def accept_chance(rule: Rule, threshold: Number, drawn: Interval) -> Number:
    """Return the probability of coin < threshold under the rule's accept coin; `drawn` is where the draft coin lay."""
    if rule.accept_coin == "zero":
        return threshold * 0 + 1 if threshold > 0 else threshold
    if rule.accept_coin == "draft":
        low, high = drawn
        return max(min(threshold, high) - low, threshold * 0) / (high - low)
    return threshold


def draft_interval(rule: Rule, law: Vector | None, tokens: Sequence[int | None], i: int) -> Interval:
    """Return the interval of draft coins that draw sibling i given the earlier siblings (inverse CDF, index order)."""
    if law is None or rule.accept_coin != "draft":
        return UNIT
    drawn = rule.draw(law, [token for token in tokens[:i] if token is not None])
    token = tokens[i]
    if drawn is None or token is None or not drawn[token] > 0:
        return UNIT
    below = drawn[:token].sum()
    return below, below + drawn[token]


def remaining(rule: Rule, weights: Vector, target: Vector, law: Vector) -> Vector:
    """Return the weights after a refusal; all 0 where nothing remains (a refusal of probability 0)."""
    left = rule.residual(weights, target, law)
    if not rule.normalise:
        return left
    total = np.maximum(left, 0).sum()
    return left / total if total > 0 else left


def draw_mass(rule: Rule, weights: Vector, coin: Interval = UNIT) -> Vector:
    """Return the law of the token drawn from `weights` (normalised unless the rule's fault is that they are not)."""
    size = len(weights)
    if rule.bonus_greedy:
        return point(size, int(np.argmax(weights)), weights)
    if rule.bonus_coin == "half":
        passed = np.flatnonzero(np.cumsum(weights) > weights[0] * 0 + 1 / Fraction(2))
        return point(size, int(passed[0]) if len(passed) else size - 1, weights)
    return inverse_cdf(weights, coin)


def inverse_cdf(weights: Vector, coin: Interval) -> Vector:
    """Return the law of the first token whose running sum exceeds a coin uniform on `coin`.

    A coin beyond the whole sum draws the last token of the vocabulary, as a clamped search does; this is where weights
    that sum to less than 1, or that are negative, show.
    """
    if coin == UNIT and weights.min() >= 0 and is_one(weights.sum()):
        return weights
    low, high = (weights[0] * 0 + end for end in coin)
    length = high - low
    if not length > 0:  # conditioning on a refusal of probability 0
        return weights
    reached = np.minimum(np.maximum(np.maximum.accumulate(np.cumsum(weights)), low), high)
    mass: Vector = np.diff(reached, prepend=low) / length
    mass[-1] = mass[-1] + (high - reached[-1]) / length
    return mass


def is_one(total: Number) -> bool:
    """Tell whether a sum is 1: exactly for fractions, within 1e-9 for float64 (151,936 terms round to about 1e-13)."""
    return bool(abs(total - 1) < 1e-9) if isinstance(total, float) else bool(total == 1)
