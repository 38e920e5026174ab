"""The law of a float sampler that takes its coins as an argument: summed over the coins, not estimated.

A right sampler is piecewise constant in its coins, and the rational rule says where the pieces end: at the acceptance
thresholds and at the running sums of the row that the bonus is drawn from. The unit cube of coins is cut there (and
further, as far as the budget goes), the sampler is asked once in the middle of each cell, and the answer weighs the
cell's volume. It is asked again near both ends of each cell along every coin, 0 and the largest float below 1 included:
a cell that answers differently there hides a breakpoint that the rule does not have. Such a place is found by bisection
and becomes a cut; what the budget leaves is *unresolved* volume.

The deviation bound is tv + unresolved + edges. It holds for a sampler that does not change and change back inside a
cell along one coin; `resolution` is the widest cell side, the width below which such an island can hide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audit.law_rows import Rule
from audit.law_step import Given, Outcome, StepLaw, given_of_step, law_of_given, path_tokens
from audit.law_tv import step_drafts
from lumotree.errors import InputError
from lumotree.select_types import Coins, CoinSampler, Step

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]

EDGE = 2.0**-40
"""How exactly a change of the answer is located; far above a threshold's rounding, far below any TV of interest."""

APART = 8 * EDGE
"""Breakpoints closer than this are one: a change that many cells see is located anew in each of them."""

MARGIN = 2 * APART
"""How close to a cell's end the sampler is asked: beyond the breakpoints that were taken for the one at that end."""

BELOW_ONE = 1 - 2.0**-53
REFINE = 8
"""A lattice starts with this part of the budget; the rest is for breakpoints that are found and not expected."""

ROUNDS = 24
"""Most lattices that are tried; each adds the breakpoints that the one before has shown."""

BISECTED = 64
"""About how many cells a coin and end in which the place of a change is looked for, a round."""

DEFAULT_BUDGET = 1 << 14
"""Cells over all drafts; a walk is taken in each, and two more along every coin."""


@dataclass(frozen=True)
class SummedLaw:
    """Summed law of a sampler on a step, beside the exact one.

    law, exact: joint law of (emitted tokens, accepted length, row refused at), over the drafts; row N or token V in an
    outcome of `law` stands for anything outside the tree or the vocabulary. tv: total variation of (drafts, outcome).
    unresolved: volume of the cells that are not constant. edges: volume next to cell ends that was not looked at.
    resolution: widest cell side. cells, walks: evaluations. odd: the first place, in words, where the answer changes
    though the rule has no breakpoint there, or "". never: an answer, at whatever coin, with a token that the target
    gives nothing, in words, or "": no volume excuses it.
    """

    law: dict[Outcome, float]
    exact: dict[Outcome, float]
    tv: float
    unresolved: float
    edges: float
    resolution: float
    cells: int
    walks: int
    odd: str
    never: str = ""

    @property
    def bound(self) -> float:
        """Bound on the total variation between the sampler's law and the exact one; see the module."""
        return min(1.0, self.tv + self.unresolved + self.edges)


def summed_law(sampler: CoinSampler, step: Step, rule: Rule, budget: int = DEFAULT_BUDGET) -> SummedLaw:
    """Sum the law of a sampler on a step of few rows and compare it with the exact law of `rule`.

    Every draft of `step.laws` is taken in turn, or the step's own. Raises InputError if the pieces alone need more than
    `budget` cells, as they do for trees of more than about four rows or wide vocabularies.
    """
    given = given_of_step(step)
    drafts = {given.tokens: 1.0} if given.laws is None else step_drafts(given, rule)
    parts = []
    for tokens, chance in drafts.items():
        drawn = Given(given.children, tokens, given.target, given.laws)
        parts.append((float(chance), _sum_draft(sampler, step, rule, drawn, budget // len(drafts))))
    law: dict[Outcome, float] = {}
    exact: dict[Outcome, float] = {}
    for chance, part in parts:
        for total, source in ((law, part.law), (exact, part.exact)):
            for outcome, mass in source.items():
                total[outcome] = total.get(outcome, 0.0) + chance * mass
    return SummedLaw(
        law,
        exact,
        sum(chance * part.tv for chance, part in parts),
        sum(chance * part.unresolved for chance, part in parts),
        max(part.edges for _, part in parts),
        max(part.resolution for _, part in parts),
        sum(part.cells for _, part in parts),
        sum(part.walks for _, part in parts),
        next((part.odd for _, part in parts if part.odd), ""),
        next((part.never for _, part in parts if part.never), ""),
    )


def breakpoints(given: Given, rule: Rule, law: StepLaw) -> tuple[list[Floats], list[Floats]]:
    """Return the expected breakpoints of each row's accept and residual coin, from the exact law with given drafts.

    Accept: the chance of a row to be taken when it is tested. A top-down rule tests it if its parent was taken and its
    elder siblings were not; a bottom-up rule if no row before it in post-order was.
    """
    stop = [float(value) for value in law.stop]
    accept: list[Floats] = [np.zeros(0) for _ in stop]
    if rule.kind == "rejection":
        _top_down(given, 0, _subtree_masses(given, stop), accept)
    elif rule.kind == "traversal":
        _bottom_up(given, 0, stop, 1.0, accept)
    residual = []
    for row in range(len(stop)):
        weights = rule.reshape(given.target[row]) if rule.kind == "naive" else law.mass[row]
        total = float(weights.sum())
        residual.append(np.cumsum(weights)[:-1] / total if total > 0 else np.zeros(0))
    return accept, residual


def _subtree_masses(given: Given, stop: Sequence[float]) -> list[float]:
    masses = list(stop)
    for row in reversed(range(len(masses))):
        masses[row] += sum(masses[kid] for kid in given.children[row])
    return masses


def _top_down(given: Given, row: int, masses: Sequence[float], accept: list[Floats]) -> None:
    reach = masses[row]
    for kid in given.children[row]:
        if reach > 0:
            accept[kid] = np.array([masses[kid] / reach])
        reach -= masses[kid]
        _top_down(given, kid, masses, accept)


def _bottom_up(given: Given, row: int, stop: Sequence[float], reach: float, accept: list[Floats]) -> float:
    for kid in given.children[row]:
        reach = _bottom_up(given, kid, stop, reach, accept)
    if reach > 0:
        accept[row] = np.array([stop[row] / reach])
    return reach - stop[row]


@dataclass(frozen=True)
class _Lattice:
    """Cells of the coin cube. low, high, middle: `[cells, 2N]`, accept coins then residual coins."""

    low: Floats
    high: Floats
    shape: tuple[int, ...]

    @property
    def middle(self) -> Floats:
        return (self.low + self.high) / 2

    @property
    def volume(self) -> Floats:
        volume: Floats = np.prod(self.high - self.low, axis=1)
        return volume


def _lattice(sides: Sequence[Floats]) -> _Lattice:
    shape = tuple(len(side) - 1 for side in sides)
    index = np.unravel_index(np.arange(math.prod(shape)), shape)
    low = np.stack([side[:-1][at] for side, at in zip(sides, index, strict=True)], axis=1)
    high = np.stack([side[1:][at] for side, at in zip(sides, index, strict=True)], axis=1)
    return _Lattice(low, high, shape)


def _first_sides(breaks: Sequence[Floats], budget: int) -> list[Floats]:
    """The sides of the pieces, the widest halved again and again within a part of the budget."""
    sides = [_side(values) for values in breaks]
    if _cells(sides) > budget:
        raise InputError(
            f"the coin cube has {_cells(sides)} pieces, more than the budget of {budget} cells; use a smaller tree"
        )
    while True:
        finer = _halved(sides, max(range(len(sides)), key=lambda coin: float(np.diff(sides[coin]).max())))
        if _cells(finer) > budget // REFINE:
            return sides
        sides = finer


def _cells(sides: Sequence[Floats]) -> int:
    return math.prod(len(side) - 1 for side in sides)


def _halved(sides: list[Floats], coin: int) -> list[Floats]:
    side = sides[coin]
    return [*sides[:coin], np.sort(np.concatenate([side, (side[1:] + side[:-1]) / 2])), *sides[coin + 1 :]]


def _side(values: Floats) -> Floats:
    """0, the breakpoints that lie apart from each other and from the ends, 1."""
    side = [0.0]
    for value in np.sort(values).tolist():
        if value - side[-1] > APART and 1 - value > APART:
            side.append(value)
    return np.array([*side, 1.0])


def _sum_draft(sampler: CoinSampler, step: Step, rule: Rule, given: Given, budget: int) -> SummedLaw:
    expected = law_of_given(given, rule)
    accept, residual = breakpoints(given, rule, expected)
    ask = _Asker(sampler, step, given)
    sides, odd = _first_sides([*accept, *residual], budget), ""
    for _ in range(ROUNDS):
        lattice = _lattice(sides)
        answers = ask(lattice.middle)
        differs, changes, place = _probe(ask, lattice, answers)
        odd = odd or place
        finer = _with_cuts(sides, changes)
        if _cells(finer) > budget:  # room is made where the rule has breakpoints and this sampler has none
            finer = _with_cuts(_needed(sides, answers.reshape(lattice.shape)), changes)
        if _cells(finer) > budget or all(np.array_equal(x, y) for x, y in zip(finer, sides, strict=True)):
            break
        sides = finer
    unresolved = differs.any(axis=1)
    rows, vocab = given.target.shape
    summed = np.bincount(answers, weights=lattice.volume, minlength=ask.size).reshape(rows + 1, vocab + 1, 2)
    exact = np.zeros_like(summed)
    for row, mass in enumerate(expected.mass):
        exact[row, :vocab, int(expected.refused[row])] = mass
    return SummedLaw(
        law=_outcomes(step, given, summed),
        exact=_outcomes(step, given, exact),
        tv=float(np.abs(summed - exact).sum() / 2),
        unresolved=float(lattice.volume[unresolved].sum()),
        edges=2 * MARGIN * sum(lattice.shape),
        resolution=float((lattice.high - lattice.low).max()),
        cells=len(answers),
        walks=ask.walks,
        odd=odd,
        never=ask.never,
    )


def _with_cuts(sides: Sequence[Floats], places: Sequence[Floats]) -> list[Floats]:
    return [_side(np.concatenate([side[1:-1], new])) for side, new in zip(sides, places, strict=True)]


def _needed(sides: Sequence[Floats], answers: Codes) -> list[Floats]:
    """The sides without the cuts at which no cell answers differently from its neighbour; answers: one axis a coin."""
    kept = []
    for axis, side in enumerate(sides):
        others = tuple(other for other in range(answers.ndim) if other != axis)
        changes = (np.diff(answers, axis=axis) != 0).any(axis=others)
        kept.append(np.concatenate([side[:1], side[1:-1][changes], side[-1:]]))
    return kept


class _Asker:
    """Asks the sampler and packs (last, bonus, refused) into one code; what is out of range gets a code of its own."""

    def __init__(self, sampler: CoinSampler, step: Step, given: Given) -> None:
        self._sampler, self._step = sampler, step
        self._tokens = torch.tensor([[0 if token is None else token for token in given.tokens]])
        self.rows, self.vocab = given.target.shape
        self.size = (self.rows + 1) * (self.vocab + 1) * 2
        self.walks = 0
        self.never = ""
        self._possible = _possible(step, given).ravel()

    def __call__(self, points: Floats) -> Codes:
        self.walks += len(points)
        accept, residual = torch.from_numpy(points[:, : self.rows]), torch.from_numpy(points[:, self.rows :])
        coins = Coins(accept.contiguous(), residual.contiguous())
        walks = self._sampler.select(self._step, self._tokens, coins)
        last, bonus = _bounded(walks.last, self.rows), _bounded(walks.bonus, self.vocab)
        place = last * (self.vocab + 1) + bonus
        if not self.never and not self._possible[place].all():
            first = int(np.argmin(self._possible[place]))
            at = [float(value) for value in points[first]]
            self.never = f"token {bonus[first]} after row {last[first]} has probability zero, at coins {at}"
        codes: Codes = place * 2 + walks.refused.cpu().numpy().astype(np.int64)
        return codes


def _possible(step: Step, given: Given) -> NDArray[np.bool_]:
    """`[N + 1, V + 1]`: rows whose path the target can take, and tokens that it can emit there."""
    rows, vocab = given.target.shape
    positive = np.zeros((rows + 1, vocab + 1), np.bool_)
    positive[:rows, :vocab] = step.target.cpu().numpy() > 0
    for row, parent in enumerate(step.tree.parents.tolist()[1:], 1):
        token = given.tokens[row]
        positive[row] &= bool(positive[parent].any()) and token is not None and bool(positive[parent, token])
    return positive


def _bounded(values: torch.Tensor, end: int) -> Codes:
    numbers: Codes = values.cpu().numpy().astype(np.int64)
    bounded: Codes = np.where((numbers >= 0) & (numbers < end), numbers, end)
    return bounded


def _probe(ask: _Asker, lattice: _Lattice, answers: Codes) -> tuple[NDArray[np.bool_], list[Floats], str]:
    """Return `[cells, 2N]`, which cells answer differently near an end of which coin; where each coin's answer changes
    inside such cells; and one such place in words."""
    middle, odd = lattice.middle, ""
    found = np.zeros(middle.shape, np.bool_)
    changes = []
    for coin in range(middle.shape[1]):
        low, high = lattice.low[:, coin], lattice.high[:, coin]
        places = []
        for ends in (np.where(low == 0, 0.0, low + MARGIN), np.where(high == 1, BELOW_ONE, high - MARGIN)):
            points = middle.copy()
            points[:, coin] = ends
            differs = ask(points) != answers
            found[:, coin] |= differs
            cells = np.flatnonzero(differs)
            places.append(_bisect(ask, middle, answers, coin, ends, cells[:: 1 + len(cells) // BISECTED]))
            if differs.any() and not odd:
                odd = _in_words(ask, coin, points[cells[0]], float(places[-1][0]))
        changes.append(np.concatenate(places))
    return found, changes, odd


def _bisect(ask: _Asker, middle: Floats, answers: Codes, coin: int, ends: Floats, cells: Codes) -> Floats:
    """Return where, between an end and the middle of each of some cells, the answer becomes that of the middle."""
    other: Floats = ends[cells]
    same: Floats = middle[cells, coin]
    points = middle[cells]
    while len(cells) and np.abs(same - other).max() > EDGE:
        points[:, coin] = (same + other) / 2
        right = ask(points) == answers[cells]
        same, other = np.where(right, points[:, coin], same), np.where(right, other, points[:, coin])
    return same


def _in_words(ask: _Asker, coin: int, at: Floats, change: float) -> str:
    kind, row = ("accept", coin) if coin < ask.rows else ("residual", coin - ask.rows)
    place = [round(float(value), 6) for value in at]
    return f"the answer changes at {change:.9f} of the {kind} coin of row {row} (coins {place})"


def _outcomes(step: Step, given: Given, mass: NDArray[Any]) -> dict[Outcome, float]:
    law: dict[Outcome, float] = {}
    rows = len(given.children)
    for row, token, refused in np.argwhere(mass > 0).tolist():
        known = row < rows and (row == 0 or given.tokens[row] is not None)
        path = path_tokens(step.tree.parents.tolist(), given.tokens, row) if known else ()
        outcome = ((*path, token), len(path), row if refused or not known else -1)
        law[outcome] = law.get(outcome, 0.0) + float(mass[row, token, refused])
    return law
