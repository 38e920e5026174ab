"""Counts of everything that the sampler's tests look at, gathered chunk by chunk; no walk is kept.

An *emission* at a visited row is the token of the accepted child or, where the walk ended, the bonus. Tokens are put
into four *classes* by where they lie on the cumulative law of their row, in order of token number: about the quarter
that an inverse-transform coin fell into, which is what shared or reused coins show up in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from audit.rule_law import Floats, Ints, draft_support
from lumotree.errors import InputError
from lumotree.select_types import Step, Walks

CLASSES = 4
FAR = (2, 32, 0)
"""Distances beyond the next walk: pairs of pairs, the lanes of a warp, and the two halves of a call."""


@dataclass(frozen=True)
class Violation:
    """An outcome that no number of draws excuses. row, token: where; count: how often so far."""

    what: str
    row: int
    token: int
    count: int

    def __str__(self) -> str:
        return f"{self.what}: token {self.token} at row {self.row}, {self.count} times"


@dataclass(frozen=True, eq=False)
class Sibling:
    """Draft counts below one parent: tokens [S] and law [S] of the first child; first, third [S]; pair [S, S]."""

    parent: int
    children: tuple[int, ...]
    tokens: Ints
    law: Floats
    place: NDArray[np.int16]
    quarter: NDArray[np.uint8]
    first: Ints
    pair: Ints
    third: Ints


@dataclass(eq=False)
class WalkTally:
    """Counts over all walks so far. Arrays [N, V] are int32: 4 bytes per row and token each, touched where counted.

    accepted[c]: tokens of row c where it was accepted; bonus[r], refused[r]: bonus tokens of walks that ended at r, all
    and those with a refused child. Tables: lag_* of consecutive walks, far[k] of walks FAR[k] apart in one stream (0 =
    half of the stream), stream_* of walks with one index in two streams,
    within[c] of the token of row c and the emission at row c, drafts[i] of the first children of parents i and i + 1.
    """

    step: Step
    walks: int = 0
    violations: list[Violation] = field(default_factory=list)

    def __post_init__(self) -> None:
        n, vocab = self.step.target.shape
        self.target: Floats = self.step.target.numpy()
        self.accepted = np.zeros((n, vocab), np.int32)
        self.bonus = np.zeros((n, vocab), np.int32)
        self.refused = np.zeros((n, vocab), np.int32)
        self.lag_last, self.stream_last = np.zeros((2, n, n), np.int64)
        self.far = np.zeros((len(FAR), n, n), np.int64)
        self.lag_bonus, self.stream_bonus = np.zeros((2, CLASSES, CLASSES), np.int64)
        self.lag_mixed = np.zeros((CLASSES, n), np.int64)
        self.within = np.zeros((n, CLASSES, CLASSES), np.int64)
        self.siblings = _siblings(self.step)
        self.drafts = np.zeros((max(0, len(self.siblings) - 1), CLASSES, CLASSES), np.int64)
        self._quarter = np.stack([quarters(row) for row in self.target])
        self._waiting: tuple[Ints, NDArray[np.uint8]] | None = None

    def emitted(self, row: int) -> Ints:
        """Return the counts [V] of the emissions at `row`."""
        children = list(self.step.tree.active_children(row))
        total: Ints = self.bonus[row] + self.accepted[children].sum(0, dtype=np.int64)
        return total

    def visits(self, row: int) -> int:
        """Return how many walks visited `row`."""
        return self.walks if row == 0 else int(self.accepted[row].sum(dtype=np.int64))

    def add(self, walks: Walks) -> None:
        """Count one stream of walks. An outcome outside the tree or the vocabulary is noted and its stream not counted.

        Raises InputError if the arrays do not fit each other or the tree.
        """
        last, bonus, refused, tokens = _arrays(walks, self.step)
        self.walks += len(last)
        if self._impossible(last, bonus, tokens):
            return
        self._check_refused(last, bonus, refused)
        self._count_tokens(last, bonus, refused, tokens)
        self._count_pairs(last, self._quarter[last, bonus])
        if self.siblings:
            self._count_rows(last, bonus, tokens)
            self._count_drafts(tokens)
        else:
            self._check_fixed(tokens)

    def note_zero_emissions(self) -> None:
        """Note every row at which a token of target probability zero was emitted."""
        for row in self.step.tree.active_rows:
            bad = np.where(self.target[row] == 0, self.emitted(row), 0)
            if bad.any():
                self._note("emitted with target probability zero", row, int(np.argmax(bad)), int(bad.sum()))

    def _note(self, what: str, row: int, token: int, count: int) -> None:
        """Keep one violation of a kind and row, the latest."""
        others = [known for known in self.violations if (known.what, known.row) != (what, row)]
        self.violations = [*others, Violation(what, row, token, count)]

    def _impossible(self, last: Ints, bonus: Ints, tokens: Ints) -> bool:
        n, vocab = self.target.shape
        live = np.zeros(n, np.bool_)
        live[list(self.step.tree.active_rows)] = True
        lost = (last < 0) | (last >= n) | ~live[np.clip(last, 0, n - 1)]
        outside = (bonus < 0) | (bonus >= vocab)
        foreign = ((tokens < 0) | (tokens >= vocab)) & live
        foreign[:, 0] = False
        for what, bad in (("walk ended outside the tree", lost), ("bonus outside the vocabulary", outside)):
            if bad.any():
                first = int(np.argmax(bad))
                self._note(what, int(last[first]), int(bonus[first]), int(bad.sum()))
        if foreign.any():
            first, row = np.argwhere(foreign)[0].tolist()
            self._note("draft outside the vocabulary", row, int(tokens[first, row]), int(foreign.sum()))
        return bool(lost.any() or outside.any() or foreign.any())

    def _check_refused(self, last: Ints, bonus: Ints, refused: NDArray[np.bool_]) -> None:
        """A walk that ends at a row has refused all of its children, if there are any: a flag that says otherwise would
        take walks away from the tests given a refusal."""
        inner = np.array([bool(self.step.tree.active_children(row)) for row in range(self.step.tree.n)])
        wrong = refused != inner[last]
        if wrong.any():
            first = int(np.argmax(wrong))
            what = "refused is true at a row without children" if refused[first] else "refused is false below refusals"
            self._note(what, int(last[first]), int(bonus[first]), int(wrong.sum()))

    def _check_fixed(self, tokens: Ints) -> None:
        for row in self.step.tree.active_rows[1:]:
            changed = tokens[:, row] != self.step.tree.tokens[row]
            if changed.any():
                self._note("fixed draft changed", row, int(tokens[int(np.argmax(changed)), row]), int(changed.sum()))

    def _count_tokens(self, last: Ints, bonus: Ints, refused: NDArray[np.bool_], tokens: Ints) -> None:
        vocab = self.target.shape[1]
        for counts, keep in ((self.bonus, slice(None)), (self.refused, refused)):
            where, number = np.unique(last[keep] * vocab + bonus[keep], return_counts=True)
            counts.reshape(-1)[where] += number.astype(np.int32)
        for row in self.step.tree.active_rows[1:]:
            visited = self.step.tree.ancestors[last, row]
            if self.step.laws is None:
                self.accepted[row, tokens[0, row]] += int(visited.sum())
            else:
                where, number = np.unique(tokens[visited, row], return_counts=True)
                self.accepted[row, where] += number.astype(np.int32)

    def _count_pairs(self, last: Ints, quarter: NDArray[np.uint8]) -> None:
        _cross(self.lag_last, last[:-1], last[1:])
        _cross(self.lag_bonus, quarter[:-1], quarter[1:])
        _cross(self.lag_mixed, quarter[:-1], last[1:])
        for table, distance in zip(self.far, FAR, strict=True):
            apart = distance or max(1, len(last) // 2)
            _cross(table, last[:-apart], last[apart:])
        if self._waiting is None:
            self._waiting = (last, quarter)
            return
        other_last, other_quarter = self._waiting
        size = min(len(last), len(other_last))
        _cross(self.stream_last, other_last[:size], last[:size])
        _cross(self.stream_bonus, other_quarter[:size], quarter[:size])
        self._waiting = None

    def _count_rows(self, last: Ints, bonus: Ints, tokens: Ints) -> None:
        tree = self.step.tree
        for row in tree.active_rows[1:]:
            emitted = np.where(last == row, bonus, -1)
            for child in tree.active_children(row):
                np.copyto(emitted, tokens[:, child], where=tree.ancestors[last, child])
            visited = np.flatnonzero(emitted >= 0)
            came = self._quarter[tree.parents[row], tokens[visited, row]]
            _cross(self.within[row], came, self._quarter[row, emitted[visited]])

    def _count_drafts(self, tokens: Ints) -> None:
        before = None
        for index, group in enumerate(self.siblings):
            places = [group.place[tokens[:, child]] for child in group.children]
            for child, place in zip(group.children, places, strict=True):
                self._note_drafts("drafted outside the declared law", child, tokens, place < 0)
            for i in range(1, len(places)):
                same = np.any([places[i] == earlier for earlier in places[:i]], axis=0)
                self._note_drafts("drafted again", group.children[i], tokens, same & (places[i] >= 0))
            _count_siblings(group, places)
            now = group.quarter[np.maximum(places[0], 0)]
            if before is not None:
                _cross(self.drafts[index - 1], before, now)
            before = now

    def _note_drafts(self, what: str, row: int, tokens: Ints, bad: NDArray[np.bool_]) -> None:
        if bad.any():
            self._note(what, row, int(tokens[int(np.argmax(bad)), row]), int(bad.sum()))


def quarters(law: Floats) -> NDArray[np.uint8]:
    """Return the class [V], 0..3, of each token: where its middle lies on the cumulative law."""
    middle = np.cumsum(law) - law / 2
    return np.clip(middle * CLASSES, 0, CLASSES - 1).astype(np.uint8)


def _siblings(step: Step) -> tuple[Sibling, ...]:
    if step.laws is None:
        return ()
    groups = []
    for parent in step.tree.active_rows:
        children = step.tree.active_children(parent)
        if not children:
            continue
        tokens, law = draft_support(step, parent)
        size = len(tokens)
        place = np.full(step.target.shape[1], -1, np.int16)
        place[tokens] = np.arange(size)
        pair = np.zeros((size, size) if len(children) > 1 else (0, 0), np.int64)
        first, third = np.zeros((2, size), np.int64)
        groups.append(Sibling(parent, children, tokens, law, place, quarters(law), first, pair, third))
    return tuple(groups)


def _count_siblings(group: Sibling, places: list[NDArray[np.int16]]) -> None:
    """Add to the counts of `group`; drafts outside the law are left out, being noted already."""
    size = len(group.tokens)
    known = places[0] >= 0
    group.first[:] += np.bincount(places[0][known], minlength=size)
    if len(places) > 1:
        known = known & (places[1] >= 0)
        _cross(group.pair, places[0][known].astype(np.int64), places[1][known].astype(np.int64))
    if len(places) > 2:
        group.third[:] += np.bincount(places[2][places[2] >= 0], minlength=size)


def _cross(table: Ints, rows: NDArray[np.integer], columns: NDArray[np.integer]) -> None:
    """Count each pair (row, column) into the table [R, C]."""
    flat = rows.astype(np.int64) * table.shape[1] + columns
    table += np.bincount(flat, minlength=table.size).reshape(table.shape)


def _arrays(walks: Walks, step: Step) -> tuple[Ints, Ints, NDArray[np.bool_], Ints]:
    last, bonus, refused = (x.detach().cpu().numpy() for x in (walks.last, walks.bonus, walks.refused))
    tokens = walks.tokens.detach().cpu().numpy()
    w, n = len(last), step.tree.n
    if last.shape != (w,) or bonus.shape != (w,) or refused.shape != (w,) or tokens.shape not in ((w, n), (1, n)):
        raise InputError(
            f"walks: expected last, bonus, refused [{w}] and tokens [{w}, {n}] or [1, {n}], got {list(last.shape)}, "
            f"{list(bonus.shape)}, {list(refused.shape)} and {list(tokens.shape)}"
        )
    if step.laws is not None:
        tokens = np.broadcast_to(tokens, (w, n))
    return last.astype(np.int64), bonus.astype(np.int64), refused.astype(np.bool_), tokens.astype(np.int64)
