"""The bounded domain: exact sizes, no repetition, every shape present, the same configurations for ever."""

from __future__ import annotations

import itertools
import math

import pytest

from audit.law_domain import (
    DEFAULT_COUNT,
    FULL_COUNT,
    MAX_ROWS,
    Block,
    blocks,
    compositions,
    configurations,
    depth_of,
    describe,
    ordered_trees,
    quotas,
)
from lumotree.errors import InputError


def test_ordered_trees_are_catalan_many_and_different() -> None:
    assert [len(ordered_trees(rows)) for rows in range(1, 6)] == [1, 1, 2, 5, 14]
    for rows in range(1, 6):
        trees = ordered_trees(rows)
        assert len(set(trees)) == len(trees)
        assert all(tree[0] == -1 and all(tree[row] < row for row in range(1, rows)) for tree in trees)


def test_grid_rows_are_all_compositions() -> None:
    brute = {row for row in itertools.product(range(5), repeat=3) if sum(row) == 4}
    assert set(compositions(4, 3)) == brute and len(compositions(4, 3)) == math.comb(6, 2)


def test_small_block_is_enumerated_whole() -> None:
    block = Block((-1, 0), 2, 4, "fixed")
    found = {block.configuration(number) for number in block.numbers(10**9)}
    assert len(found) == block.size == 5**3 * 2  # a target row at the root and at each of two prefixes, one token


def test_large_block_is_walked_without_repetition_and_in_parts() -> None:
    block = Block((-1, 0, 1), 3, 4, "sampled")
    whole = list(block.numbers(1000))
    assert len(set(whole)) == 1000 and all(0 <= number < block.size for number in whole)
    assert sorted(whole) == sorted([*block.numbers(1000, part=0, parts=2), *block.numbers(1000, part=1, parts=2)])


def test_walk_visits_every_grid_row_evenly() -> None:
    """Digits of the mixed radix are spread: at each prefix each of 15 rows takes its share of 3,000 configurations."""
    block = Block((-1, 0, 1), 3, 4, "sampled")
    configs = [block.configuration(number) for number in block.numbers(3000)]
    for level, code in ((0, 0), (1, 2), (2, 5)):
        counts = [sum(config.target[level][code] == row for config in configs) for row in block.grid]
        assert min(counts) > 100 and max(counts) < 300  # mean 200, standard deviation 14


def test_configuration_out_of_range_is_refused() -> None:
    with pytest.raises(InputError, match="allowed: 0"):
        Block((-1,), 2, 4, "fixed").configuration(5)


@pytest.mark.parametrize("count", [1, 287, 3000, DEFAULT_COUNT, FULL_COUNT])
def test_quotas_add_up(count: int) -> None:
    assert sum(quotas(count).values()) == count


def test_sizes_asked_for() -> None:
    assert DEFAULT_COUNT >= 10_000 and FULL_COUNT >= 1_000_000
    assert describe(DEFAULT_COUNT)["configurations"] == DEFAULT_COUNT


def test_default_run_holds_every_shape_and_edge_case() -> None:
    configs = list(configurations(3000))
    assert configs == list(configurations(3000)) and len(set(configs)) == 3000
    trees = {tree for rows in range(1, MAX_ROWS + 1) for tree in ordered_trees(rows)}
    assert {config.parents for config in configs} == trees
    assert {config.vocab for config in configs} == {1, 2, 3, 4}
    drafted = [config for config in configs if config.tokens and len(config.parents) > 1]
    assert any(config.target[0][0][config.tokens[1]] == 0 for config in drafted if config.tokens)
    assert any(config.tokens and _has_duplicate_siblings(config.parents, config.tokens) for config in configs)
    assert any(config.laws and sum(q > 0 for q in config.laws[0][0]) < len(config.children[0]) for config in configs)


def _has_duplicate_siblings(parents: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    pairs = list(zip(parents[1:], tokens[1:], strict=True))
    return len(set(pairs)) < len(pairs)


def test_every_tree_meets_every_vocabulary() -> None:
    shapes = {(block.parents, block.vocab) for block in blocks()}
    for rows in range(1, MAX_ROWS + 1):
        for tree in ordered_trees(rows):
            for vocab in range(1, 5 if rows < MAX_ROWS else 4):
                assert (tree, vocab) in shapes
    assert max(depth_of(tree) for tree, _ in shapes) == MAX_ROWS - 1
