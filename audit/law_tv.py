"""Exact total variation between two rules on one step: where a fault is reachable, and by how much.

Two laws may be compared. *joint*: (row where the walk ends, bonus), duplicates of a token path counted as one, which is
what a test of a known rule sees. *emitted*: the tokens alone, continued by plain target draws, which is what a user
sees; a rule that merely accepts less often differs in the first and not in the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from audit.law_rows import Number, Rule, Vector
from audit.law_step import Given, StepLaw, Tokens, given_of_step, law_of_given, sibling_draws
from lumotree.errors import InputError
from lumotree.select_types import Step

View = Literal["joint", "emitted"]

MAX_DRAFTS = 100_000
"""Most drafts that are averaged over; above, the step's proposal is too wide to be enumerated."""


@dataclass(frozen=True)
class StepVariation:
    """Total variation of a faulty and a clean rule. by_row: contribution of walks that end at each row (sums to tv)."""

    tv: Number
    by_row: tuple[Number, ...]


def exact_tv(step: Step, faulty: Rule, clean: Rule, of: View = "joint", exact: bool = False) -> StepVariation:
    """Return the total variation between two rules on a step.

    exact: in `Fraction`, for small vocabularies; otherwise in float64, rounding below 1e-12. Without `step.laws` the
    step's own drafts are used. With laws it is the variation of (drafts, outcome), summed over every draft of either
    rule. Raises InputError if there are more than MAX_DRAFTS.
    """
    given = given_of_step(step, exact)
    rows = range(len(given.children))
    if given.laws is None:
        gaps = _gaps(given, faulty, clean, 1, 1, of)
        return StepVariation(gaps.sum(), tuple(gaps))
    total = np.array([given.target[0, 0] * 0 for _ in rows], dtype=given.target.dtype)
    bad, good = step_drafts(given, faulty), step_drafts(given, clean)
    for tokens in bad.keys() | good.keys():
        drawn = Given(given.children, tokens, given.target, given.laws)
        total = total + _gaps(drawn, faulty, clean, bad.get(tokens, 0), good.get(tokens, 0), of)
    return StepVariation(total.sum(), tuple(total))


def _gaps(given: Given, faulty: Rule, clean: Rule, bad: Number, good: Number, of: View) -> Vector:
    """Half the absolute difference of bad x law(faulty) and good x law(clean), by row."""
    first, second = (_view(given, law_of_given(given, rule), clean, of) for rule in (faulty, clean))
    gaps: Vector = np.abs(bad * first - good * second).sum(axis=1) / 2
    return gaps


def _view(given: Given, law: StepLaw, clean: Rule, of: View) -> Vector:
    eldest = elders(given)
    mass = law.mass.copy()
    for row in range(1, len(eldest)):
        if eldest[row] not in (row, -1):
            mass[eldest[row]] = mass[eldest[row]] + mass[row]
            mass[row] = mass[row] * 0
    return mass if of == "joint" else emitted_cells(given, mass, clean, eldest)


def elders(given: Given) -> list[int]:
    """Return for each row the first row with the same token path; -1 for rows not drafted."""
    eldest = [-1] * len(given.children)
    eldest[0] = 0
    first: dict[tuple[int, int], int] = {}
    for row, kids in enumerate(given.children):
        for kid in kids:
            token = given.tokens[kid]
            if token is not None and eldest[row] >= 0:
                eldest[kid] = first.setdefault((eldest[row], token), kid)
    return eldest


def emitted_cells(given: Given, mass: Vector, clean: Rule, eldest: list[int]) -> Vector:
    """Return `[N, V]`: the probability that the continued sequence leaves the drafted tokens at row r with token v.

    Mass that stops at a row with the token of a drafted child runs on into that child and follows the target there.
    Beyond these cells both laws are the target's, so their total variation is that of the cells.
    """
    cells = mass.copy()
    carried = [mass[0, 0] * 0] * len(eldest)
    for row in range(len(eldest)):
        if eldest[row] != row:
            continue
        cells[row] = cells[row] + carried[row] * clean.truth(given.target[row])
        for kid in range(row + 1, len(eldest)):
            token = given.tokens[kid]
            if eldest[kid] == kid and token is not None and eldest[_parent(given, kid)] == row:
                carried[kid] = cells[row, token]
                cells[row, token] = cells[row, token] * 0
    return cells


def _parent(given: Given, kid: int) -> int:
    return next(row for row, kids in enumerate(given.children) if kid in kids)


def step_drafts(given: Given, rule: Rule) -> dict[Tokens, Number]:
    """Return every draft of a step with its probability. Raises InputError if there are more than MAX_DRAFTS."""
    assert given.laws is not None
    drafts: dict[Tokens, Number] = {(None,) * len(given.children): given.target[0, 0] * 0 + 1}
    for row, kids in enumerate(given.children):
        if not kids:
            continue
        draws = [(tuple(tokens), chance) for chance, tokens in sibling_draws(rule, given.laws[row], len(kids))]
        if len(drafts) * len(draws) > MAX_DRAFTS:
            raise InputError(f"more than {MAX_DRAFTS} drafts from row {row} on: use a smaller tree or vocabulary")
        drafts = {
            _filled(tokens, kids, drawn): chance * part for tokens, chance in drafts.items() for drawn, part in draws
        }
    return drafts


def _filled(tokens: Tokens, kids: tuple[int, ...], drawn: Tokens) -> Tokens:
    filled = list(tokens)
    for kid, token in zip(kids, drawn, strict=True):
        filled[kid] = token
    return tuple(filled)


def is_reachable(step: Step, faulty: Rule, clean: Rule, least: float = 1e-12) -> bool:
    """Tell whether a fault changes the joint law of a step by more than `least` (the default is above rounding)."""
    return bool(exact_tv(step, faulty, clean).tv > least)
