"""What a case must offer for a fault to change anything, by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from faults.blind_trees import bends, cut_ring, hidden_by, mask_word, path_heads, row_ring, third_level
from lumotree.contract import Contract, Dims
from lumotree.tree import Tree


@dataclass(frozen=True)
class Scene:
    """What faults may ask about a case.

    trees: one a live request, with slots and prefix_len. state_slots: of the live requests; slots: in the pool.
    padding: padding requests of the batch. overlap: candidates' KV slots are committed slots of the same request.
    """

    trees: Sequence[Tree]
    dims: Dims
    contract: Contract = field(default_factory=Contract)
    regime: str = "random"
    page_size: int = 1
    state_slots: Sequence[int] = ()
    slots: int = 0
    padding: int = 0
    overlap: bool = False


@dataclass(frozen=True)
class Need:
    """A condition on a scene, and how to say it."""

    statement: str
    holds: Callable[[Scene], bool]


def _branches(s: Scene) -> bool:
    return any(int(t.parents[row]) != before for t in s.trees for before, row in itertools.pairwise(t.active_rows))


def _siblings(s: Scene) -> bool:
    return any(len(t.active_children(row)) > 1 for t in s.trees for row in t.active_rows)


def _deep(least: int) -> Callable[[Scene], bool]:
    return lambda s: any(t.max_depth >= least for t in s.trees)


def _requests(least: int) -> Callable[[Scene], bool]:
    return lambda s: len(s.trees) >= least


def _regime(name: str) -> Callable[[Scene], bool]:
    return lambda s: s.regime == name


def _longer_than_window(s: Scene) -> bool:
    return any(t.max_depth + 1 >= s.dims.conv_width for t in s.trees)


def _sizes_alike(s: Scene) -> bool:
    return len({t.n for t in s.trees}) < len(s.trees)


def _no_involution(s: Scene) -> bool:
    order = sorted(range(len(s.state_slots)), key=lambda i: s.state_slots[i])
    return any(order[order[i]] != i for i in range(len(order)))


def _other_mask(s: Scene) -> bool:
    return any(hidden_by(before, tree) for before, tree in itertools.pairwise(s.trees))


def _second_page(s: Scene) -> bool:
    return s.page_size > 1 and any(t.prefix_len > s.page_size for t in s.trees)


def _path_over_pages(s: Scene) -> bool:
    return any(t.prefix_len // s.page_size < (t.prefix_len + t.max_depth) // s.page_size for t in s.trees)


def _ragged_batch(s: Scene) -> bool:
    count = len(s.trees) + s.padding
    return len(s.trees) > count // 4 * 4 > 0


def _keys(least: int) -> Callable[[Scene], bool]:
    return lambda s: any(t.prefix_len + t.max_depth + 1 >= least for t in s.trees)


NEEDS: dict[str, Need] = {
    "branch": Need("an active row whose parent is not the active row before it", _branches),
    "siblings": Need("two active rows with one parent", _siblings),
    "depth>=1": Need("an active row besides the root", lambda s: any(len(t.active_rows) > 1 for t in s.trees)),
    "depth>=2": Need("a row with a grandparent", _deep(2)),
    "depth>=3": Need("a row at depth 3", _deep(3)),
    "rows>=2": Need("a request of two rows", lambda s: any(t.n > 1 for t in s.trees)),
    "inactive": Need("an inactive row", lambda s: any(not bool(t.active.all()) for t in s.trees)),
    "window": Need("a path at least as long as the convolution is wide", _longer_than_window),
    "prefix": Need("committed tokens", lambda s: any(t.prefix_len > 0 for t in s.trees)),
    "start": Need("a request without committed tokens", lambda s: any(t.prefix_len == 0 for t in s.trees)),
    "requests>=2": Need("two requests", _requests(2)),
    "requests>=3": Need("three requests", _requests(3)),
    "requests>=6": Need("six requests", _requests(6)),
    "alike": Need("two requests of the same number of rows", _sizes_alike),
    "3-cycle": Need("state slots in an order that is no involution", _no_involution),
    "slot>=4": Need("a live state slot numbered 4 or more", lambda s: max(s.state_slots, default=0) >= 4),
    "slot>=8": Need("a live state slot numbered 8 or more", lambda s: max(s.state_slots, default=0) >= 8),
    "free slot": Need("a free state slot", lambda s: s.slots > len(s.state_slots)),
    "padding": Need("a padding request", lambda s: s.padding > 0),
    "page>1": Need("pages of more than one token", lambda s: s.page_size > 1),
    "layers>=2": Need("two layers", lambda s: s.dims.layers >= 2),
    "layers>=3": Need("three layers", lambda s: s.dims.layers >= 3),
    "overlap": Need("candidate slots that are also destinations", lambda s: s.overlap),
    "hk>=2": Need("two key heads", lambda s: s.dims.hk >= 2),
    "hv>hk": Need("more value heads than key heads", lambda s: s.dims.hv > s.dims.hk),
    "hk>=2, hv>hk": Need("a head map that matters", lambda s: 1 < s.dims.hk < s.dims.hv),
    "kv heads>=2": Need("a KV head map that matters", lambda s: 1 < s.dims.kv_heads < s.dims.q_heads),
    "near_one": Need("decay close to 1", _regime("near_one")),
    "near_zero": Need("decay close to 0", _regime("near_zero")),
    "zero_keys": Need("keys of zero", _regime("zero_keys")),
    "tiny_keys": Need("keys whose norm is about that of the epsilon", _regime("tiny_keys")),
    "large_gates": Need("gates that saturate", _regime("large_gates")),
    "mid_gates": Need("gates where softplus bends", _regime("mid_gates")),
    "cold": Need("scores far below zero", _regime("cold")),
    "exact": Need("exact-grid operands", _regime("exact")),
    "depth>=4": Need("a row at depth 4", _deep(4)),
    "parent lost to a ring of 4": Need(
        "a row whose parent's place in a ring of 4 rows was taken before it", lambda s: bends(row_ring(4))(s.trees)
    ),
    "cut lost to a ring of 2": Need(
        "a branch whose cut's place in a ring of 2 was taken before it", lambda s: bends(cut_ring(2))(s.trees)
    ),
    "ancestor >= 8": Need("a row whose parent is row 8 or later", lambda s: bends(mask_word(8))(s.trees)),
    "third level": Need("a plan of three levels", lambda s: bends(third_level)(s.trees)),
    "path of 2": Need(
        "a path of two rows in a plan", lambda s: any(path_heads(t) != list(range(t.n)) for t in s.trees)
    ),
    "other mask": Need("an active row whose number is inactive in the request before", _other_mask),
    "ragged channels": Need(
        "more than 16 channels, no multiple of 16",
        lambda s: s.dims.conv_channels > 16 and s.dims.conv_channels % 16 > 0,
    ),
    "second page": Need("committed tokens on a second page of more than one", _second_page),
    "path over pages": Need("a path that goes on on the next page", _path_over_pages),
    "ragged batch": Need("more than four requests, no multiple of four", _ragged_batch),
    "keys>=3": Need("three visible keys", _keys(3)),
    "ragged keys": Need("key dims that are no multiple of 8", lambda s: s.dims.dk % 8 > 0 and s.dims.dk > 8),
    "partial rotation": Need("channels that do not rotate", lambda s: s.dims.rotary_dim < s.dims.head_dim),
    "slot>=65536": Need(
        "a candidate's KV slot numbered 65,536 or more", lambda s: any(int(t.slots.max()) >= 65536 for t in s.trees)
    ),
    "path = history": Need("a path exactly as long as the history", lambda s: _deep(s.dims.conv_width - 2)(s)),
    "empty path": Need("a contract with empty paths", lambda s: s.contract.empty_path),
}
