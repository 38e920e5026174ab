"""Selection logic of the drafters against exhaustive and naive forms of it."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.draft_choice import BudgetSearch, drawn, joined, ranked, sparse
from lumotree.errors import InputError
from lumotree.suffix import continuation, next_token

# Suffix


def naive_next(tokens: list[int], shortest: int, longest: int) -> int | None:
    """Try suffixes from the longest, and for each its occurrences from the latest."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                return tokens[start + size]
    return None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 4), st.integers(0, 6))
def test_suffix_equals_a_naive_search(tokens: list[int], shortest: int, extra: int) -> None:
    array = np.array(tokens, np.int64)
    assert next_token(array, shortest, shortest + extra) == naive_next(tokens, shortest, shortest + extra)


def test_suffix_prefers_the_longest_match_and_then_the_latest() -> None:
    # "1 2" came twice, followed by 7 and by 8; "5 1 2" once, followed by 7.
    assert next_token(np.array([5, 1, 2, 7, 1, 2, 8, 1, 2]), 2) == 8
    assert next_token(np.array([5, 1, 2, 7, 1, 2, 8, 5, 1, 2]), 2) == 7
    assert next_token(np.array([5, 1, 2, 7, 1, 2, 8, 5, 1, 2]), 2, longest=2) == 8


def test_continuation_goes_on_and_may_overlap_the_end() -> None:
    assert continuation(np.array([1, 2, 3, 1, 2, 3]), 5) == [1, 2, 3, 1, 2]
    assert continuation(np.array([4, 4, 4, 4]), 3) == [4, 4, 4]
    assert continuation(np.array([1, 2, 3, 4]), 3) == []


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3)])
def test_suffix_lengths_are_checked(shortest: int, longest: int) -> None:
    with pytest.raises(InputError, match=f"shortest={shortest}, longest={longest}"):
        next_token(np.array([1, 1]), shortest, longest)


# Siblings


def test_ranked_breaks_ties_by_number_and_drops_what_is_impossible() -> None:
    assert ranked(np.array([0.25, 0.5, 0.25, 0.0]), 3) == [1, 0, 2]
    assert ranked(np.array([0.25, 0.5, 0.25, 0.0]), 4) == [1, 0, 2]


def test_sparse_keeps_the_likeliest_and_renormalises() -> None:
    law = np.array([0.125, 0.5, 0.125, 0.25])
    np.testing.assert_array_equal(sparse(law, 3), np.array([0.125, 0.5, 0.0, 0.25]) / 0.875)
    np.testing.assert_array_equal(sparse(law, 9), law)


def test_joined_puts_the_other_drafters_token_second() -> None:
    assert joined([4, 5, 6], 9, 3) == [4, 9, 5]
    assert joined([4, 5, 6], 4, 3) == [4, 5, 6]
    assert joined([4, 5, 6], 6, 3) == [4, 6, 5]
    assert joined([4, 5, 6], None, 2) == [4, 5]
    assert joined([4], 9, 1) == [4]
    assert joined([], 9, 1) == [9]


def test_drawn_siblings_have_the_law_without_replacement_exactly() -> None:
    """Every threshold of both draws is a multiple of 1/8 and of 1/168, so a grid of midpoints counts areas exactly."""
    law = np.array([0.5, 0.25, 0.0, 0.125, 0.125])
    first, second = (np.arange(8) + 0.5) / 8, (np.arange(168) + 0.5) / 168
    counts = Counter(tuple(drawn(law, np.array(pair))) for pair in itertools.product(first, second))
    weights = [Fraction(w) for w in law]
    expected = {
        (x, y): weights[x] * weights[y] / (1 - weights[x])
        for x, y in itertools.permutations(range(5), 2)
        if weights[x] and weights[y]
    }
    assert {pair: Fraction(count, 8 * 168) for pair, count in counts.items()} == expected


def test_drawn_gives_fewer_siblings_where_the_law_has_fewer_tokens() -> None:
    law = np.array([0.0, 1.0, 0.0, 1e-17])  # the last is nothing on the grid that selection works on
    assert drawn(law, np.array([0.3, 0.9])) == [1]


# Budget


def laws_of(seed: int, vocab: int) -> dict[tuple[int, ...], np.ndarray]:
    """A law for every path up to depth 3, with ties and certain tokens among them."""
    rng = np.random.default_rng(seed)
    laws = {}
    for depth in range(4):
        for path in itertools.product(range(vocab), repeat=depth):
            kind = rng.random()
            law = rng.dirichlet(np.full(vocab, 0.6)) if kind < 0.7 else np.full(vocab, 1 / vocab)
            laws[path] = np.eye(vocab)[rng.integers(vocab)] if kind > 0.9 else law
    return laws


def path_of(search: BudgetSearch, number: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while number:
        path = (search.nodes[number].token, *path)
        number = search.nodes[number].parent
    return path


def run(search: BudgetSearch, laws: dict[tuple[int, ...], np.ndarray]) -> int:
    """Rounds until the choice is final."""
    rounds = 0
    while wanted := search.wanted():
        rounds += 1
        for number in wanted:
            search.learn(number, laws[path_of(search, number)])
    return rounds


def best_value(laws: dict[tuple[int, ...], np.ndarray], vocab: int, budget: int, deepest: int) -> float:
    """Best sum over all parent-closed sets of `budget` nodes, by growing every such set one node at a time."""
    sets = {frozenset([()])}
    for _ in range(budget):
        sets = {
            nodes | {(*path, token)}
            for nodes in sets for path in nodes if len(path) < deepest for token in range(vocab)
            if (*path, token) not in nodes
        }  # fmt: skip
    value = {
        path: float(np.prod([laws[path[:i]][path[i]] for i in range(len(path))])) for nodes in sets for path in nodes
    }
    return max(sum(value[path] for path in nodes) for nodes in sets)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("vocab", "budget", "deepest"), [(2, 5, 3), (3, 4, 3), (3, 4, 2), (2, 3, 1)])
def test_budget_is_spent_best(seed: int, vocab: int, budget: int, deepest: int) -> None:
    laws = laws_of(seed, vocab)
    search = BudgetSearch(budget, deepest)
    assert run(search, laws) <= deepest
    chosen = search.chosen()
    paths = [path_of(search, number) for number in chosen]
    assert paths[0] == () and len(set(paths)) == len(paths)
    assert all(path[:-1] in paths for path in paths if path)
    if len(chosen) == budget + 1:
        value = sum(search.nodes[number].value for number in chosen)
        assert value == pytest.approx(best_value(laws, vocab, budget, deepest), abs=1e-12)
    else:  # there are fewer possible nodes than the budget allows
        assert all(number in search.learned or len(path_of(search, number)) == deepest for number in chosen)


def test_a_level_by_level_spender_is_worse_somewhere() -> None:
    """Negative control of the optimum: spending the budget on the likeliest chain loses."""
    worse = 0
    for seed in range(12):
        laws = laws_of(seed, 3)
        chain, path = 0.0, ()
        value = 1.0
        for _ in range(3):
            token = int(laws[path].argmax())
            value *= laws[path][token]
            path, chain = (*path, token), chain + value
        worse += chain < best_value(laws, 3, 3, 3) - 1e-9
    assert worse > 3


def test_budget_tree_has_parents_first_and_conditional_probabilities() -> None:
    laws = laws_of(3, 3)
    search = BudgetSearch(7, 3)
    run(search, laws)
    tree = search.tree(pending=2)
    assert tree.n == 8 and int(tree.tokens[0]) == 2
    for row in range(1, tree.n):
        path = tuple(int(tree.tokens[r]) for r in tree.path(row)[1:])
        assert tree.probs is not None and tree.probs[row] == pytest.approx(laws[path[:-1]][path[-1]])


def test_no_budget_or_no_depth_asks_for_nothing() -> None:
    assert BudgetSearch(0, 5).wanted() == [] and BudgetSearch(5, 0).wanted() == []
    with pytest.raises(InputError, match="expected budget and depth >= 0, got -1 and 3"):
        BudgetSearch(-1, 3)
