"""Trees as a kernel's limits would bend them: right trees -> parents, and what a tree needs to be bent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lumotree.backends.batch import replan
from lumotree.backends.protocol import Batch
from lumotree.tree import Tree

#: A tree -> the parent of each row as a wrong kernel takes it.
Bend = Callable[[Tree], list[int]]


def trees_of(batch: Batch) -> list[Tree]:
    """The tree of each request that has rows."""
    cu = batch.cu_rows.tolist()
    parent, active = batch.parent.cpu().numpy(), batch.active.cpu().numpy()
    return [Tree.make(parent[a:b], active=active[a:b]) for a, b in itertools.pairwise(cu) if b > a]


def bent(bend: Bend) -> Callable[[Batch], Batch]:
    """The batch under bent parents; positions stay those of the right trees."""

    def change(batch: Batch) -> Batch:
        parents = [p for tree in trees_of(batch) for p in bend(tree)]
        wrong = replan(batch, torch.tensor(parents, dtype=torch.int32))
        return replace(wrong, position=batch.position)

    return change


def bends(bend: Bend) -> Callable[[Sequence[Tree]], bool]:
    """Whether one of the trees comes out different."""
    return lambda trees: any(bend(tree) != tree.parents.tolist() for tree in trees)


def row_ring(size: int) -> Bend:
    """The state of a row lies in place `row % size` until another row takes it."""

    def bend(tree: Tree) -> list[int]:
        found: list[int] = tree.parents.tolist()
        for row in tree.active_rows[1:]:
            held = [r for r in tree.active_rows if r < row and r % size == found[row] % size]
            found[row] = held[-1]
        return found

    return bend


def tile_edge(size: int) -> Bend:
    """The last row of every tile of a path leaves no state: its children start from its parent."""

    def bend(tree: Tree) -> list[int]:
        right: list[int] = tree.parents.tolist()
        edge = [int(d) % size == size - 1 for d in tree.depth]
        return [right[p] if p >= 0 and edge[p] and tree.active[row] else p for row, p in enumerate(right)]

    return bend


def cut_ring(size: int) -> Bend:
    """The buffer of cut states has `size` places: a branch reads the cut that took its cut's place."""

    def bend(tree: Tree) -> list[int]:
        found: list[int] = tree.parents.tolist()
        plan = tree.plan("many")
        cuts = list(plan.cuts)
        for path in plan.paths:
            if path.source in cuts:
                at = cuts.index(path.source)
                found[path.rows[0]] = [c for c in cuts[at::size] if c < path.rows[0]][-1]
        return found

    return bend


def third_level(tree: Tree) -> list[int]:
    """Paths of the third level and below start from the root's state."""
    found: list[int] = tree.parents.tolist()
    for level in tree.plan("many").levels[2:]:
        for path in level:
            found[path.rows[0]] = 0
    return found


def mask_word(size: int) -> Bend:
    """A row's mask of ancestors has `size` bits: of those numbered beyond, none is seen."""

    def bend(tree: Tree) -> list[int]:
        right: list[int] = tree.parents.tolist()

        def seen(row: int) -> int:
            while row >= size:
                row = right[row]
            return row

        return [seen(p) if tree.active[row] else p for row, p in enumerate(right)]

    return bend


def path_heads(tree: Tree) -> list[int]:
    """The first row of each row's path in the plan; a row on no path is its own."""
    found = list(range(tree.n))
    for path in tree.plan("many").paths:
        for row in path.rows:
            found[row] = path.rows[0]
    return found


def hidden_by(before: Tree, tree: Tree) -> list[int]:
    """Active rows that the mask of the tree before takes for inactive."""
    return [row for row in tree.active_rows if row < before.n and not before.active[row]]


def depths(batch: Batch) -> Tensor:
    """Depth of each row of a batch."""
    return batch.position - batch.prefix_len[batch.row_request.long()]
