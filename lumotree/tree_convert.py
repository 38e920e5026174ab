"""Other notations of a tree, both ways.

    notation               to                   from                 topology kept
    parent array           tree.parents         Tree.make            all
    ancestor mask          tree.ancestors       from_ancestor_mask   all
    packed ancestor words  tree.ancestor_words  from_ancestor_words  all
    sibling links          sibling_links(tree)  from_sibling_links   all
    choice paths           to_choices(tree)     from_choices         shape; rows are renumbered, see below

No notation holds anything but topology: tokens, active, probs, slots, prefix_len and vocab do not survive and
are passed again by keyword, e.g. `from_ancestor_mask(tree.ancestors, **tree.fields()) == tree`. Choice paths
number rows by (depth, path), so fields in the old row order do not fit unless the tree was numbered so
already. Malformed input raises TreeError.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lumotree import tree_validate as check
from lumotree.errors import TreeError
from lumotree.tree import Tree, TreeFields

Choice = tuple[int, ...]


def from_ancestor_mask(mask: ArrayLike, **fields: Unpack[TreeFields]) -> Tree:
    """Make a tree from a dense mask, bool or 0/1 [N, N]: row r sees column c iff c is r or an ancestor of r.

    The mask must be reflexive, never look forward, be transitive, and see one chain of ancestors from each
    row. Columns of the committed prefix must be cut off first. Raises TreeError naming the rows at fault.
    """
    array = _matrix("ancestor mask", mask, "biu")
    n = len(array)
    if array.shape[1] != n:
        raise TreeError(f"ancestor mask must be square [N, N], got {list(array.shape)}; cut prefix columns off")
    if array.dtype.kind != "b" and not np.isin(array, (0, 1)).all():
        raise TreeError("ancestor mask must hold booleans or 0 and 1 only")
    sees: NDArray[np.bool_] = array.astype(np.bool_)
    if (row := check.first(~sees.diagonal())) is not None:
        raise TreeError(f"mask is not reflexive: row {row} does not see itself")
    if (row := check.first(np.triu(sees, 1).any(axis=1))) is not None:
        seen = row + 1 + int(np.argmax(sees[row, row + 1 :]))
        raise TreeError(f"mask looks forward: row {row} sees row {seen}; allowed: itself and earlier rows")
    return Tree.make([_parent_in_mask(sees, row) for row in range(n)], **fields)


def _parent_in_mask(sees: NDArray[np.bool_], row: int) -> int:
    """Return the last strict ancestor of `row`; the row must see exactly what that one sees, and itself."""
    strict = np.flatnonzero(sees[row, :row])
    if strict.size == 0:
        return -1
    parent = int(strict[-1])
    if (hidden := check.first(sees[parent, :row] & ~sees[row, :row])) is not None:
        raise TreeError(
            f"mask is not transitive: row {row} sees row {parent} but not row {hidden}, which row {parent} sees"
        )
    if (other := check.first(sees[row, :row] & ~sees[parent, :row])) is not None:
        raise TreeError(
            f"ancestors are not a chain: row {row} sees rows {other} and {parent}, but row {parent} does not "
            f"see row {other}"
        )
    return parent


def from_ancestor_words(words: ArrayLike, **fields: Unpack[TreeFields]) -> Tree:
    """Make a tree from packed ancestors [N, ceil(N/64)], laid out as `Tree.ancestor_words`; uint64 or int64.

    Raises TreeError for another shape or dtype, a bit beyond column N-1, or a mask that is not a tree's.
    """
    array = _matrix("ancestor words", words, "iu")
    n, width = array.shape
    if array.dtype.itemsize != 8:
        raise TreeError(f"wrong dtype: ancestor words must be uint64 or int64, got {array.dtype}")
    if width != -(-n // 64):
        raise TreeError(f"ancestor words of {n} rows must be [{n}, {-(-n // 64)}], got {list(array.shape)}")
    octets = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).view(np.uint8)
    bits = np.unpackbits(octets, axis=1, bitorder="little").astype(np.bool_)
    if (row := check.first(bits[:, n:].any(axis=1))) is not None:
        column = n + int(np.argmax(bits[row, n:]))
        raise TreeError(f"ancestor words: row {row} sees column {column}; allowed: 0..{n - 1}, unused bits 0")
    return from_ancestor_mask(bits[:, :n], **fields)


def _matrix(name: str, values: ArrayLike, kinds: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise TreeError(f"{name} cannot be read as an array: {cause}") from cause
    if array.size == 0:
        raise TreeError(f"empty tree: the {name} has shape {list(array.shape)}")
    if array.ndim != 2:
        raise TreeError(f"{name} must be two-dimensional, got shape {list(array.shape)}")
    if array.dtype.kind not in kinds:
        raise TreeError(f"wrong dtype: {name} cannot hold {array.dtype}")
    return array


class SiblingLinks(NamedTuple):
    """int64 [N] each, -1 = none; sglang's retrieve_next_token and retrieve_next_sibling of one request."""

    first_child: NDArray[np.int64]
    next_sibling: NDArray[np.int64]


def sibling_links(tree: Tree, active_only: bool = False) -> SiblingLinks:
    """Return the links of a tree, siblings ascending.

    With `active_only` inactive rows are left unlinked, so that a walk never meets them; such links do not
    convert back unless every row is active.
    """
    links = SiblingLinks(np.full(tree.n, -1, np.int64), np.full(tree.n, -1, np.int64))
    for row in range(tree.n):
        group = tree.active_children(row) if active_only and tree.active[row] else tree.children(row)
        if not group or (active_only and not tree.active[row]):
            continue
        links.first_child[row] = group[0]
        links.next_sibling[list(group[:-1])] = group[1:]
    return links


def from_sibling_links(first_child: ArrayLike, next_sibling: ArrayLike, **fields: Unpack[TreeFields]) -> Tree:
    """Make a tree from its sibling links, integers [N] each, -1 = none.

    Each row but row 0 must be linked exactly once, from an earlier row (parents before children, siblings
    ascending, because `Tree` orders siblings by row number). Raises TreeError naming the link at fault.
    """
    first = check.vector("first_child", first_child, "iu", np.int64)
    n = len(first)
    following = check.vector("next_sibling", next_sibling, "iu", np.int64, n)
    parents = np.full(n, -1, np.int64)
    linked_by: dict[int, int] = {}
    for row in range(n):  # every link leads forward, so a row's parent is known before its own links are read
        for name, target in (("first_child", int(first[row])), ("next_sibling", int(following[row]))):
            if target == -1:
                continue
            _check_link(name, row, target, n, linked_by)
            linked_by[target] = row
            parents[target] = row if name == "first_child" else parents[row]
    if (lost := check.first(np.array([row > 0 and row not in linked_by for row in range(n)]))) is not None:
        raise TreeError(f"unreachable row: no link leads to row {lost}; every row but row 0 needs one")
    return Tree.make(parents, **fields)


def _check_link(name: str, row: int, target: int, n: int, linked_by: dict[int, int]) -> None:
    if row == 0 and name == "next_sibling":
        raise TreeError(f"the root has a sibling: next_sibling of row 0 is {target}; allowed: -1")
    if not 0 <= target < n:
        raise TreeError(f"link out of range: {name} of row {row} is {target}; allowed: -1 or up to {n - 1}")
    if target <= row:
        raise TreeError(f"link leads backward: {name} of row {row} is {target}; allowed: -1 or a later row")
    if target in linked_by:
        raise TreeError(f"row linked twice: rows {linked_by[target]} and {row} both link to row {target}")


def to_choices(tree: Tree, active_only: bool = False) -> list[list[int]]:
    """Return the choice paths of EAGLE and Medusa configurations, one for each row but row 0, in row order.

    A path is the list of child indices from the root, which is implicit: [[0], [1], [0, 0]]. With
    `active_only` inactive rows are left out and do not count among their siblings.
    """
    choice: dict[int, list[int]] = {0: []}
    for row in tree.active_rows if active_only else range(tree.n):
        group = tree.active_children(row) if active_only else tree.children(row)
        choice.update({child: [*choice[row], index] for index, child in enumerate(group)})
    return [choice[row] for row in sorted(choice) if row]


def from_choices(choices: Iterable[Sequence[int]], close_gaps: bool = False, **fields: Unpack[TreeFields]) -> Tree:
    """Make a tree from choice paths in any order; rows are numbered by (depth, path), as Medusa does.

    Every prefix of a path must be present. `Tree` keeps the order of siblings, not their draft ranks, so
    sibling indices must be 0, 1, 2, ... unless `close_gaps` allows ranks to be skipped, which loses them.
    Raises TreeError for an empty or repeated path, a negative or non-integer index, a missing prefix or a
    gap.
    """
    paths = [_as_choice(choice) for choice in choices]
    row_of: dict[Choice, int] = {(): 0}
    for path in sorted(paths, key=lambda path: (len(path), path)):
        if path in row_of:
            raise TreeError(f"repeated choice: {list(path)} appears twice")
        if path[:-1] not in row_of:
            raise TreeError(f"missing prefix: choice {list(path)} needs {list(path[:-1])}, which is missing")
        if not close_gaps and path[-1] > 0 and (*path[:-1], path[-1] - 1) not in row_of:
            raise TreeError(
                f"gap among siblings: choice {list(path)} needs {[*path[:-1], path[-1] - 1]}; add it, "
                f"renumber, or pass close_gaps=True"
            )
        row_of[path] = len(row_of)
    return Tree.make([-1, *(row_of[path[:-1]] for path in row_of if path)], **fields)


def _as_choice(choice: Sequence[int]) -> Choice:
    try:
        path = tuple(operator.index(index) for index in choice)
    except TypeError as cause:
        raise TreeError(f"a choice is a list of child indices such as [0, 1], got {choice!r}") from cause
    if not path:
        raise TreeError("empty choice: the root is implicit and must not be listed")
    if min(path) < 0:
        raise TreeError(f"negative index in choice {list(path)}; allowed: 0 or more")
    return path
