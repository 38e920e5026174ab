"""Named and random trees."""

import numpy as np
import pytest

from lumotree.errors import TreeError
from lumotree.tree_named import chain, comb, complete_binary, hydra27, mtp5, named, random_tree, star


def test_hydra27_is_the_published_tree():
    tree = hydra27()
    assert tree.n == 32
    assert [row for row in range(32) if not tree.active[row]] == [18, 23, 25, 27]
    assert len(tree.active_rows) == 28
    assert tree.max_depth == 11
    assert tree.parents[[7, 17, 18, 25, 31]].tolist() == [2, 12, 13, 23, 30]


def test_shapes():
    assert mtp5() == chain(6)
    assert chain(3).parents.tolist() == [-1, 0, 1]
    assert star(4).parents.tolist() == [-1, 0, 0, 0]
    assert comb(3).parents.tolist() == [-1, 0, 0, 2, 2, 4]
    assert complete_binary(2).parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert chain(1) == star(1) == complete_binary(0)


@pytest.mark.parametrize(
    ("spec", "tree"),
    [
        ("hydra27", hydra27()),
        ("MTP5", mtp5()),
        ("chain:64", chain(64)),
        ("star:5", star(5)),
        ("comb:9", comb(9)),
        ("binary:3", complete_binary(3)),
    ],
)
def test_names_parse(spec, tree):
    assert named(spec) == tree


def test_fields_reach_the_tree():
    assert named("hydra27", prefix_len=7, vocab=11).position[0] == 7
    assert named("star:3", active=[True, True, False]).active_rows == (0, 1)
    with pytest.raises(TreeError, match="too many rows"):
        named("chain:9", max_rows=8)


@pytest.mark.parametrize(
    "spec",
    ["", "oak", "chain", "chain:", "chain:0", "chain:-1", "chain:x", "chain:²", "star:4097", "comb:2049", "binary:12",
     "chain:99999999999999999999", "mtp5:3", "hydra27:"],
)  # fmt: skip
def test_unknown_names_list_what_is_allowed(spec):
    with pytest.raises(TreeError) as caught:
        named(spec)
    assert str(caught.value) == (
        f"unknown tree {spec!r}; allowed: hydra27, mtp5, chain:1..4096, star:1..4096, comb:1..2048, binary:0..11"
    )


@pytest.mark.parametrize("maker", [chain, star, comb])
@pytest.mark.parametrize("size", [0, -1, 2.0])
def test_sizes_that_make_no_tree_are_refused(maker, size):
    with pytest.raises(TreeError, match="size of"):
        maker(size)


def test_random_trees_are_seeded():
    assert random_tree(np.random.default_rng(3), 40, 0.3) == random_tree(np.random.default_rng(3), 40, 0.3)
    assert random_tree(np.random.default_rng(3), 40) != random_tree(np.random.default_rng(4), 40)


@pytest.mark.parametrize(("n", "fraction", "inactive"), [(1, 0.9, 0), (7, 0.0, 0), (10, 0.25, 2), (20, 0.99, 19)])
def test_random_trees_have_the_inactive_rows_asked_for(n, fraction, inactive):
    for seed in range(10):
        tree = random_tree(np.random.default_rng(seed), n, fraction)
        assert tree.n == n
        assert n - len(tree.active_rows) == inactive


def test_random_trees_reach_deep_and_bushy_shapes():
    drawn = [random_tree(np.random.default_rng(seed), 24) for seed in range(60)]
    assert max(tree.max_depth for tree in drawn) >= 18
    assert min(tree.max_depth for tree in drawn) <= 4
    assert max(len(tree.leaves) for tree in drawn) >= 16


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_random_trees_refuse_other_fractions(fraction):
    with pytest.raises(TreeError, match="inactive_fraction"):
        random_tree(np.random.default_rng(0), 4, fraction)
