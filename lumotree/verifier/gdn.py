"""Gated DeltaNet: path-parallel verification, and publication by native replay.

The lanes of a level, of every request, advance together in tiles (lanes of like length times some heads); a lane's
state leaves its tile only where the plan cuts it. `lumotree.verifier.step` says why a tile's shape cannot change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lumotree.backends.protocol import Batch
from lumotree.contract import Contract
from lumotree.verifier.lanes import Lane, alike, longest_first, plan_levels, steps
from lumotree.verifier.step import Operands, Reduce, halve_rows, joined, step

#: Lane-heads of a tile, of a state of `TILE_STATE` elements. 64 of a 27B layer are 4 MiB of state: big enough that the
#: calls cost little beside the arithmetic, small enough for the last-level cache.
TILE = 64
TILE_STATE = 128 * 128


class Scratch:
    """fp32 buffers that outlive a call, because fresh pages cost more than the arithmetic done in them.

    Nothing in them is read by a later call.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """A contiguous tensor of a shape, unset; the next `take` of the same name and device invalidates it."""
        size = math.prod(shape)
        flat = self._flat.get((name, device))
        # A tensor made in inference mode may not be written outside of it.
        barred = flat is not None and flat.is_inference() and not torch.is_inference_mode_enabled()
        if flat is None or flat.numel() < size or barred:
            flat = self._flat[name, device] = torch.empty(size, dtype=torch.float32, device=device)
        return flat[:size].view(*shape)


def matrix(pool: Tensor, slot: int, heads: slice, layout: str) -> Tensor:
    """View `[h, dk, dv]` of a slot of one layer's pool `[S, HV, ..]`."""
    view = pool[slot, heads]
    return view.transpose(-1, -2) if layout == "VK" else view


def advance(
    state: Tensor,
    scratch: Tensor,
    lanes: Sequence[Lane],
    ops: Operands,
    heads: slice,
    contract: Contract,
    reduce: Reduce,
    out: Tensor | None = None,
) -> Iterator[list[int]]:
    """Run lanes (longest first) through a tile `[P, h, dk, dv]` in place, yielding the rows of each step after it.

    Lane p's state is `state[p]`. With `out` (bf16 `[T, HV, dv]`) the rows' outputs are written to it after the last
    step.
    """  # fmt: skip
    plan = steps(lanes)
    order = [row for rows in plan for row in rows]
    taken = ops.take(order, heads)  # once for the tile: gathering step by step costs more than small steps do
    alone = len(order) == 1
    written = None if out is None or alone else torch.empty_like(taken.v, dtype=out.dtype)
    at = 0
    for rows in plan:
        part = slice(at, at + len(rows))
        live = state[: len(rows)]
        o = step(live, scratch[: len(rows)], taken.part(part), reduce, output=out is not None)
        if written is not None and o is not None:
            written[part].copy_(o)
        elif out is not None and o is not None:
            out[order[0], heads].copy_(o[0])
        if contract.carry == "bf16":
            live.copy_(live.to(torch.bfloat16))
        at = part.stop
        yield rows
    if out is not None and written is not None:
        out[torch.tensor(order, device=out.device), heads] = written


def room(state: int) -> int:
    """Lane-heads of a tile, of states of so many elements."""
    return TILE * max(1, TILE_STATE // state)


def tiles(lanes: Sequence[Lane], heads: int, state: int = TILE_STATE) -> Iterator[tuple[list[Lane], slice]]:
    """Cut lanes (longest first) times heads into tiles of about `TILE` lane-heads, more where a state is smaller.

    state: elements of one lane-head. Lanes that fit into one tile stay together whatever their lengths: few calls
    matter more there than a tile that stays full.
    """
    most = room(state)
    for run in [list(lanes)] if 0 < len(lanes) * heads <= most else alike(lanes):
        width = max(1, most // len(run))
        for lo in range(0, heads, width):
            yield run, slice(lo, min(lo + width, heads))


def verify(
    ops: Operands,
    pool: Tensor,
    batch: Batch,
    out: Tensor,
    contract: Contract,
    scratch: Scratch,
    reduce: Reduce = halve_rows,
) -> None:
    """Outputs of all active rows of a batch, in temporary state.

    pool: one layer's `[S, HV, ..]`, only read. out: bf16 `[T, HV, dv]`; inactive rows are not written.
    """  # fmt: skip
    slots, cut_index = batch.state_slot.tolist(), batch.plan.cut_index.tolist()
    hv, dk, dv = ops.k.shape[1], ops.k.shape[2], ops.v.shape[2]
    cuts = scratch.take("cuts", (max(cut_index, default=-1) + 1, hv, dk, dv), pool.device)
    for level in plan_levels(batch):
        for lanes, heads in tiles(level, hv, dk * dv):
            shape = (len(lanes), heads.stop - heads.start, dk, dv)
            state = scratch.take("state", shape, pool.device)
            for p, lane in enumerate(lanes):
                cut = cut_index[lane.source] if lane.source >= 0 else None
                committed = matrix(pool, slots[lane.request], heads, contract.layout)
                state[p].copy_(committed if cut is None else cuts[cut, heads])
            temporary = scratch.take("product", shape, pool.device)
            for rows in advance(state, temporary, lanes, ops, heads, contract, reduce, out):
                for p, row in enumerate(rows):
                    if cut_index[row] >= 0:
                        cuts[cut_index[row], heads].copy_(state[p])


def replay(
    ops: Operands,
    pool: Tensor,
    lanes: Sequence[Lane],
    slots: Sequence[int],
    contract: Contract,
    scratch: Scratch,
    reduce: Reduce = halve_rows,
    out: Tensor | None = None,
) -> None:
    """Advance the committed states along lanes (longest first), in place; other slots are not touched.

    pool: one layer's `[S, HV, ..]`. This is publication (lanes = accepted paths) and, with `out`, the one-token step.
    """  # fmt: skip
    hv, dk, dv = ops.k.shape[1], ops.k.shape[2], ops.v.shape[2]
    for run, heads in tiles(lanes, hv, dk * dv):
        shape = (len(run), heads.stop - heads.start, dk, dv)
        state = scratch.take("state", shape, pool.device)
        homes = [matrix(pool, slots[lane.request], heads, contract.layout) for lane in run]
        for p, home in enumerate(homes):
            state[p].copy_(home)
        temporary = scratch.take("product", shape, pool.device)
        for _ in advance(state, temporary, run, ops, heads, contract, reduce, out):
            pass
        for p, home in enumerate(homes):
            home.copy_(state[p])


def replay_layers(
    operands: Callable[[int], Operands],
    pool: Tensor,
    layers: Sequence[int],
    lanes: Sequence[Lane],
    slots: Sequence[int],
    contract: Contract,
    scratch: Scratch,
    reduce: Reduce = halve_rows,
) -> None:
    """`replay` along the same lanes in several layers of a pool `[L, S, HV, ..]`, as many at a time as fill a tile: to
    the replay another layer is another request. operands: those of a layer, rows numbered as in the lanes.
    """
    hv, state = pool.shape[2], math.prod(pool.shape[3:])
    together = max(1, room(state) // (len(lanes) * hv))
    flat, count = pool.view(-1, *pool.shape[2:]), pool.shape[1]
    for lo in range(0, len(layers), together):
        own = layers[lo : lo + together]
        found = [operands(layer) for layer in own]
        rows = len(found[0].v)
        copies = [
            Lane(tuple(i * rows + row for row in lane.rows), lane.source, i * len(slots) + lane.request)
            for i in range(len(own))
            for lane in lanes
        ]
        places = [layer * count + slot for layer in own for slot in slots]
        replay(joined(found), flat, longest_first(copies), places, contract, scratch, reduce)
