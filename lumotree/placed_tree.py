"""Trees of a topology that was seen before, with other contents: what a decoder makes hundreds of in every second.

Validation, depths, children and path plans depend on parents and activity alone; they are made once for a topology and
carried over. The result equals `Tree.make` with the same arguments.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lumotree.errors import TreeError
from lumotree.tree import Tree

#: Cached properties of `Tree` that follow from parents and activity.
_TOPOLOGY = ("depth", "max_depth", "_children", "_active_children", "active_rows", "leaves", "_plans")


@lru_cache(maxsize=8192)
def _template(parents: bytes, active: bytes) -> Tree:
    tree = Tree.make(np.frombuffer(parents, np.int32), active=np.frombuffer(active, np.bool_))
    for name in _TOPOLOGY:
        getattr(tree, name)
    return tree


def placed(
    parents: ArrayLike,
    tokens: ArrayLike,
    slots: NDArray[np.int64],
    num_slots: int,
    prefix_len: int,
    active: NDArray[np.bool_] | None = None,
    vocab: int | None = None,
) -> Tree:
    """A tree; arguments as those of `Tree.make`. slots must be different and below num_slots: that is not looked at.

    Raises TreeError for a bad topology, lengths that differ, or a token outside the vocabulary.
    """
    rows = np.asarray(parents, np.int32)
    live = np.ones(len(rows), np.bool_) if active is None else np.asarray(active, np.bool_)
    if len(live) != len(rows):
        raise TreeError(f"active: expected {len(rows)} values, one a row, got {len(live)}")
    template = _template(rows.tobytes(), live.tobytes())
    ids = np.array(tokens, np.int64)
    if ids.shape != rows.shape or slots.shape != rows.shape:
        raise TreeError(f"tokens, slots: expected {len(rows)}, one a row, got {ids.shape} and {slots.shape}")
    if int(ids.min()) < 0 or (vocab is not None and int(ids.max()) >= vocab):
        row = int(np.argmin(ids) if ids.min() < 0 else np.argmax(ids))
        raise TreeError(
            f"row {row}: token {ids[row]} is outside the vocabulary; allowed: "
            f"{'non-negative' if vocab is None else f'0..{vocab - 1}'}"
        )
    tree = object.__new__(Tree)
    tree.__dict__.update({name: template.__dict__[name] for name in _TOPOLOGY})
    where = np.array(slots, np.int64)
    for array in (ids, where):
        array.flags.writeable = False
    tree.__dict__.update(
        parents=template.parents, tokens=ids, active=template.active, probs=None, slots=where, num_slots=num_slots,
        prefix_len=prefix_len, vocab=vocab,
    )  # fmt: skip
    return tree
