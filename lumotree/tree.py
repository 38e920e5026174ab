"""`Tree`: the one topology descriptor of the toolkit.

A *row* is a logical node, numbered parents first; a *slot* is the physical place a row's data lives in. Row 0
is the pending token. Named trees are in `tree_named`, other notations in `tree_convert`, path plans in
`tree_plan`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lumotree import tree_validate as check
from lumotree.errors import PathError, TreeError
from lumotree.tree_plan import PathPlan, PlanLevels, make_plan

_Array = TypeVar("_Array", bound=NDArray[Any])


class TreeFields(TypedDict, total=False):
    """The keyword arguments of `Tree.make` other than `parents`."""

    tokens: ArrayLike | None
    active: ArrayLike | None
    probs: ArrayLike | None
    slots: ArrayLike | None
    num_slots: int | None
    prefix_len: int
    vocab: int | None
    max_rows: int | None


@dataclass(frozen=True, eq=False, repr=False)
class Tree:
    """A candidate tree of N physical rows, validated when made; arrays are private read-only copies.

    parents     int32 [N], -1 for row 0, otherwise an earlier row
    tokens      int64 [N], in 0..vocab-1 (any non-negative if `vocab` is None)
    active      bool [N]; inactive rows are padding, and so is everything below one
    probs       float64 [N] proposal probability of each row in [0, 1], or None
    slots       int64 [N], physical slot of each row, all different, in 0..num_slots-1
    prefix_len  tokens committed before row 0

    Use `Tree.make` for defaults. Trees compare by value. Raises TreeError naming the row at fault.
    """

    parents: NDArray[np.int32]
    tokens: NDArray[np.int64]
    active: NDArray[np.bool_]
    probs: NDArray[np.float64] | None
    slots: NDArray[np.int64]
    num_slots: int
    prefix_len: int = 0
    vocab: int | None = None

    def __post_init__(self) -> None:
        parents = check.vector("parents", self.parents, "iu", np.int64)
        check.check_parents(parents)
        n = len(parents)
        self._store("parents", parents.astype(np.int32))
        self._store("active", check.vector("active", self.active, "b", np.bool_, n))
        check.check_active(self.active, parents)
        self._check_vocab_and_tokens(n)
        if self.probs is not None:
            self._store("probs", check.vector("probs", self.probs, "fiu", np.float64, n))
            check.check_probs(self.probs)
        self._store("slots", check.vector("slots", self.slots, "iu", np.int64, n))
        object.__setattr__(self, "num_slots", check.integer("num_slots", self.num_slots, 0))
        check.check_slots(self.slots, self.num_slots)
        object.__setattr__(self, "prefix_len", check.integer("prefix_len", self.prefix_len, 0))

    def _check_vocab_and_tokens(self, n: int) -> None:
        if self.vocab is not None:
            object.__setattr__(self, "vocab", check.integer("vocab", self.vocab, 1))
        self._store("tokens", check.vector("tokens", self.tokens, "iu", np.int64, n))
        check.check_tokens(self.tokens, self.vocab)

    def _store(self, name: str, array: NDArray[Any]) -> None:
        object.__setattr__(self, name, _frozen(array))

    @classmethod
    def make(
        cls,
        parents: ArrayLike,
        tokens: ArrayLike | None = None,
        active: ArrayLike | None = None,
        probs: ArrayLike | None = None,
        slots: ArrayLike | None = None,
        num_slots: int | None = None,
        prefix_len: int = 0,
        vocab: int | None = None,
        max_rows: int | None = None,
    ) -> Tree:
        """Make a tree from its parents [N].

        Defaults: `tokens` = row number (modulo `vocab`), all rows active, no probabilities, `slots` = row
        number, `num_slots` = largest slot + 1. `max_rows` refuses a larger tree and is not kept. Raises
        TreeError.
        """
        parents = check.vector("parents", parents, "iu", np.int64)
        n = len(parents)
        if max_rows is not None and n > check.integer("max_rows", max_rows, 1):
            raise TreeError(f"too many rows: the tree has {n} rows; allowed: at most {max_rows}")
        vocab = vocab if vocab is None else check.integer("vocab", vocab, 1)
        slots = check.vector("slots", np.arange(n) if slots is None else slots, "iu", np.int64, n)
        return cls(
            parents=parents,
            tokens=np.arange(n) % (vocab or n) if tokens is None else tokens,  # type: ignore[arg-type]
            active=np.ones(n, np.bool_) if active is None else active,  # type: ignore[arg-type]
            probs=probs,  # type: ignore[arg-type]
            slots=slots,
            num_slots=max(int(slots.max()) + 1, 0) if num_slots is None else num_slots,
            prefix_len=prefix_len,
            vocab=vocab,
        )

    def fields(self) -> TreeFields:
        """Return everything but the topology: `Tree.make(tree.parents, **tree.fields()) == tree`."""
        return TreeFields(
            tokens=self.tokens,
            active=self.active,
            probs=self.probs,
            slots=self.slots,
            num_slots=self.num_slots,
            prefix_len=self.prefix_len,
            vocab=self.vocab,
        )

    @property
    def n(self) -> int:
        """Number of physical rows N, inactive ones included."""
        return len(self.parents)

    # Depth, position, ancestry

    @cached_property
    def depth(self) -> NDArray[np.int32]:
        """int32 [N]: edges between a row and row 0."""
        depth = np.zeros(self.n, np.int32)
        for row in range(1, self.n):
            depth[row] = depth[self.parents[row]] + 1
        return _frozen(depth)

    @cached_property
    def position(self) -> NDArray[np.int64]:
        """int64 [N]: sequence position, prefix_len + depth. Never derived from a slot."""
        return _frozen(self.prefix_len + self.depth.astype(np.int64))

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest active row."""
        return int(self.depth[self.active].max())

    @cached_property
    def ancestors(self) -> NDArray[np.bool_]:
        """bool [N, N]: row r sees column c iff c is r or an ancestor of r (also for inactive rows)."""
        mask = np.eye(self.n, dtype=np.bool_)
        for row in range(1, self.n):
            mask[row] |= mask[self.parents[row]]
        return _frozen(mask)

    @cached_property
    def ancestor_words(self) -> NDArray[np.uint64]:
        """uint64 [N, ceil(N/64)]: `ancestors`, column c at bit c % 64 of word c // 64; unused bits are 0."""
        padded = np.zeros((self.n, -(-self.n // 64) * 64), np.bool_)
        padded[:, : self.n] = self.ancestors
        return _frozen(np.packbits(padded, axis=1, bitorder="little").view("<u8").astype(np.uint64))

    # Children, leaves, paths

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in range(self.n)]
        for row in range(1, self.n):
            children[self.parents[row]].append(row)
        return tuple(map(tuple, children))

    @cached_property
    def _active_children(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(child for child in group if self.active[child]) for group in self._children)

    def children(self, row: int) -> tuple[int, ...]:
        """Return all children of `row`, ascending. Raises TreeError if there is no such row."""
        return self._children[self._known(row)]

    def active_children(self, row: int) -> tuple[int, ...]:
        """Return the active children of `row`, ascending. Raises TreeError if there is no such row."""
        return self._active_children[self._known(row)]

    @cached_property
    def active_rows(self) -> tuple[int, ...]:
        """The active rows, ascending; row 0 is always one."""
        return tuple(np.flatnonzero(self.active).tolist())

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The active rows without an active child, ascending."""
        return tuple(row for row in self.active_rows if not self._active_children[row])

    def path(self, row: int) -> tuple[int, ...]:
        """Return the rows from row 0 to `row`, both included; `row` may be inactive. Raises TreeError."""
        rows = [self._known(row)]
        while rows[-1]:
            rows.append(int(self.parents[rows[-1]]))
        return tuple(reversed(rows))

    @cached_property
    def _paths(self) -> Mapping[int, tuple[int, ...]]:
        return MappingProxyType({row: self.path(row) for row in self.active_rows})

    def paths(self) -> Mapping[int, tuple[int, ...]]:
        """Return the read-only map from each active row to `path(row)`: every path that can be accepted."""
        return self._paths

    def is_path(self, rows: Iterable[int]) -> bool:
        """Tell whether `rows` is a non-empty accepted path of this tree."""
        try:
            self.check_path(rows)
        except PathError:
            return False
        return True

    def check_path(self, rows: Iterable[int], max_len: int | None = None, allow_empty: bool = False) -> tuple[int, ...]:
        """Return `rows` as a tuple of ints if it is an accepted path: row 0 first, parent-linked, all active.

        Raises PathError naming the step at fault, also for a path longer than `max_len` or one that is empty
        and not allowed to be.
        """
        path = _as_rows(rows)
        if not path and not allow_empty:
            raise PathError("empty path: row 0 is always accepted; allowed only for a backend that declares it")
        if max_len is not None and len(path) > max_len:
            raise PathError(f"path too long: it has {len(path)} rows; allowed: at most {max_len}")
        for step, row in enumerate(path):
            self._check_step(path, step, row)
        return path

    def _check_step(self, path: tuple[int, ...], step: int, row: int) -> None:
        if not 0 <= row < self.n:
            raise PathError(f"row out of range: step {step} is row {row}; allowed: 0..{self.n - 1}")
        if not self.active[row]:
            raise PathError(f"inactive row: step {step} is row {row}, which is padding")
        if step == 0 and row != 0:
            raise PathError(f"path does not start at row 0: step 0 is row {row}")
        if step and self.parents[row] != path[step - 1]:
            raise PathError(
                f"path is not parent-linked: step {step} is row {row}, whose parent is {self.parents[row]}, "
                f"after row {path[step - 1]}"
            )

    # Slots

    @cached_property
    def logical_from_physical(self) -> NDArray[np.int64]:
        """int64 [num_slots]: the row in each slot, -1 for a free one."""
        rows = np.full(self.num_slots, -1, np.int64)
        rows[self.slots] = np.arange(self.n)
        return _frozen(rows)

    @property
    def physical_from_logical(self) -> NDArray[np.int64]:
        """int64 [N]: the slot of each row; another name for `slots`."""
        return self.slots

    @cached_property
    def free_slots(self) -> tuple[int, ...]:
        """The slots that hold no row, ascending."""
        return tuple(np.flatnonzero(self.logical_from_physical == -1).tolist())

    def slot_of_row(self, row: int) -> int:
        """Return the physical slot of `row`. Raises TreeError if there is no such row."""
        return int(self.slots[self._known(row)])

    def row_of_slot(self, slot: int) -> int:
        """Return the row in `slot`, -1 if it is free. Raises TreeError if there is no such slot."""
        if check.integer("slot", slot, 0) >= self.num_slots:
            raise TreeError(f"no slot {slot}; allowed: 0..{self.num_slots - 1}")
        return int(self.logical_from_physical[slot])

    # Plans

    def plan(self, levels: PlanLevels = "many") -> PathPlan:
        """Return the path plan over the active rows; see `tree_plan.make_plan`. Raises TreeError."""
        if levels not in self._plans:
            to_leaves = [self.path(leaf) for leaf in self.leaves]
            self._plans[levels] = make_plan(self._active_children, to_leaves, levels)
        return self._plans[levels]

    @cached_property
    def _plans(self) -> dict[str, PathPlan]:
        return {}

    # Value semantics

    def _known(self, row: int) -> int:
        number = check.integer("row", row, 0)
        if number >= self.n:
            raise TreeError(f"no row {number}; allowed: 0..{self.n - 1}")
        return number

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in self._values())

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Tree) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tree, self._values()  # plain pickling would bring the arrays back writeable

    def __repr__(self) -> str:
        """The expression that makes this tree, fields at their default left out."""
        default: dict[str, Any] = dict(Tree.make(self.parents, slots=self.slots, vocab=self.vocab).fields())
        default.update(slots=np.arange(self.n), vocab=None)
        parts = [repr(self.parents.tolist())]
        for name, value in self.fields().items():
            if not np.array_equal(value, default[name]):  # type: ignore[arg-type]
                parts.append(f"{name}={value.tolist() if isinstance(value, np.ndarray) else value!r}")
        return f"Tree.make({', '.join(parts)})"


def _frozen(array: _Array) -> _Array:
    array.flags.writeable = False
    return array


def _as_rows(rows: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(row) for row in rows)
    except TypeError as cause:
        raise PathError(f"a path is a sequence of integer rows, got {rows!r}") from cause
