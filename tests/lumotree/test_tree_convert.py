"""Notations: round trips, and what each conversion refuses."""

import numpy as np
import pytest
from hypothesis import given, settings

from lumotree.errors import TreeError
from lumotree.strategies import trees
from lumotree.tree import Tree
from lumotree.tree_convert import (
    from_ancestor_mask,
    from_ancestor_words,
    from_choices,
    from_sibling_links,
    sibling_links,
    to_choices,
)
from lumotree.tree_named import chain, complete_binary, hydra27, random_tree

quick = settings(max_examples=60, derandomize=True, deadline=None)


@quick
@given(trees())
def test_masks_words_and_links_give_the_tree_back(tree):
    fields = tree.fields()
    assert from_ancestor_mask(tree.ancestors, **fields) == tree
    assert from_ancestor_mask(tree.ancestors.astype(int).tolist(), **fields) == tree
    assert from_ancestor_words(tree.ancestor_words, **fields) == tree
    assert from_ancestor_words(tree.ancestor_words.view(np.int64), **fields) == tree
    assert from_sibling_links(*sibling_links(tree), **fields) == tree


@pytest.mark.parametrize("n", [64, 65, 129])
def test_words_of_wide_trees_give_the_tree_back(n):
    tree = random_tree(np.random.default_rng(n), n)
    assert from_ancestor_words(tree.ancestor_words) == tree


def test_fields_do_not_survive_unless_passed():
    tree = Tree.make([-1, 0], tokens=[7, 8], active=[True, False])
    assert from_ancestor_mask(tree.ancestors) == Tree.make([-1, 0])


@quick
@given(trees())
def test_choices_give_the_shape_back(tree):
    choices = to_choices(tree)
    again = from_choices(choices)
    assert to_choices(again) == sorted(choices, key=lambda choice: (len(choice), choice))
    assert from_choices(to_choices(again)) == again
    assert [len(choice) for choice in choices] == tree.depth[1:].tolist()


def test_choices_of_a_tree_in_level_order_keep_its_rows():
    tree = complete_binary(3)
    assert from_choices(to_choices(tree), **tree.fields()) == tree


def test_choices_read_as_eagle_and_medusa_write_them():
    tree = from_choices([(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0)])
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 3]
    assert from_choices([]) == chain(1)


def test_gaps_among_siblings_close_only_on_request():
    with pytest.raises(TreeError, match=r"gap among siblings: choice \[0, 2\] needs \[0, 1\]"):
        from_choices([[0], [0, 0], [0, 2]])
    assert from_choices([[0], [0, 0], [0, 2]], close_gaps=True).parents.tolist() == [-1, 0, 1, 1]


def test_sibling_links_are_those_of_sglang():
    links = sibling_links(Tree.make([-1, 0, 0, 1, 1]))
    assert links.first_child.tolist() == [1, 3, -1, -1, -1]
    assert links.next_sibling.tolist() == [-1, 2, -1, 4, -1]


def test_active_only_leaves_inactive_rows_unlinked():
    tree = hydra27()
    links = sibling_links(tree, active_only=True)
    reached, queue = set(), [0]
    while queue:
        row = queue.pop()
        reached.add(row)
        queue += [int(target) for target in (links.first_child[row], links.next_sibling[row]) if target != -1]
    assert reached == set(tree.active_rows)
    assert len(to_choices(tree, active_only=True)) == len(tree.active_rows) - 1
    assert len(to_choices(tree)) == 31


MASK = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])


def changed(*cells):
    mask = MASK.copy()
    for row, column in cells:
        mask[row, column] ^= 1
    return mask


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (changed((2, 2)), "mask is not reflexive: row 2 does not see itself"),
        (changed((1, 3)), "mask looks forward: row 1 sees row 3"),
        (changed((3, 0)), "mask is not transitive: row 3 sees row 1 but not row 0"),
        (changed((3, 2)), "ancestors are not a chain: row 3 sees rows 1 and 2, but row 2 does not see row 1"),
        (changed((2, 0)), "two roots: rows 0 and 2"),
        (MASK[:, :3], "ancestor mask must be square [N, N], got [4, 3]"),
        (MASK * 2, "ancestor mask must hold booleans or 0 and 1 only"),
        (MASK.astype(float), "wrong dtype: ancestor mask cannot hold float64"),
        (MASK[0], "ancestor mask must be two-dimensional, got shape [4]"),
        (np.zeros((0, 0), bool), "empty tree"),
        ([[1], [1, 1]], "ancestor mask cannot be read as an array"),
    ],
)
def test_masks_that_are_no_tree_are_named(mask, message):
    with pytest.raises(TreeError) as caught:
        from_ancestor_mask(mask)
    assert str(caught.value).startswith(message)


@quick
@given(trees(min_rows=2, max_rows=8))
def test_a_mask_with_one_cell_flipped_is_refused_or_is_another_tree(tree):
    for row, column in np.ndindex(tree.n, tree.n):
        mask = tree.ancestors.copy()
        mask[row, column] ^= True
        try:
            other = from_ancestor_mask(mask)
        except TreeError:
            continue
        assert np.array_equal(other.ancestors, mask)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (np.array([[1], [7]], np.uint64), "ancestor words: row 1 sees column 2; allowed: 0..1"),
        (np.array([[1], [1]], np.uint64), "mask is not reflexive: row 1"),
        (np.array([[1, 0], [3, 0]], np.uint64), "ancestor words of 2 rows must be [2, 1], got [2, 2]"),
        (np.array([[1], [3]], np.uint32), "wrong dtype: ancestor words must be uint64 or int64, got uint32"),
        (np.array([1, 3], np.uint64), "ancestor words must be two-dimensional"),
        (np.array([[1.0], [3.0]]), "wrong dtype: ancestor words cannot hold float64"),
    ],
)
def test_words_that_are_no_tree_are_named(words, message):
    with pytest.raises(TreeError) as caught:
        from_ancestor_words(words)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("first_child", "next_sibling", "message"),
    [
        ([1, -1, -1], [-1, -1, -1], "unreachable row: no link leads to row 2"),
        ([1, 2, -1], [-1, 2, -1], "row linked twice: rows 1 and 1 both link to row 2"),
        ([2, -1, -1], [-1, -1, 1], "link leads backward: next_sibling of row 2 is 1"),
        ([1, 1, -1], [-1, 2, -1], "link leads backward: first_child of row 1 is 1"),
        ([1, -1, -1], [2, -1, -1], "the root has a sibling: next_sibling of row 0 is 2"),
        ([1, 3, -1], [-1, 2, -1], "link out of range: first_child of row 1 is 3"),
        ([1, -2, -1], [-1, 2, -1], "link out of range: first_child of row 1 is -2"),
        ([1, -1], [-1], "wrong length: next_sibling has 1 entries, the tree has 2 rows"),
        ([1.0, -1.0], [-1, -1], "wrong dtype: first_child must hold integers"),
        ([], [], "empty tree"),
    ],
)
def test_links_that_are_no_tree_are_named(first_child, next_sibling, message):
    with pytest.raises(TreeError) as caught:
        from_sibling_links(first_child, next_sibling)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [1, 0]], "missing prefix: choice [1, 0] needs [1]"),
        ([[0], [0]], "repeated choice: [0] appears twice"),
        ([[1]], "gap among siblings: choice [1] needs [0]"),
        ([[]], "empty choice"),
        ([[0], [0, -1]], "negative index in choice [0, -1]"),
        ([[0.0]], "a choice is a list of child indices"),
        ([0], "a choice is a list of child indices"),
    ],
)
def test_choices_that_are_no_tree_are_named(choices, message):
    with pytest.raises(TreeError) as caught:
        from_choices(choices)
    assert str(caught.value).startswith(message)
