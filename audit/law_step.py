"""The law of one step with given drafts, and from it the exact joint law and total variation of two rules.

With the drafted tokens given, where a walk ends and what it draws there has a mass `[N, V]` that is summed row by row:
in `Fraction` for a bounded configuration (then averaged over the drafts), in float64 for a step at full vocabulary,
where the only error is rounding (below 1e-12 in TV).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from audit.law_domain import Configuration
from audit.law_rows import (
    Number,
    Rule,
    Vector,
    accept_chance,
    declared_law,
    draft_interval,
    draw_mass,
    ratio,
    row_law,
)
from lumotree.errors import InputError
from lumotree.select_types import Step

Tokens = tuple[int | None, ...]
"""Drafted token of each row; None at row 0, and at rows that were not drafted."""

Outcome = tuple[tuple[int, ...], int, int]
"""Emitted tokens (accepted ones and the bonus), number of accepted rows below row 0, row refused at (-1: none)."""

JointLaw = dict[Outcome, Fraction]


@dataclass(frozen=True)
class StepLaw:
    """Law of a rule on a step with given drafts.

    mass: `[N, V]`, probability that the walk ends at row r (its last accepted row) and draws token v there; sums to 1.
    refused: rows at which a walk that ends there has refused some child.
    """

    mass: Vector
    refused: tuple[bool, ...]

    @property
    def stop(self) -> Vector:
        """Probability of each row to be the last accepted one, `[N]`."""
        total: Vector = self.mass.sum(axis=1)
        return total

    def bonus(self, row: int) -> Vector:
        """Law of the bonus token given that the walk ends at `row`; zeros if it never does."""
        total = self.mass[row].sum()
        law: Vector = self.mass[row] / total if total > 0 else self.mass[row]
        return law


@dataclass(frozen=True)
class Given:
    """A step with its drafts given: children of each row, tokens, target rows `[N, V]`, draft laws by row or None."""

    children: tuple[tuple[int, ...], ...]
    tokens: Tokens
    target: Vector
    laws: Sequence[Vector] | Vector | None

    def law(self, row: int) -> Vector | None:
        """Draft law of the first child of `row`; None for fixed drafts."""
        return None if self.laws is None else self.laws[row]


def law_of_given(given: Given, rule: Rule) -> StepLaw:
    """Return the law of a rule on a step with its drafts given."""
    if rule.roll:
        given = Given(given.children, given.tokens, np.roll(given.target, rule.roll, axis=0), given.laws)
    mass = np.zeros_like(given.target)
    refused = [False] * len(given.children)
    if rule.kind == "traversal":
        _climb(given, rule, 0, mass[0, 0] + 1, mass[0, 0] + 1, 0, mass, refused)
    else:
        _descend(given, rule, 0, mass[0, 0] + 1, 0, mass, refused)
    return StepLaw(mass, tuple(refused))


def _descend(given: Given, rule: Rule, row: int, reach: Number, above: int, mass: Vector, refused: list[bool]) -> None:
    """Add the mass of walks that arrive at `row` with probability `reach`, from row `above`."""
    kids = given.children[row]
    tokens = [given.tokens[kid] for kid in kids]
    law = row_law(rule, given.target[row], given.target[above], given.law(row), tokens)
    mass[row] = mass[row] + reach * law.bonus
    refused[row] = law.refused
    for kid, take in zip(kids, law.take, strict=True):
        if take > 0 and reach > 0:
            _descend(given, rule, kid, reach * take, row, mass, refused)


def _climb(
    given: Given, rule: Rule, row: int, reach: Number, weight: Number, above: int, mass: Vector, refused: list[bool]
) -> Number:
    """Verify the subtree of `row`, reached with probability `reach`; return the probability that all of it is refused.

    `weight` is the chance that is left to the row. Along the children it is split off: `share` is weight x target, a
    child gets min(1, share/q), and after its refusal max(share - q, 0) / (1 - sum(min(share, q))) remains; of the row
    itself what is left at the end is accepted. Row 0 is always accepted.
    """
    p = rule.reshape(given.target[row])
    share, earlier = weight * p, list[int]()
    kids = given.children[row]
    tokens = [given.tokens[kid] for kid in kids]
    for i, kid in enumerate(kids):
        token = tokens[i]
        declared = None if token is None else declared_law(rule, given.law(row), earlier, token, p)
        if token is None or declared is None:
            continue
        chance = accept_chance(
            rule, ratio(share[token], declared[token]), draft_interval(rule, given.law(row), tokens, i)
        )
        reach = _climb(given, rule, kid, reach, chance, row, mass, refused)
        refused[row] = True
        share = leftover(share, declared)
        earlier.append(token)
    left = share.sum()
    if not left > 0:
        return reach
    source = share / left
    if not refused[row] and rule.bonus_row == "parent":
        source = rule.reshape(given.target[above])
    mass[row] = mass[row] + (reach if row == 0 else reach * left) * draw_mass(rule, source)
    return reach * 0 if row == 0 else reach * (1 - left)


def leftover(share: Vector, law: Vector) -> Vector:
    """Return the share of a row after a child from `law` was refused; unchanged if that has probability 0."""
    refusal = 1 - np.minimum(share, law).sum()
    kept: Vector = np.maximum(share - law, share * 0) / refusal if refusal > 0 else share
    return kept


def law_of_step(step: Step, rule: Rule, exact: bool = False) -> StepLaw:
    """Return the law of a rule on a step with the step's own drafts, in float64 or (exact) in `Fraction`.

    Cost in float64: a few vector operations a row. With `step.laws` this is the law *given* these drafts, which is not
    the target even for a right rule. Raises InputError for tokens outside the vocabulary of an active row.
    """
    return law_of_given(given_of_step(step, exact), rule)


def given_of_step(step: Step, exact: bool = False) -> Given:
    """Return a step with its own drafts. Raises InputError for a drafted token outside the vocabulary."""
    rows, vocab = step.target.shape
    children = tuple(step.tree.active_children(row) if step.tree.active[row] else () for row in range(rows))
    tokens = tuple(int(token) if row and step.tree.active[row] else None for row, token in enumerate(step.tree.tokens))
    for row, token in enumerate(tokens):
        if token is not None and not 0 <= token < vocab:
            raise InputError(f"token outside the vocabulary: row {row} has {token}; allowed: 0..{vocab - 1}")
    laws = None if step.laws is None else rows_of(step.laws.numpy(), exact)
    return Given(children, tokens, rows_of(step.target.numpy(), exact), laws)


def rows_of(rows: Vector, exact: bool) -> Vector:
    """Return rows that sum to 1, as float64 or, divided exactly, as fractions; all-zero rows stay."""
    if exact:
        fractions = np.array([[Fraction(value) for value in row] for row in rows.tolist()], dtype=object)
        return np.array([row / row.sum() if row.sum() > 0 else row for row in fractions], dtype=object)
    total = rows.sum(axis=1, keepdims=True)
    scaled: Vector = rows / np.where(total > 0, total, 1.0)
    return scaled


def given_drafts(config: Configuration, rule: Rule) -> Iterator[tuple[Fraction, Given]]:
    """Yield every draft of a configuration with its probability under `rule.draw`."""
    none: Tokens = (None,) * len(config.parents)
    for chance, tokens in _drafted(config, rule, 0, none, Fraction(1)):
        yield chance, _given(config, tokens)


def _drafted(
    config: Configuration, rule: Rule, row: int, tokens: Tokens, chance: Fraction
) -> Iterator[tuple[Fraction, Tokens]]:
    """Draft the children of `row` and of all later rows; pre-order numbering puts parents first."""
    if row == len(config.parents):
        yield chance, tokens
        return
    kids = config.children[row] if row == 0 or tokens[row] is not None else ()
    level, code = place(config, tokens, row) if kids else (0, 0)
    for part, drawn in sibling_drafts(config, rule, level, code, kids):
        filled = list(tokens)
        for kid, token in zip(kids, drawn, strict=True):
            filled[kid] = token
        yield from _drafted(config, rule, row + 1, tuple(filled), chance * part)


def sibling_drafts(
    config: Configuration, rule: Rule, level: int, code: int, kids: Sequence[int]
) -> Iterator[tuple[Fraction, Tokens]]:
    """Yield the drafted tokens of siblings at a prefix with their probability."""
    if config.laws is None:
        assert config.tokens is not None
        yield Fraction(1), tuple(config.tokens[kid] for kid in kids)
    elif not kids:
        yield Fraction(1), ()
    else:
        law = fractions_of(config.laws[level][code], config.den)
        yield from sibling_draws(rule, law, len(kids))


def sibling_draws(rule: Rule, law: Vector, count: int, drawn: Tokens = ()) -> Iterator[tuple[Fraction, Tokens]]:
    """Yield every draw of `count` siblings from a law, None where nothing was left to draw."""
    if len(drawn) == count:
        yield Fraction(1), drawn
        return
    left = rule.draw(law, [token for token in drawn if token is not None])
    if left is None:
        yield Fraction(1), drawn + (None,) * (count - len(drawn))
        return
    for token in np.flatnonzero(left > 0).tolist():
        for chance, rest in sibling_draws(rule, law, count, (*drawn, token)):
            yield left[token] * chance, rest


def fractions_of(row: Sequence[int], den: int) -> Vector:
    """Return a row of numerators as an array of fractions."""
    return np.array([Fraction(value, den) for value in row], dtype=object)


def place(config: Configuration, tokens: Tokens, row: int) -> tuple[int, int]:
    """Return the level and code of the prefix that leads to a drafted row."""
    path = path_tokens(config.parents, tokens, row)
    code = 0
    for token in path:
        code = code * config.vocab + token
    return len(path), code


def path_tokens(parents: Sequence[int], tokens: Tokens, row: int) -> tuple[int, ...]:
    """Return the tokens of the path from row 0 (excluded) to `row`."""
    path: list[int] = []
    while row > 0:
        token = tokens[row]
        assert token is not None
        path.append(token)
        row = parents[row]
    return tuple(reversed(path))


def _given(config: Configuration, tokens: Tokens) -> Given:
    blank = (0, 0)
    places = [place(config, tokens, row) if row == 0 or tokens[row] is not None else blank for row in _rows(config)]
    target = np.array([fractions_of(config.target[level][code], config.den) for level, code in places], dtype=object)
    if config.laws is None:
        return Given(config.children, tokens, target, None)
    inner = config.depth
    laws = [
        fractions_of(config.laws[level][code], config.den) if level < inner else target[0] for level, code in places
    ]
    return Given(config.children, tokens, target, laws)


def _rows(config: Configuration) -> range:
    return range(len(config.parents))


def joint_law(config: Configuration, rule: Rule) -> JointLaw:
    """Return the exact joint law of (emitted tokens, accepted length, row refused at), averaged over the drafts."""
    joint: JointLaw = {}
    for chance, given in given_drafts(config, rule):
        add_outcomes(joint, chance, given, law_of_given(given, rule), config.parents)
    return joint


def add_outcomes(joint: JointLaw, chance: Any, given: Given, law: StepLaw, parents: Sequence[int]) -> None:
    """Add the outcomes of one draft to a joint law."""
    for row, mass in enumerate(law.mass):
        if not (mass > 0).any():
            continue
        path = path_tokens(parents, given.tokens, row)
        for token in np.flatnonzero(mass > 0).tolist():
            outcome = ((*path, token), len(path), row if law.refused[row] else -1)
            joint[outcome] = joint.get(outcome, 0 * chance) + chance * mass[token]


def total_variation(first: Mapping[Any, Number], second: Mapping[Any, Number]) -> Number:
    """Return half the sum of |difference| of two laws given as mappings."""
    return sum((abs(first.get(key, 0) - second.get(key, 0)) for key in first.keys() | second.keys()), Fraction(0)) / 2
