"""Hypothesis strategies for trees, for the property tests of this toolkit and of kernel authors.

Needs `hypothesis`; nothing else in `lumotree` imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from lumotree.tree import Tree

VOCAB = 32


@st.composite
def trees(
    draw: st.DrawFn,
    min_rows: int = 1,
    max_rows: int = 16,
    inactive: bool = True,
    permuted_slots: bool = True,
    vocab: int = VOCAB,
) -> Tree:
    """Draw valid trees of any shape with `min_rows`..`max_rows` rows.

    With `inactive`, rows may be inactive (closed under descendants); with `permuted_slots`, slots are permuted and
    may leave gaps. Tokens are below `vocab` and may repeat among siblings; probabilities may be absent.
    Shrinks to few rows, then to a chain, all active, slots in order, token 0.
    """
    reach = draw(st.integers(0, max_rows - 1))  # short: deep trees, long: bushy ones
    row = st.tuples(
        st.integers(0, reach),
        st.sampled_from([False] * 7 + [True]) if inactive else st.just(False),  # seldom: descendants follow
        st.integers(0, vocab - 1),
        st.integers(0, 7) if permuted_slots else st.just(0),
    )
    # A list entry holds all of a row, in few enough draws for Hypothesis to delete rows from the middle.
    rows = draw(st.lists(row, min_size=min_rows, max_size=max_rows))
    skips, flags, tokens, keys = (list(column) for column in zip(*rows, strict=True))
    parents = [-1, *(max(at - 1 - skips[at], 0) for at in range(1, len(rows)))]
    gaps = draw(st.lists(st.integers(0, 7), max_size=3)) if permuted_slots else []
    prefix_len = draw(st.integers(0, 20))
    return Tree.make(
        parents,
        tokens=tokens,
        active=_closed(parents, flags),
        probs=draw(st.none() | st.lists(st.floats(0, 1), min_size=len(rows), max_size=len(rows))),
        slots=_ranks(keys + gaps)[: len(rows)],
        num_slots=len(rows) + len(gaps),
        prefix_len=prefix_len,
        vocab=vocab,
    )


def _closed(parents: list[int], flags: list[bool]) -> list[bool]:
    """Turn `flags` (True = inactive) into activity closed under descendants, the root active."""
    active = [True] * len(parents)
    for row in range(1, len(parents)):
        active[row] = active[parents[row]] and not flags[row]
    return active


def _ranks(keys: list[int]) -> list[int]:
    """Return the place of each entry in the sorted order, equal keys in their own order: a permutation."""
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return [order.index(at) for at in range(len(keys))]


@dataclass(frozen=True)
class InvalidTree:
    """Keyword arguments that `Tree.make` refuses, and a fragment of the message that its TreeError holds."""

    kwargs: dict[str, Any]
    message: str


_Spoil = Callable[[st.DrawFn, dict[str, Any], int], str]


def invalid_trees(max_rows: int = 12) -> dict[str, SearchStrategy[InvalidTree]]:
    """Return one strategy for each kind of malformed tree, keyed by kind.

    Each draws a valid tree of at least three rows (`max_rows` must be 3 or more) and breaks exactly one rule.
    """
    return {kind: _spoiled(spoil, max_rows) for kind, spoil in _SPOILS.items()}


@st.composite
def _spoiled(draw: st.DrawFn, spoil: _Spoil, max_rows: int) -> InvalidTree:
    tree = draw(trees(min_rows=3, max_rows=max_rows, inactive=False))
    kwargs: dict[str, Any] = {"parents": tree.parents.tolist(), **tree.fields()}
    for name in ("tokens", "active", "slots"):
        kwargs[name] = kwargs[name].tolist()
    kwargs["probs"] = [0.5] * tree.n
    return InvalidTree(kwargs, spoil(draw, kwargs, tree.n))


def _cycle(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    low = draw(st.integers(1, n - 2))
    high = draw(st.integers(low + 1, n - 1))
    kwargs["parents"][low], kwargs["parents"][high] = high, low
    return f"cycle: rows {low} -> {high} -> {low}"


def _forward_parent(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    row = draw(st.integers(1, n - 2))
    kwargs["parents"][row + 1] = 0
    kwargs["parents"][row] = row + 1
    return f"forward parent: row {row} names parent {row + 1}"


def _self_parent(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    row = draw(st.integers(0, n - 1))
    kwargs["parents"][row] = row
    return f"self parent: row {row} "


def _missing_parent(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    row = draw(st.integers(0, n - 1))
    parent = draw(st.integers(n, n + 5) | st.integers(-5, -2))
    kwargs["parents"][row] = parent
    return f"missing parent: row {row} names parent {parent}"


def _two_roots(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    row = draw(st.integers(1, n - 1))
    kwargs["parents"][row] = -1
    return f"two roots: rows 0 and {row} "


def _root_not_row_0(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    row = draw(st.integers(1, n - 1))
    kwargs["parents"] = [row] * n
    kwargs["parents"][row] = -1
    return f"root not row 0: row {row} "


def _inactive_root(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    kwargs["active"] = [False] * n
    return "inactive root: row 0 "


def _active_under_inactive(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    child = draw(st.integers(2, n - 1))
    parent = draw(st.integers(1, child - 1))
    kwargs["parents"] = [-1] + [0] * (n - 1)
    kwargs["parents"][child] = parent
    kwargs["active"][parent] = False
    return f"active row under an inactive one: row {child} is active, its parent {parent} "


def _token(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    row = draw(st.integers(0, n - 1))
    token = draw(st.integers(VOCAB, VOCAB + 5) | st.integers(-5, -1))
    kwargs["tokens"][row] = token
    return f"token out of range: row {row} has token {token}"


def _probability_range(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    row = draw(st.integers(0, n - 1))
    kwargs["probs"][row] = draw(st.sampled_from([-0.25, 1.5, float("inf"), float("-inf")]))
    return f"probability out of range: row {row} has probability {kwargs['probs'][row]}"


def _probability_nan(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    row = draw(st.integers(0, n - 1))
    kwargs["probs"][row] = float("nan")
    return f"probability is NaN: row {row} "


def _duplicate_slot(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    two = draw(st.integers(1, n - 1))
    one = draw(st.integers(0, two - 1))
    kwargs["slots"][two] = kwargs["slots"][one]
    return f"duplicate slot: rows {one} and {two} both have slot {kwargs['slots'][one]}"


def _slot_range(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    row = draw(st.integers(0, n - 1))
    slot = draw(st.integers(-4, -1) | st.integers(0, 4).map(lambda past: kwargs["num_slots"] + past))
    kwargs["slots"][row] = slot
    return f"slot out of range: row {row} has slot {slot}"


def _empty(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    kwargs.clear()
    kwargs["parents"] = []
    return "empty tree"


def _too_many_rows(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    kwargs["max_rows"] = draw(st.integers(1, n - 1))
    return f"too many rows: the tree has {n} rows; allowed: at most {kwargs['max_rows']}"


def _wrong_length(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    name = draw(st.sampled_from(["tokens", "active", "probs", "slots"]))
    kwargs[name] = draw(st.sampled_from([kwargs[name][:-1], kwargs[name] + kwargs[name][:1]]))
    return f"wrong length: {name} has {len(kwargs[name])} entries, the tree has {n} rows"


def _wrong_dtype(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    name = draw(st.sampled_from(["parents", "tokens", "active", "slots"]))
    kwargs[name] = [float(value) for value in kwargs[name]]
    return f"wrong dtype: {name} must hold "


def _two_dimensional(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    name = draw(st.sampled_from(["parents", "tokens", "active", "probs", "slots"]))
    kwargs[name] = [kwargs[name]]
    return f"{name} must be one-dimensional"


def _negative_prefix(draw: st.DrawFn, kwargs: dict[str, Any], n: int) -> str:
    kwargs["prefix_len"] = draw(st.integers(-5, -1))
    return f"prefix_len must be at least 0, got {kwargs['prefix_len']}"


_SPOILS: dict[str, _Spoil] = {
    "cycle": _cycle,
    "forward parent": _forward_parent,
    "self parent": _self_parent,
    "missing parent": _missing_parent,
    "two roots": _two_roots,
    "root not row 0": _root_not_row_0,
    "inactive root": _inactive_root,
    "active row under an inactive one": _active_under_inactive,
    "token out of range": _token,
    "probability out of range": _probability_range,
    "probability is NaN": _probability_nan,
    "duplicate slot": _duplicate_slot,
    "slot out of range": _slot_range,
    "empty tree": _empty,
    "too many rows": _too_many_rows,
    "wrong length": _wrong_length,
    "wrong dtype": _wrong_dtype,
    "two-dimensional": _two_dimensional,
    "negative prefix": _negative_prefix,
}
