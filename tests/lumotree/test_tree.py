"""`Tree`: what it derives, what it refuses, and its value semantics."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings

from lumotree.errors import InputError, PathError, TreeError
from lumotree.strategies import trees
from lumotree.tree import Tree
from lumotree.tree_named import chain, hydra27, random_tree

quick = settings(max_examples=60, derandomize=True, deadline=None)


def walk_up(parents, row):
    """The rows from `row` to the root, by following parents and nothing else."""
    rows = [row]
    while parents[rows[-1]] != -1:
        rows.append(parents[rows[-1]])
    return rows


@quick
@given(trees())
def test_depth_position_ancestors_and_paths_agree_with_walking_up(tree):
    parents = tree.parents.tolist()
    for row in range(tree.n):
        rows = walk_up(parents, row)
        assert tree.depth[row] == len(rows) - 1
        assert tree.position[row] == tree.prefix_len + len(rows) - 1
        assert set(np.flatnonzero(tree.ancestors[row])) == set(rows)
        assert tree.path(row) == tuple(reversed(rows))
        assert tree.children(row) == tuple(c for c in range(tree.n) if parents[c] == row)
        assert tree.active_children(row) == tuple(c for c in tree.children(row) if tree.active[c])
    active = [row for row in range(tree.n) if tree.active[row]]
    assert tree.active_rows == tuple(active)
    assert tree.leaves == tuple(r for r in active if not any(parents[c] == r for c in active))
    assert tree.max_depth == max(tree.depth[row] for row in active)
    assert dict(tree.paths()) == {row: tree.path(row) for row in active}


@pytest.mark.parametrize("n", [1, 63, 64, 65, 130])
def test_ancestor_words_hold_one_bit_per_visible_column(n):
    tree = random_tree(np.random.default_rng(n), n)
    assert tree.ancestor_words.shape == (n, (n + 63) // 64)
    assert tree.ancestor_words.dtype == np.uint64
    for row in range(n):
        number = sum(int(word) << (64 * at) for at, word in enumerate(tree.ancestor_words[row]))
        assert number == sum(1 << column for column in walk_up(tree.parents.tolist(), row))


def test_dtypes_are_the_documented_ones():
    tree = Tree.make([-1, 0], probs=[1, 0.5])
    dtypes = {name: getattr(tree, name).dtype for name in ("parents", "tokens", "active", "probs", "slots")}
    assert dtypes == {"parents": "int32", "tokens": "int64", "active": "bool", "probs": "float64", "slots": "int64"}
    assert (tree.depth.dtype, tree.position.dtype) == ("int32", "int64")


def test_defaults():
    tree = Tree.make([-1, 0, 0, 1], vocab=3)
    assert tree.tokens.tolist() == [0, 1, 2, 0]
    assert tree.active.all()
    assert tree.probs is None
    assert tree.slots.tolist() == [0, 1, 2, 3]
    assert (tree.num_slots, tree.prefix_len) == (4, 0)


def test_inputs_are_copied_and_arrays_are_read_only():
    parents = np.array([-1, 0, 1])
    tree = Tree.make(parents, probs=[1.0, 0.5, 0.5])
    parents[2] = 0
    assert tree.parents.tolist() == [-1, 0, 1]
    for name in ("parents", "tokens", "active", "probs", "slots", "depth", "position", "ancestors",
                 "ancestor_words", "logical_from_physical"):  # fmt: skip
        with pytest.raises(ValueError, match="read-only"):
            getattr(tree, name)[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.prefix_len = 3


@quick
@given(trees())
def test_slots_map_both_ways_and_leave_the_rest_free(tree):
    for row in range(tree.n):
        assert tree.row_of_slot(tree.slot_of_row(row)) == row
    assert np.array_equal(tree.logical_from_physical[tree.physical_from_logical], np.arange(tree.n))
    assert set(tree.free_slots) == set(range(tree.num_slots)) - set(tree.slots.tolist())
    assert all(tree.row_of_slot(slot) == -1 for slot in tree.free_slots)


@pytest.mark.parametrize("ask", ["children", "active_children", "path", "slot_of_row", "row_of_slot"])
@pytest.mark.parametrize("number", [-1, 3, 1.0, True])
def test_unknown_rows_and_slots_are_refused(ask, number):
    with pytest.raises(TreeError):
        getattr(chain(3), ask)(number)


@quick
@given(trees())
def test_copies_are_equal_hash_alike_and_stay_read_only(tree):
    for twin in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree)), Tree.make(tree.parents, **tree.fields())):
        assert twin == tree
        assert hash(twin) == hash(tree)
        assert not twin.parents.flags.writeable
    assert eval(repr(tree), {"Tree": Tree}) == tree


def test_a_change_of_any_field_makes_another_tree():
    tree = Tree.make([-1, 0, 0])
    others = [
        Tree.make([-1, 0, 1]),
        Tree.make([-1, 0, 0], tokens=[0, 1, 3]),
        Tree.make([-1, 0, 0], active=[True, True, False]),
        Tree.make([-1, 0, 0], probs=[1, 1, 1]),
        Tree.make([-1, 0, 0], slots=[0, 2, 1]),
        Tree.make([-1, 0, 0], num_slots=4),
        Tree.make([-1, 0, 0], prefix_len=1),
        Tree.make([-1, 0, 0], vocab=9),
    ]
    assert len({tree, *others}) == 9
    assert tree != "tree"


def test_replace_validates_again():
    with pytest.raises(TreeError, match="forward parent: row 1"):
        dataclasses.replace(chain(3), parents=[-1, 2, 0])


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([1, 2, 0], "cycle: rows 0 -> 1 -> 2 -> 0 "),
        ([-1, 0, 5, 2, 3, 4], "cycle: rows 2 -> 5 -> 4 -> 3 -> 2 "),
        ([-1, 3, 0, 0], "forward parent: row 1 names parent 3, which comes after it; allowed: an earlier row, 0..0"),
        ([1, -1], "root not row 0: row 1 has parent -1"),
        ([0, 0], "self parent: row 0 names parent 0"),
        ([-1, -2], "missing parent: row 1 names parent -2; allowed: -1 (row 0 only) or an earlier row, 0..0"),
        ([-1, 2**40], "missing parent: row 1 names parent 1099511627776"),
        (np.array([0, 2**63], np.uint64), "parents: row 1 holds 9223372036854775808, which does not fit in int64"),
        ([-1.0, 0.0], "wrong dtype: parents must hold integers, got float64"),
        ([-1, None], "wrong dtype: parents must hold integers, got object"),
        ([[-1, 0]], "parents must be one-dimensional [N], got shape [1, 2]"),
        ([[-1], [0, 0]], "parents cannot be read as an array"),
        ([], "empty tree"),
        (-1, "parents must be one-dimensional [N], got shape []"),
    ],
)
def test_malformed_parents_are_named(parents, message):
    with pytest.raises(TreeError) as caught:
        Tree.make(parents)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"active": [1, 1]}, "wrong dtype: active must hold booleans"),
        ({"tokens": [0, -1]}, "token out of range: row 1 has token -1; allowed: 0 or more"),
        ({"tokens": [0, 7], "vocab": 7}, "token out of range: row 1 has token 7; allowed: 0..6"),
        ({"slots": [4, -1]}, "slot out of range: row 1 has slot -1; allowed: 0..4"),
        ({"slots": [0, 1], "num_slots": 1}, "slot out of range: row 1 has slot 1; allowed: 0..0"),
        ({"num_slots": 2.0}, "num_slots must be an integer, got 2.0"),
        ({"prefix_len": True}, "prefix_len must be an integer, got True"),
        ({"vocab": 0}, "vocab must be at least 1, got 0"),
        ({"max_rows": 1}, "too many rows: the tree has 2 rows; allowed: at most 1"),
        ({"probs": ["a", "b"]}, "wrong dtype: probs must hold real numbers"),
        ({"probs": [1.0, np.inf]}, "probability out of range: row 1 has probability inf"),
    ],
)
def test_malformed_fields_are_named(fields, message):
    with pytest.raises(TreeError) as caught:
        Tree.make([-1, 0], **fields)
    assert str(caught.value).startswith(message)


@quick
@given(trees())
def test_exactly_the_active_root_paths_are_accepted(tree):
    accepted = set(tree.paths().values())
    for row in range(tree.n):
        assert tree.is_path(tree.path(row)) == (tree.path(row) in accepted)
    for path in accepted:
        assert tree.check_path(np.array(path), max_len=len(path)) == path
        assert not tree.is_path(path[1:])
        assert not tree.is_path((*path, path[-1]))


@pytest.mark.parametrize(
    ("rows", "limits", "message"),
    [
        ([], {}, "empty path"),
        ([1, 4], {}, "path does not start at row 0: step 0 is row 1"),
        ([0, 4], {}, "path is not parent-linked: step 1 is row 4, whose parent is 1, after row 0"),
        ([0, 1, 0], {}, "path is not parent-linked: step 2 is row 0"),
        ([0, 3, 8, 13, 18], {}, "inactive row: step 4 is row 18"),
        ([0, 32], {}, "row out of range: step 1 is row 32; allowed: 0..31"),
        ([0, -1], {}, "row out of range: step 1 is row -1"),
        ([0, 1, 4], {"max_len": 2}, "path too long: it has 3 rows; allowed: at most 2"),
        ([0, 1.0], {}, "a path is a sequence of integer rows"),
        (None, {}, "a path is a sequence of integer rows"),
    ],
)
def test_paths_that_cannot_be_accepted_are_named(rows, limits, message):
    with pytest.raises(PathError) as caught:
        hydra27().check_path(rows, **limits)
    assert str(caught.value).startswith(message)


def test_an_empty_path_passes_only_where_allowed():
    assert chain(2).check_path([], allow_empty=True) == ()
    assert not chain(2).is_path([])
