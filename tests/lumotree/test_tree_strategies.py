"""The public strategies: what they draw, what they shrink to, and that each malformed kind has its own message."""

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from lumotree.errors import TreeError
from lumotree.strategies import invalid_trees, trees
from lumotree.tree import Tree

KINDS = invalid_trees()
once = settings(max_examples=100, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
shrinking = settings(once, phases=[Phase.generate, Phase.shrink])


@settings(max_examples=40, derandomize=True, deadline=None)
@given(trees(min_rows=2, max_rows=5, inactive=False, permuted_slots=False))
def test_limits_are_kept(tree):
    assert 2 <= tree.n <= 5
    assert tree.active.all()
    assert tree.slots.tolist() == list(range(tree.num_slots))


def test_trees_shrink_to_the_root_alone():
    assert find(trees(), lambda tree: True, settings=shrinking) == Tree.make([-1], vocab=32)


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [
        (lambda tree: tree.max_depth >= 3, 4),
        (lambda tree: len(tree.leaves) >= 3, 4),
        (lambda tree: not tree.active.all(), 2),
        (lambda tree: tree.slots.tolist() != sorted(tree.slots.tolist()), 2),
        (lambda tree: tree.probs is not None and tree.probs.min() < 0.1, 1),
    ],
)
def test_each_feature_is_drawn_and_shrinks_to_the_smallest_tree_that_has_it(wanted, rows):
    assert find(trees(max_rows=8), wanted, settings=shrinking).n == rows


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, derandomize=True, deadline=None)
@given(data=st.data())
def test_each_malformed_kind_is_refused_with_its_own_message(kind, data):
    invalid = data.draw(KINDS[kind])
    with pytest.raises(TreeError) as caught:
        Tree.make(**invalid.kwargs)
    assert str(caught.value).startswith(invalid.message)


def test_no_two_kinds_share_a_message():
    messages = [find(drawn, lambda invalid: True, settings=once).message for drawn in KINDS.values()]
    assert len({message.split(":")[0] for message in messages}) == len(KINDS)
