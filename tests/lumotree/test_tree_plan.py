"""Path plans: coverage, dependencies, the published decomposition, the bound on levels."""

import numpy as np
import pytest
from hypothesis import given, settings

from lumotree.errors import TreeError
from lumotree.strategies import trees
from lumotree.tree import Tree
from lumotree.tree_named import chain, comb, hydra27, random_tree, star
from lumotree.tree_plan import Path, PathPlan

quick = settings(max_examples=80, derandomize=True, deadline=None)


def levels_by_recursion(tree, row, source, level, out):
    """The rule as written, top down from one start, with heights measured by plain recursion."""

    def kids(r):
        return [c for c in range(tree.n) if tree.parents[c] == r and tree.active[c]]

    def height(r):
        return 1 + max(map(height, kids(r)), default=0)

    spine = [row]
    while kids(spine[-1]):
        tallest = max(map(height, kids(spine[-1])))
        spine.append(next(c for c in kids(spine[-1]) if height(c) == tallest))
    branching = [at for at, r in enumerate(spine) if len(kids(r)) >= 2]
    rows = spine[: branching[-1] + 1] if branching else spine
    out.setdefault(level, set()).add((source, tuple(rows)))
    for r in rows:
        for child in kids(r):
            if child not in rows:
                levels_by_recursion(tree, child, r, level + 1, out)
    return out


@quick
@given(trees())
def test_many_levels_follow_the_written_rule(tree):
    expected = levels_by_recursion(tree, 0, -1, 0, {})
    plan = tree.plan("many")
    assert [{(p.source, p.rows) for p in level} for level in plan.levels] == [
        expected[level] for level in sorted(expected)
    ]


@quick
@given(trees())
def test_many_levels_cover_each_active_row_once_after_its_source(tree):
    plan = tree.plan()
    assert sorted(row for path in plan.paths for row in path.rows) == list(tree.active_rows)
    assert plan.num_rows == len(tree.active_rows)
    done = {-1}
    for level in plan.levels:
        for path in level:
            assert path.source in done
            assert [int(tree.parents[row]) for row in path.rows] == [path.source, *path.rows[:-1]]
        done |= {row for path in level for row in path.rows}
    assert plan.cuts == tuple(sorted({path.source for path in plan.paths} - {-1}))
    assert len(plan.levels) <= PathPlan.max_levels_bound(len(tree.active_rows))


@quick
@given(trees())
def test_one_level_holds_each_leaf_path_whole(tree):
    plan = tree.plan("one")
    assert plan.levels == (tuple(Path(-1, tree.path(leaf)) for leaf in tree.leaves),)
    assert plan.cuts == ()
    assert {row for path in plan.paths for row in path.rows} == set(tree.active_rows)


def test_hydra27_has_its_published_decomposition():
    plan = hydra27().plan()
    assert plan.levels[0] == (Path(-1, (0, 1, 4, 9, 14)),)
    assert plan.cuts == (0, 1, 4, 9, 14)
    assert len(plan.levels) == 2
    assert plan.levels[1] == (
        Path(0, (2, 7, 12, 17, 22)),
        Path(0, (3, 8, 13)),
        Path(1, (5,)),
        Path(1, (6,)),
        Path(4, (10,)),
        Path(4, (11,)),
        Path(9, (15,)),
        Path(9, (16,)),
        Path(14, (19, 24, 26, 28, 29, 30, 31)),
        Path(14, (20,)),
        Path(14, (21,)),
    )


def test_a_chain_is_one_path_and_a_star_cuts_only_its_root():
    assert chain(5).plan().levels == ((Path(-1, (0, 1, 2, 3, 4)),),)
    plan = star(4).plan()
    assert plan.levels == ((Path(-1, (0,)),), (Path(0, (1,)), Path(0, (2,)), Path(0, (3,))))
    assert comb(4).plan().levels[0] == (Path(-1, (0, 2, 4)),)


def test_ties_go_to_the_first_child():
    assert Tree.make([-1, 0, 0, 1, 1, 2, 2]).plan().levels[0] == (Path(-1, (0, 1)),)


def test_inactive_rows_neither_branch_nor_deepen():
    tree = Tree.make([-1, 0, 0, 1, 3], active=[True, True, True, False, False])
    assert tree.plan().levels == ((Path(-1, (0,)),), (Path(0, (1,)), Path(0, (2,))))


def smallest_with_levels(count):
    """A tree of count(count+1)/2 rows: a root, a chain of count-1 rows first, the next smaller such tree second."""
    if count == 1:
        return [-1]
    light = smallest_with_levels(count - 1)
    heavy = list(range(count - 1))
    return [-1, *heavy, 0, *(parent + count for parent in light[1:])]


@pytest.mark.parametrize("count", range(1, 8))
def test_the_bound_on_levels_is_reached_and_no_smaller_tree_needs_as_many(count):
    tree = Tree.make(smallest_with_levels(count))
    assert tree.n == count * (count + 1) // 2
    assert len(tree.plan().levels) == count == PathPlan.max_levels_bound(tree.n)
    assert PathPlan.max_levels_bound(tree.n - 1) == count - 1


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_on_levels_holds_for_random_trees(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(1, 200)), 0.2)
    assert len(tree.plan().levels) <= PathPlan.max_levels_bound(len(tree.active_rows))


def test_an_unknown_plan_is_refused():
    with pytest.raises(TreeError, match="unknown plan 'two'; allowed: 'many', 'one'"):
        chain(2).plan("two")
