"""Blind faults of verification: limits of rings, tiles, words and masks that only some trees and batches exceed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from faults.blind_trees import (
    Bend,
    bent,
    cut_ring,
    depths,
    hidden_by,
    mask_word,
    path_heads,
    row_ring,
    third_level,
    tile_edge,
    trees_of,
)
from faults.catalogue import Fault, Knob, Wrap
from faults.slots import live_slots, read_from
from faults.wrap import Faulty, Verified, copied, on_verify
from lumotree.backends.batch import flat_slots
from lumotree.backends.protocol import SURFACES, AttentionOps, Batch

CHANNEL_TILE = 16

#: operands, pool (a copy), batch, layer -> what a second, wrong computation reads, and which outputs are its own.
Other = Callable[[Any, Any, Batch, int], tuple[Any, Any, Tensor]]


def spliced(surface: str, others: Callable[[Any], list[Other]]) -> Wrap:
    """Some active rows' outputs come from a second computation on other operands or another state.

    All else is the right one's, which runs last, so that what is recorded and cached is right.
    """
    verify = SURFACES[surface][0]

    def wrap(inner: Any) -> Faulty:
        faulty = Faulty(inner)

        def method(ops: Any, pool: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            parts = []
            active = batch.active.view(-1, *[1] * (out.dim() - 1))
            for other in others(pool):
                wrong_ops, wrong_pool, where = other(ops, copied(pool), batch, layer)
                wrong = torch.empty_like(out)
                getattr(inner, verify)(wrong_ops, wrong_pool, batch, ws, wrong, layer)
                parts.append((wrong, where & active))
            getattr(inner, verify)(ops, pool, batch, ws, out, layer)
            right = out.clone()
            for wrong, where in parts:
                out.copy_(torch.where(where, wrong, out))
            faulty.note(f"{verify}.out", right, out)

        setattr(faulty, verify, method)
        return faulty

    return wrap


def _per_path_beta(ops: Any, batch: Batch) -> Any:
    heads: list[int] = []
    for tree in trees_of(batch):
        first = len(heads)
        heads += [first + head for head in path_heads(tree)]
    return replace(ops, b=ops.b[torch.tensor(heads, device=ops.b.device)].contiguous())


def _masked_by_other(done: Verified) -> None:
    batch, cu = done.batch, done.batch.cu_rows.tolist()
    if len(live_slots(batch)) == batch.requests:
        return
    starts = [lo for i, lo in enumerate(cu[:-1]) if cu[i + 1] > lo]
    trees = trees_of(batch)
    for n in range(1, len(trees)):
        for row in hidden_by(trees[n - 1], trees[n]):
            done.out[starts[n] + row] = torch.nan


def without_padding(slot: int, i: int, live: dict[int, int], slots: int) -> int:
    """The slot at the place that a live request has among the live ones; its own where that place is padding."""
    return live.get(list(live).index(i), slot)


def _head_of_history(depth: int) -> Other:
    """A row at this depth reads as many committed inputs as it should, but the oldest ones."""

    def other(ops: Any, pool: Tensor, batch: Batch, layer: int) -> tuple[Any, Tensor, Tensor]:
        found = pool.clone()
        found[..., depth:] = pool[..., : pool.shape[-1] - depth]
        return ops, found, (depths(batch) == depth)[:, None]

    return other


def _ragged_channels(done: Verified) -> None:
    channels = done.out.shape[1]
    full = channels // CHANNEL_TILE * CHANNEL_TILE
    if full:
        tail = channels - full
        done.out[:, full:] = done.out[:, full - CHANNEL_TILE : full - CHANNEL_TILE + tail].clone()


def _last_group(ops: AttentionOps, cache: Any, batch: Batch, layer: int) -> tuple[Any, Any, Tensor]:
    heads = ops.k.shape[1]
    if heads > 1:
        cache.k[layer, :, -1], cache.v[layer, :, -1] = cache.k[layer, :, -2].clone(), cache.v[layer, :, -2].clone()
        order = [*range(heads - 1), heads - 2]
        wrong = replace(ops, k=ops.k[:, order].contiguous(), v=ops.v[:, order].contiguous())
    else:
        wrong = ops
    where = torch.zeros(ops.q.shape[1], dtype=torch.bool, device=ops.q.device)
    where[-(ops.q.shape[1] // heads) :] = True
    return wrong, cache, where[None, :, None]


def _page_edge(ops: Any, cache: Any, batch: Batch, layer: int) -> tuple[Any, Any, Tensor]:
    """The first token of a page is looked for on the page before."""
    size = batch.page_size
    k, v = cache.k.clone(), cache.v.clone()
    for i in live_slots(batch):
        first = list(range(size, int(batch.prefix_len[i]), size)) if size > 1 else []
        if first:
            right = flat_slots(batch.page_table, size, i, first)
            wrong = flat_slots(batch.page_table, size, i, [p - size for p in first])
            cache.k[layer, right], cache.v[layer, right] = k[layer, wrong], v[layer, wrong]
    return ops, cache, torch.ones(1, 1, 1, dtype=torch.bool, device=k.device)


def _bent(kind: str, surface: str, statement: str, classes: tuple[str, ...], need: str, sizes: tuple[float, ...],
          unit: str, bend: Callable[[int], Bend]) -> Fault:  # fmt: skip
    def at(size: float) -> Wrap:
        return on_verify(surface, batch=bent(bend(int(size))))

    return Fault(f"{kind}.{surface}", statement, surface, "verify", classes, (need,), at(sizes[0]),
                 section="" if classes else "contract section 1", knob=Knob(sizes, unit, at), blind=True)  # fmt: skip


def _verify(kind: str, surface: str, statement: str, classes: tuple[str, ...], needs: tuple[str, ...], wrap: Wrap,
            section: str = "") -> Fault:  # fmt: skip
    return Fault(f"{kind}.{surface}", statement, surface, "verify", classes, needs, wrap, section=section, blind=True)


FAULTS = [
    _bent("row_ring", "gdn", "states of rows lie in a ring: a parent further back than it is long has been overwritten",
          ("D4", "H2"), "parent lost to a ring of 4", (4, 8, 16), "rows kept", row_ring),
    _bent("tile_edge", "gdn", "the last row of every tile of a path leaves no state for its children",
          ("F1", "F2"), "depth>=4", (4, 8, 16), "rows of a tile", tile_edge),
    _bent("cut_ring", "gdn", "the buffer of cut states is too short: a branch starts from a later cut's state",
          ("D4", "E8"), "cut lost to a ring of 2", (2, 3, 4), "cuts kept", cut_ring),
    _bent("mask_word", "attention", "a row's mask of ancestors is one word: those numbered beyond it are not visible",
          ("H8", "H14"), "ancestor >= 8", (8, 16, 32, 64), "bits", mask_word),
    _verify("third_level", "gdn", "only two levels of paths are run in order: deeper ones start from the root's state",
            ("H2", "DF23"), ("third level",), on_verify("gdn", batch=bent(third_level))),
    _verify("beta_of_path", "gdn", "beta is loaded once a path, from the path's first row", (), ("path of 2",),
            on_verify("gdn", ops=_per_path_beta), "contract section 2"),
    _verify("mask_of_other", "gdn", "with padding in the batch rows are masked like those of the request before",
            ("E7", "F5"), ("padding", "other mask"), on_verify("gdn", after=_masked_by_other)),
    _verify("padding_uncounted", "gdn", "behind a padding request, state slots are looked up by the count of live ones",
            ("F5", "E7"), ("padding", "requests>=2", "prefix"), on_verify("gdn", pool=read_from(without_padding))),
    _verify("head_of_history", "conv", "rows near the root read the committed window from its front, not from its end",
            ("B1", "B4"), ("depth>=1", "prefix"),
            spliced("conv", lambda pool: [_head_of_history(d) for d in range(1, pool.shape[-1])])),
    _verify("ragged_channels", "conv", "channels behind the last full tile of 16 repeat those of that tile",
            ("B12", "O6"), ("ragged channels",), on_verify("conv", after=_ragged_channels)),
    _verify("last_group_map", "attention", "query heads of the last group read the KV head before theirs",
            ("O3", "X5"), ("kv heads>=2",), spliced("attention", lambda cache: [_last_group])),
    _verify("page_edge", "attention", "the first committed token of a page is looked for on the page before",
            ("F2", "I6", "H11"), ("second page",), spliced("attention", lambda cache: [_page_edge])),
]  # fmt: skip
