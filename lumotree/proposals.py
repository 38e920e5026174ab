"""Proposals made to fit: the cycle cuts what a drafter would like to what can be of use, and gives it slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lumotree.draft_types import Proposal
from lumotree.errors import TreeError
from lumotree.placed_tree import placed
from lumotree.slots import Capacity


def root_alone(token: int) -> Proposal:
    """Zero drafts."""
    return chunk([token])


def chunk(tokens: Sequence[int]) -> Proposal:
    """A chain of given tokens."""
    count = len(tokens)
    return Proposal(placed(np.arange(count) - 1, tokens, np.arange(count), count, 0))


def fitted(
    proposal: Proposal, tokens: NDArray[np.int64], committed: int, depth: int, slots: NDArray[np.int64],
    capacity: Capacity, vocab: int,
) -> Proposal:  # fmt: skip
    """The proposal at its place: prefix length, candidate slots, and no active row deeper than `depth`.

    Laws stay as they are: a row whose children are cut off is a leaf, and the law of a leaf's children is not read.
    Raises TreeError for a root that does not carry the pending token, more rows than the decoder verifies in one cycle,
    or a token outside the vocabulary.
    """
    tree = proposal.tree
    if tree.n > capacity.rows:
        raise TreeError(f"proposal: the tree has {tree.n} rows; allowed: at most {capacity.rows}")
    if int(tree.tokens[0]) != int(tokens[committed]):
        raise TreeError(
            f"proposal: expected the pending token {int(tokens[committed])} in row 0, got token={int(tree.tokens[0])}"
        )
    live = tree.active & (tree.depth <= depth)
    at_place = placed(tree.parents, tree.tokens, slots, capacity.flat_slots, committed, live, vocab)
    return Proposal(at_place, proposal.laws)
