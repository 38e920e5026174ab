"""Trees made from a known topology are the trees that `Tree.make` makes."""

import numpy as np
import pytest
from hypothesis import given

from lumotree.errors import TreeError
from lumotree.placed_tree import placed
from lumotree.strategies import trees
from lumotree.tree import Tree


@given(tree=trees())
def test_a_placed_tree_is_the_made_one(tree):
    for shift in (0, 1):  # the second time the topology is known
        tokens = (tree.tokens + shift) % 32
        made = Tree.make(tree.parents, tokens=tokens, active=tree.active, slots=tree.slots, num_slots=tree.num_slots,
                         prefix_len=tree.prefix_len + shift, vocab=32)  # fmt: skip
        quick = placed(tree.parents, tokens, tree.slots, tree.num_slots, tree.prefix_len + shift, tree.active, 32)
        assert quick == made
        assert quick.plan() == made.plan()
        assert quick.max_depth == made.max_depth
        for name in ("depth", "position", "ancestors", "logical_from_physical"):
            assert np.array_equal(getattr(quick, name), getattr(made, name)), name
        for row in range(made.n):
            assert quick.active_children(row) == made.active_children(row)
            assert quick.path(row) == made.path(row)
        assert not quick.tokens.flags.writeable


def test_the_caller_keeps_its_arrays():
    slots = np.arange(2)
    tree = placed([-1, 0], [1, 2], slots, 2, 0)
    slots[0] = 9
    assert tree.slots.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parents": [-1, 1]}, "row 1"),
        ({"tokens": [1, 5]}, "row 1: token 5 is outside the vocabulary; allowed: 0..4"),
        ({"tokens": [-2, 1], "vocab": None}, "row 0: token -2 is outside the vocabulary; allowed: non-negative"),
        ({"tokens": [1]}, "expected 2, one a row"),
        ({"slots": np.arange(3)}, "expected 2, one a row"),
        ({"active": np.array([True])}, "active: expected 2 values"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    right = {"parents": [-1, 0], "tokens": [1, 2], "slots": np.arange(2), "num_slots": 2, "prefix_len": 0, "vocab": 5}
    with pytest.raises(TreeError, match=message):
        placed(**right | fields)
