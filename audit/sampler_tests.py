"""The tests of a sampler's walks: each asks one question of the counts in a `WalkTally`.

    node, node bands     emissions at a visited row follow the target row (published test, contract section 6)
    outcome              which child is taken with which token, or which bonus, given the visit; needs the rule's law
    refused              the bonus at a row, given that a child was refused there; needs the rule's law
    last, joint          where walks end; the same with the bonus in bands of probability; needs the rule's law
    lag *, stream *      walks next to each other, 2, 32 and half a stream apart, and walks of one index in two streams
                         (requests), are independent
    within               the token that led to a row, and the emission there, are independent (redrawn drafts)
    drafts               first drafts of neighbouring parents are independent (redrawn drafts)
    first, second, third the drafts follow the declared law: first child, first two together, third

Assumption of `node`: the rule is top-down, target rows depend on the row alone, and drafts are redrawn in each walk.
Then the drafts below a row and its coins are independent of the walk's getting there, so the emission given the visit
follows the target row exactly. For a *fixed* stochastic draft this is false (contract section 7), for a point mass it
is true.

Numbers of draws are themselves random, but a clean sampler's emissions at a row are independent of how often it is
visited, so a test is valid given its number. A test that is not run for lack of visits is returned without a p-value:
the number of tests never depends on the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from audit.gtest import MIN_EXPECTED, Outcome, g_test, independence_test, pool_sorted
from audit.power import detectable_tv
from audit.rule_law import Floats, Ints, RuleLaw, draft_marginals
from audit.walk_tally import FAR, Sibling, WalkTally

MIN_VISITS = 2_000
"""Rows seen less often are not tested (published audit, contract section 6)."""

_TAIL_BLOCKS = 32  # a tail that is never emitted must not hide in one pooled cell
_TAIL_EXPECTED = 4 * MIN_EXPECTED


@dataclass(frozen=True)
class TestResult:
    """One test of the family. row: tree row, None for the whole walk; p_value: None if it was not run;
    n: draws; df: degrees of freedom; where: the cell that adds most; observed, expected: counts there;
    detectable: smallest TV, in every direction of the cells, that is rejected with 99% power, None if not run."""

    __test__ = False  # not a case of pytest, in spite of its name

    name: str
    row: int | None
    p_value: float | None
    n: int
    df: int = 0
    statistic: float = 0.0
    where: str = ""
    observed: float = 0.0
    expected: float = 0.0
    detectable: float | None = None

    @property
    def id(self) -> str:
        """Name and row in one word, unique in a family."""
        return self.name.replace(" ", "-") + ("" if self.row is None else f"@{self.row}")


@dataclass(frozen=True, eq=False)
class Cells:
    """A partition of the vocabulary: cell [V] of each token; law [K + 1], the last cell being what is impossible."""

    cell: Ints
    law: Floats

    def count(self, counts: Ints) -> Floats:
        """Return the counts [K + 1] of the cells from those [V] of the tokens."""
        seen = np.flatnonzero(counts)  # few of a large vocabulary
        return _sums(self.cell[seen], counts[seen], len(self.law))

    def name(self, cell: int) -> str:
        """Return which tokens a cell holds."""
        tokens = np.flatnonzero(self.cell == cell)
        return f"token {tokens[0]}" if len(tokens) == 1 else f"{len(tokens)} tokens from {tokens[0]} to {tokens[-1]}"


def token_cells(law: Floats, n: int) -> Cells:
    """One cell for each token that expects `MIN_EXPECTED` or more of n draws.

    The rest is pooled in up to 32 blocks of token numbers with about the same mass. What expects less than that in all
    joins the rarest token, but is a cell of its own in a row that is otherwise certain: two cells are judged by the
    exact binomial law, which holds for any count, and one cell by nothing.
    """
    heavy = law * n >= MIN_EXPECTED
    count = int(heavy.sum())
    cell = np.full(len(law), -1, np.int64)
    cell[heavy] = np.arange(count)
    tail = np.flatnonzero((law > 0) & ~heavy)
    mass = law[tail]
    expected = float(mass.sum() * n)
    if expected < MIN_EXPECTED and count > 1:
        cell[tail] = int(np.argmin(law[heavy]))
    elif len(tail):
        blocks = int(np.clip(expected // _TAIL_EXPECTED, 1, _TAIL_BLOCKS))
        middle = (np.cumsum(mass) - mass / 2) / mass.sum()
        # Ranked, so that a block without a token leaves no gap.
        cell[tail] = count + np.unique((middle * blocks).astype(np.int64), return_inverse=True)[1]
    return _close(cell, law)


def band_cells(law: Floats, n: int) -> Cells:
    """Bands of probability, one for each factor of 2, pooled until each expects `MIN_EXPECTED`.

    Few cells, so much power against changes of temperature or of a tail. At least two where there are two bands, as in
    `token_cells`.
    """
    seen = np.flatnonzero(law)
    if not len(seen):  # filters left the row nothing but its children: one impossible cell
        return _close(np.full(len(law), -1, np.int64), law)
    exponent = -np.frexp(law[seen])[1]
    band = exponent - exponent.min()
    group = pool_sorted(_sums(band, law[seen], 0) * n, MIN_EXPECTED)
    if not group.any():
        group[1:] = 1
    cell = np.full(len(law), -1, np.int64)
    cell[seen] = group[band]
    return _close(cell, law)


def _close(cell: Ints, law: Floats) -> Cells:
    count = int(cell.max()) + 1
    cell[cell < 0] = count
    return Cells(cell, _sums(cell, law, count + 1))


def _sums(cell: Ints, weights: ArrayLike, cells: int) -> Floats:
    return np.bincount(cell, weights=weights, minlength=cells).astype(np.float64, copy=False)


def battery(tally: WalkTally, law: RuleLaw | None, level: float, min_visits: int = MIN_VISITS) -> list[TestResult]:
    """Run every test. level: that of the family; it sets the detectable TV, each test having an equal share.

    law: of the clean rule, or None if there is none: the tests that need it are left out.
    """
    found = list(_all_tests(tally, law, min_visits))
    share = level / len(found)
    return [_result(name, row, outcome, where, n, share) for name, row, outcome, where, n in found]


def adjusted(results: list[TestResult]) -> list[float]:
    """Return Holm's adjusted p-values; a test that was not run has 1 and still counts."""
    p = np.array([1.0 if r.p_value is None else r.p_value for r in results])
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    values = np.empty(len(p))
    values[order] = np.minimum(1.0, steps)
    return [float(value) for value in values]


_Found = tuple[str, int | None, Outcome | None, str, int]


def _result(name: str, row: int | None, outcome: Outcome | None, where: str, n: int, share: float) -> TestResult:
    if outcome is None:
        return TestResult(name, row, None, n)
    return TestResult(
        name,
        row,
        outcome.p_value,
        outcome.n,
        outcome.df,
        outcome.statistic,
        where,
        outcome.observed,
        outcome.expected,
        None if outcome.df < 1 else detectable_tv(outcome.df, outcome.n, share),
    )


def _all_tests(tally: WalkTally, law: RuleLaw | None, min_visits: int) -> Iterator[_Found]:
    for row in tally.step.tree.active_rows:
        enough = tally.visits(row) >= min_visits
        yield from _node_tests(tally, row, enough)
        if law is not None and tally.step.tree.active_children(row):
            yield _outcome_test(tally, law, row, enough)
            yield _refused_test(tally, law, row, min_visits)
    if law is not None:
        yield from _walk_tests(tally, law)
    yield from _independence_tests(tally, min_visits)
    for group in tally.siblings:
        yield from _draft_tests(group)


def _node_tests(tally: WalkTally, row: int, enough: bool) -> Iterator[_Found]:
    n = tally.visits(row)
    for name, partition in (("node", token_cells), ("node bands", band_cells)):
        if enough:
            yield _against(name, row, tally.emitted(row), partition(tally.target[row], n))
        else:
            yield name, row, None, "", n


def _against(name: str, row: int, counts: Ints, cells: Cells) -> _Found:
    outcome = g_test(cells.count(counts), cells.law)
    return name, row, outcome, "" if outcome is None else cells.name(outcome.worst), int(counts.sum())


def _outcome_test(tally: WalkTally, law: RuleLaw, row: int, enough: bool) -> _Found:
    """Accepted (child, token) one by one while they expect enough, else per child; bonuses in bands."""
    n = tally.visits(row)
    if not enough:
        return "outcome", row, None, "", n
    counts, masses, names = [], [], []
    for child in tally.step.tree.active_children(row):
        cells = token_cells(_dense(law, child), n)
        counts.append(cells.count(tally.accepted[child]))
        masses.append(cells.law)
        names += [(f"child {child}, ", cells, cell) for cell in range(len(cells.law))]
    cells = band_cells(law.bonus[row], n)
    counts.append(cells.count(tally.bonus[row]))
    masses.append(cells.law)
    names += [("bonus, ", cells, cell) for cell in range(len(cells.law))]
    observed, expected = _pool_rare(np.concatenate(counts), np.concatenate(masses), n)
    outcome = g_test(observed, expected)
    if outcome is None:
        return "outcome", row, None, "", n
    what, cells, cell = names[outcome.worst]
    return "outcome", row, outcome, what + cells.name(cell), n


def _dense(law: RuleLaw, child: int) -> Floats:
    dense = np.zeros(law.bonus.shape[1])
    dense[law.child[child].tokens] = law.child[child].mass
    return dense


def _pool_rare(observed: Floats, mass: Floats, n: int) -> tuple[Floats, Floats]:
    """Add every cell that is possible but expects less than `MIN_EXPECTED` to the likeliest one; it keeps its place."""
    rare = (mass > 0) & (mass * n < MIN_EXPECTED)
    home = int(np.argmax(mass))
    counts, law = np.where(rare, 0.0, observed), np.where(rare, 0.0, mass)
    counts[home] += observed[rare].sum()
    law[home] += mass[rare].sum()
    return counts, law


def _refused_test(tally: WalkTally, law: RuleLaw, row: int, min_visits: int) -> _Found:
    n, total = int(tally.refused[row].sum()), float(law.bonus[row].sum())
    if n < min_visits or total <= 0:
        return "refused", row, None, "", n
    return _against("refused", row, tally.refused[row], token_cells(law.bonus[row] / total, n))


def _walk_tests(tally: WalkTally, law: RuleLaw) -> Iterator[_Found]:
    rows, reach, n = tally.step.tree.active_rows, law.reach, tally.walks
    counts, masses, names = [], [], []
    for row in rows:
        if not law.bonus[row].any():  # the clean rule never stops here: one impossible cell
            counts.append(np.array([float(tally.bonus[row].sum())]))
            masses.append(np.zeros(1))
        else:
            cells = band_cells(law.bonus[row], max(1, int(n * reach[row])))
            counts.append(cells.count(tally.bonus[row]))
            masses.append(cells.law * reach[row])
        names += [f"last row {row}, band {cell}" for cell in range(len(masses[-1]))]
    ends = np.array([each.sum() for each in counts]), np.array([each.sum() for each in masses])
    outcome = g_test(*_pool_rare(*ends, n))
    yield "last", None, outcome, f"last row {rows[outcome.worst]}" if outcome else "", n
    outcome = g_test(*_pool_rare(np.concatenate(counts), np.concatenate(masses), n))
    yield "joint", None, outcome, names[outcome.worst] if outcome else "", n


def _independence_tests(tally: WalkTally, min_visits: int) -> Iterator[_Found]:
    whole = {
        "lag last": tally.lag_last,
        "lag bonus": tally.lag_bonus,
        "lag bonus to last": tally.lag_mixed,
        "stream last": tally.stream_last,
        "stream bonus": tally.stream_bonus,
    }
    whole |= {f"lag {apart or 'half'} last": table for apart, table in zip(FAR, tally.far, strict=True)}
    for name, table in whole.items():
        yield _independent(name, None, table, min_visits)
    if tally.siblings:
        for row in tally.step.tree.active_rows[1:]:
            yield _independent("within", row, tally.within[row], min_visits)
        for group, table in zip(tally.siblings, tally.drafts, strict=False):
            yield _independent("drafts", group.parent, table, min_visits)


def _independent(name: str, row: int | None, table: Ints, min_visits: int) -> _Found:
    n = int(table.sum())
    outcome = independence_test(table) if n >= min_visits else None
    return name, row, outcome, f"cell {outcome.worst} of the merged table" if outcome else "", n


def _draft_tests(group: Sibling) -> Iterator[_Found]:
    """Drafts are drawn in every walk, visited or not."""
    n = int(group.first.sum())
    yield _draft_test("first", group, group.first, group.law, n)
    if len(group.children) > 1:
        rest = np.maximum(1 - group.law, np.finfo(float).tiny)
        pair = group.law[:, None] * group.law[None] / rest[:, None]
        np.fill_diagonal(pair, 0.0)
        yield _draft_test("second", group, group.pair.ravel(), pair.ravel(), int(group.pair.sum()))
    if len(group.children) > 2:
        yield _draft_test("third", group, group.third, draft_marginals(group.law, 3)[2], int(group.third.sum()))


def _draft_test(name: str, group: Sibling, counts: Ints, law: Floats, n: int) -> _Found:
    if not n:
        return name, group.parent, None, "", 0
    _, _, outcome, _, _ = _against(name, group.parent, counts, cells := token_cells(law, n))
    if outcome is None:
        return name, group.parent, None, "", n
    places = np.flatnonzero(cells.cell == outcome.worst)
    drawn = ", ".join(str(group.tokens[place]) for place in np.unravel_index(places[0], _shape(name, group)))
    return name, group.parent, outcome, f"token {drawn}" + (" and others" if len(places) > 1 else ""), n


def _shape(name: str, group: Sibling) -> tuple[int, ...]:
    size = len(group.tokens)
    return (size, size) if name == "second" else (size,)
