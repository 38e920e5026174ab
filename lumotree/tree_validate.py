"""What makes a tree descriptor well-formed. Every refusal is a `TreeError` with a message of its own.

The functions take plain arrays, so that `Tree` and the conversions can share them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lumotree.errors import TreeError

_KINDS = {"iu": "integers", "b": "booleans", "fiu": "real numbers"}
_INT64_MAX = np.iinfo(np.int64).max


def vector(name: str, values: ArrayLike, kinds: str, dtype: type[np.generic], rows: int | None = None) -> NDArray[Any]:
    """Return `values` as a fresh one-dimensional array of `dtype`.

    `kinds` are the numpy kinds accepted: nothing is cast silently (a float parent is a caller's mistake,
    not a row number). `rows` is the length demanded, None for any length but zero.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise TreeError(f"{name} cannot be read as an array: {cause}") from cause
    if array.ndim != 1:
        raise TreeError(f"{name} must be one-dimensional [N], got shape {list(array.shape)}")
    if rows is None and array.size == 0:
        raise TreeError("empty tree: a tree has at least its root, row 0 with parent -1")
    if rows is not None and array.size != rows:
        raise TreeError(f"wrong length: {name} has {array.size} entries, the tree has {rows} rows")
    if array.dtype.kind not in kinds:
        raise TreeError(f"wrong dtype: {name} must hold {_KINDS[kinds]}, got {array.dtype}")
    if array.dtype.kind == "u" and int(array.max()) > _INT64_MAX:
        raise TreeError(f"{name}: row {int(array.argmax())} holds {array.max()}, which does not fit in int64")
    return array.astype(dtype)


def integer(name: str, value: object, minimum: int) -> int:
    """Return `value` as an int of at least `minimum`; a bool or a float is refused."""
    if isinstance(value, (bool, np.bool_)):
        raise TreeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError as cause:
        raise TreeError(f"{name} must be an integer, got {value!r}") from cause
    if number < minimum:
        raise TreeError(f"{name} must be at least {minimum}, got {number}")
    return number


def first(bad: ArrayLike) -> int | None:
    """Return the first row flagged in `bad`, None if there is none."""
    rows = np.flatnonzero(bad)
    return int(rows[0]) if rows.size else None


def check_parents(parents: NDArray[np.int64]) -> None:
    """Refuse parents that are not a tree rooted at row 0 with every parent before its children."""
    n, rows = len(parents), np.arange(len(parents))
    if (row := first((parents < -1) | (parents >= n))) is not None:
        allowed = f"-1 (row 0 only) or an earlier row, 0..{row - 1}" if row else "-1"
        raise TreeError(f"missing parent: row {row} names parent {parents[row]}; allowed: {allowed}")
    if (row := first(parents == rows)) is not None:
        raise TreeError(f"self parent: row {row} names parent {row}; allowed: an earlier row (row 0: -1)")
    forward = first(parents > rows)
    if forward is not None and (loop := _find_cycle(parents.tolist())):
        chain = " -> ".join(map(str, [*loop, loop[0]]))
        raise TreeError(f"cycle: rows {chain} (each names the next as parent); allowed: only ways back to row 0")
    _check_root(np.flatnonzero(parents == -1).tolist())
    if forward is not None:
        raise TreeError(
            f"forward parent: row {forward} names parent {parents[forward]}, which comes after it; "
            f"allowed: an earlier row, 0..{forward - 1}"
        )


def _check_root(roots: Sequence[int]) -> None:
    if len(roots) > 1:
        raise TreeError(f"two roots: rows {roots[0]} and {roots[1]} both have parent -1; allowed: row 0 only")
    if roots[0] != 0:
        raise TreeError(f"root not row 0: row {roots[0]} has parent -1; the pending token must be row 0")


def _find_cycle(parents: Sequence[int]) -> list[int]:
    """Return the rows of one cycle, smallest row first, or [] if every row leads to a root."""
    done: set[int] = set()
    for start in range(len(parents)):
        walk: list[int] = []
        seen: set[int] = set()
        row = start
        while row != -1 and row not in done and row not in seen:
            seen.add(row)
            walk.append(row)
            row = parents[row]
        if row in seen:
            loop = walk[walk.index(row) :]
            pivot = loop.index(min(loop))
            return loop[pivot:] + loop[:pivot]
        done |= seen
    return []


def check_active(active: NDArray[np.bool_], parents: NDArray[np.int64]) -> None:
    """Refuse an inactive root and an active row under an inactive one (`parents` already checked)."""
    if not active[0]:
        raise TreeError("inactive root: row 0 has active False; it is always accepted, allowed: True")
    above = active[np.maximum(parents, 0)]  # the root, known to be active, stands in for its own parent
    if (row := first(active & ~above)) is not None:
        raise TreeError(
            f"active row under an inactive one: row {row} is active, its parent {parents[row]} is not; "
            f"allowed: deactivate row {row} too, or activate row {parents[row]}"
        )


def check_tokens(tokens: NDArray[np.int64], vocab: int | None) -> None:
    """Refuse negative tokens and, with a `vocab`, tokens that are not below it."""
    bad = tokens < 0 if vocab is None else (tokens < 0) | (tokens >= vocab)
    if (row := first(bad)) is not None:
        allowed = "0 or more" if vocab is None else f"0..{vocab - 1}"
        raise TreeError(f"token out of range: row {row} has token {tokens[row]}; allowed: {allowed}")


def check_probs(probs: NDArray[np.float64]) -> None:
    """Refuse proposal probabilities that are NaN, infinite or outside [0, 1]."""
    if (row := first(np.isnan(probs))) is not None:
        raise TreeError(f"probability is NaN: row {row} has probability nan; allowed: 0..1")
    if (row := first((probs < 0) | (probs > 1))) is not None:
        raise TreeError(f"probability out of range: row {row} has probability {probs[row]}; allowed: 0..1")


def check_slots(slots: NDArray[np.int64], num_slots: int) -> None:
    """Refuse two rows in one slot and slots outside 0..num_slots-1."""
    if (row := first((slots < 0) | (slots >= num_slots))) is not None:
        last = max(num_slots - 1, 0)
        raise TreeError(f"slot out of range: row {row} has slot {slots[row]}; allowed: 0..{last}")
    order = np.argsort(slots, kind="stable")
    if (at := first(np.diff(slots[order]) == 0)) is not None:
        one, two = int(order[at]), int(order[at + 1])
        raise TreeError(f"duplicate slot: rows {one} and {two} both have slot {slots[one]}; allowed: one row each")
