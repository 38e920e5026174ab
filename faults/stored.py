"""Faults of what publication stores: rounded, torn, in another layout, in other layers, once too often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from faults.catalogue import Fault, Knob, Wrap
from faults.slots import live_slots
from faults.wrap import Published, on_publish
from lumotree.backends.protocol import SURFACES, Accepted, Batch

#: What lies in a slot of one layer after publication, what lay there before, accepted rows -> what lies there instead.
Stored = Callable[[Tensor, Tensor, int], Tensor]


def stored_as(change: Stored) -> Callable[[Published], None]:
    """Apply a change to every slot that was published to."""

    def after(done: Published) -> None:
        for i, slot in live_slots(done.batch).items():
            length = int(done.accepted.length[i])
            for layer in done.layers if length else ():
                now, before = done.pool[layer, slot], done.pool_before[layer, slot]
                now.copy_(change(now.clone(), before, length))

    return after


def through(dtype: torch.dtype) -> Stored:
    """Rounded to a narrower dtype and back."""
    return lambda now, before, length: now.to(dtype).to(now.dtype)


def int8(now: Tensor, before: Tensor, length: int) -> Tensor:
    """Quantised to 8 bits with one scale a head."""
    scale = now.abs().amax((-2, -1), keepdim=True).clamp_min(1e-30) / 127
    return (now / scale).round() * scale


def swapped_bytes(now: Tensor, before: Tensor, length: int) -> Tensor:
    """The transposed matrix in the memory of the right one."""
    return now.transpose(-1, -2).contiguous().view(now.shape)


def upper_half_stale(now: Tensor, before: Tensor, length: int) -> Tensor:
    """The upper half of the heads as before: a loop over key heads where value heads belong."""
    half = max(now.shape[0] // 2, 1)
    return torch.cat([now[:half], before[half:]])


def first_dim_tail_stale(now: Tensor, before: Tensor, length: int) -> Tensor:
    """The last head or channel as before."""
    return torch.cat([now[:-1], before[-1:]])


def rolled_heads(now: Tensor, before: Tensor, length: int) -> Tensor:
    """Each head or channel holds its neighbour's."""
    return now.roll(1, 0)


def last_column_zero(now: Tensor, before: Tensor, length: int) -> Tensor:
    """The last column is zero: a tile that ends too early."""
    found = now.clone()
    found[..., -1] = 0
    return found


def last_row_stale(now: Tensor, before: Tensor, length: int) -> Tensor:
    """The last row of each head as before: a tail that no tile covers."""
    found = now.clone()
    found[:, -1] = before[:, -1]
    return found


def scaled(size: float) -> Stored:
    """Every element larger by a relative size."""
    return lambda now, before, length: now * (1 + size)


def one_element(size: float) -> Stored:
    """One element of the last head larger by a relative size."""

    def change(now: Tensor, before: Tensor, length: int) -> Tensor:
        found = now.clone()
        at = (-1, -1, -1)[: now.dim()]
        found[at] = found[at] * (1 + size)
        return found

    return change


def newest_first(now: Tensor, before: Tensor, length: int) -> Tensor:
    """The window in the wrong order."""
    return now.flip(-1)


def one_older(now: Tensor, before: Tensor, length: int) -> Tensor:
    """The window one input too old."""
    return torch.cat([before[:, length - 1 : length] if length < now.shape[1] else now[:, :1], now[:, :-1]], 1)


def one_newer(now: Tensor, before: Tensor, length: int) -> Tensor:
    """The window one input too new: its last place is empty."""
    return torch.cat([now[:, 1:], torch.zeros_like(now[:, :1])], 1)


def short_paths_from_zero(now: Tensor, before: Tensor, length: int) -> Tensor:
    """A path shorter than the window has zeros before it instead of the committed inputs."""
    found = now.clone()
    found[:, : max(now.shape[1] - length, 0)] = 0
    return found


def activated(now: Tensor, before: Tensor, length: int) -> Tensor:
    """The window holds inputs after SiLU."""
    wide = now.to(torch.float32)
    return (wide / (1 + torch.exp(-wide))).to(now.dtype)


def root_skipped(now: Tensor, before: Tensor, length: int) -> Tensor:
    """The window leaves out the root's input: what is shorter reaches back one further."""
    width = now.shape[1]
    if length > width:
        return now
    joined = torch.cat([before, now[:, width - length :][:, 1:]], 1)
    return joined[:, -width:]


_STATE: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Stored]] = {
    "stored_bf16": ("the published state is rounded to bf16", ("N14", "DF15"), (), through(torch.bfloat16)),
    "stored_fp16": ("the published state is rounded to fp16", ("N14",), (), through(torch.float16)),
    "stored_int8": ("the published state is quantised to 8 bits a head", ("R2", "R3"), (), int8),
    "stored_transposed": ("the published state lies in the memory order of the other layout", ("B5", "O6"), (),
                          swapped_bytes),
    "upper_heads_stale": ("publication loops over half of the heads", ("O2", "O3"), ("hv>hk",), upper_half_stale),
    "last_head_stale": ("the last head is not published", ("O2",), (), first_dim_tail_stale),
    "heads_rolled": ("each head's state lands at its neighbour's place", ("X5",), ("hv>hk",), rolled_heads),
    "last_column_zero": ("the last column of a published state is zero", ("N7", "B12"), (), last_column_zero),
    "last_row_stale": ("the last row of a published state is not written", ("B12", "DF27"), (), last_row_stale),
}  # fmt: skip
_HISTORY: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Stored]] = {
    "history_reversed": ("the window is stored newest first", ("B8",), (), newest_first),
    "history_one_older": ("the window ends one input too early", ("B1", "B13", "DF9"), (), one_older),
    "history_one_newer": ("the window starts one input too late", ("B13", "DF10"), (), one_newer),
    "history_from_zero": ("a path shorter than the window has zeros in front of it", ("B8", "B10"), ("prefix",),
                          short_paths_from_zero),
    "history_activated": ("the window holds inputs after the activation", ("B3", "DF27"), (), activated),
    "history_without_root": ("the root's input is missing from the window", ("DF9", "I1"), (), root_skipped),
    "history_transposed": ("the window lies in the memory order of the other layout", ("B5",), (), swapped_bytes),
    "last_channel_stale": ("the last channel is not published", ("B12",), (), first_dim_tail_stale),
    "channels_rolled": ("each channel's window lands at its neighbour's place", ("B5",), (), rolled_heads),
}  # fmt: skip


def _fault(kind: str, surface: str, entry: tuple[str, tuple[str, ...], tuple[str, ...], Stored]) -> Fault:
    statement, classes, needs, change = entry
    wrap = on_publish(surface, after=stored_as(change))
    return Fault(f"{kind}.{surface}", statement, surface, "publish", classes, needs, wrap)


def _sized(kind: str, statement: str, change: Callable[[float], Stored], sizes: tuple[float, ...]) -> Fault:
    def at(size: float) -> Wrap:
        return on_publish("gdn", after=stored_as(change(size)))

    knob = Knob(sizes, "relative error", at)
    return Fault(f"{kind}.gdn", statement, "gdn", "publish", ("R2", "DF19"), ("prefix",), at(sizes[0]), knob=knob)


def _first(layers: Sequence[int], pool: Any) -> Sequence[int]:
    return list(layers)[:1]


def _all_but_last(layers: Sequence[int], pool: Any) -> Sequence[int]:
    return list(layers)[:-1]


def _every(layers: Sequence[int], pool: Any) -> Sequence[int]:
    return list(range(len(pool if isinstance(pool, Tensor) else pool.k)))


_LAYERS: dict[str, tuple[str, tuple[str, ...], Callable[[Sequence[int], Any], Sequence[int]]]] = {
    "first_layer_only": ("only the first of the layers is published", ("D1", "DF36"), _first),
    "last_layer_missing": ("the last of the layers is not published", ("C8", "DF36"), _all_but_last),
    "every_layer": ("all layers are published whichever were asked for", ("DF5", "DF36"), _every),
}


def _root_instead_of_nothing(accepted: Accepted, batch: Batch) -> Accepted:
    """An empty path of a live request publishes its root."""
    empty = (accepted.length == 0) & (batch.state_slot >= 0)
    rows, length = accepted.rows.clone(), accepted.length.clone()
    rows[empty, 0], length[empty] = 0, 1
    return Accepted(rows, length)


def _wiped(done: Published) -> None:
    """An empty path leaves a state of zeros."""
    for i, slot in live_slots(done.batch).items():
        if not int(done.accepted.length[i]):
            done.pool[list(done.layers), slot] = 0


def _twice(surface: str) -> Fault:
    return Fault(f"published_twice.{surface}", "the accepted path is published twice", surface, "publish",
                 ("DF30", "M7"), (), on_publish(surface, times=2))  # fmt: skip


FAULTS = [
    *(_fault(kind, "gdn", entry) for kind, entry in _STATE.items()),
    *(_fault(kind, "conv", entry) for kind, entry in _HISTORY.items()),
    _sized("state_scaled", "every element of a published state is too large", scaled,
           (0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 2.0**-22, 2.0**-23)),
    _sized("state_element", "one element of a published state is too large", one_element,
           (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 2.0**-22, 2.0**-23)),
    *(
        Fault(f"{kind}.{s}", what, s, "publish", classes, ("layers>=2",), on_publish(s, layers=change))
        for kind, (what, classes, change) in _LAYERS.items()
        for s in SURFACES
    ),
    *(
        Fault(f"empty_path_moves.{s}", "an empty path publishes the root", s, "publish", ("A5", "B7", "DF26"),
              ("empty path",), on_publish(s, accepted=_root_instead_of_nothing))
        for s in SURFACES
    ),
    *(
        Fault(f"empty_path_wipes.{s}", "an empty path leaves zeros", s, "publish", ("A5", "I4", "A10"),
              ("empty path", "prefix"), on_publish(s, after=_wiped))
        for s in ("gdn", "conv")
    ),
    *(_twice(s) for s in ("gdn", "conv")),
]  # fmt: skip
