"""Faults of state slots: the wrong slot is read in verification, or written in publication."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from faults.catalogue import Fault
from faults.wrap import Published, on_publish, on_verify
from lumotree.backends.protocol import Batch

STATES = ("gdn", "conv")

#: slot, batch index, slots of all live requests by batch index, slots of the pool -> another slot.
Place = Callable[[int, int, dict[int, int], int], int]


def live_slots(batch: Batch) -> dict[int, int]:
    """Batch index -> state slot of each live request."""
    return {i: slot for i, slot in enumerate(batch.state_slot.tolist()) if slot >= 0}


def neighbour(slot: int, i: int, live: dict[int, int], slots: int) -> int:
    """The slot of the next live request."""
    order = list(live)
    return live[order[(order.index(i) + 1) % len(order)]]


def zero(slot: int, i: int, live: dict[int, int], slots: int) -> int:
    """Slot 0."""
    return 0


def batch_index(slot: int, i: int, live: dict[int, int], slots: int) -> int:
    """The place in the batch."""
    return i % slots


def one_further(slot: int, i: int, live: dict[int, int], slots: int) -> int:
    """The slot behind."""
    return (slot + 1) % slots


def int32_offset(slot: int, i: int, live: dict[int, int], slots: int) -> int:
    """Where `slot * 2^29`, computed in 32 signed bits, points: negative from slot 4 on, then back into the pool."""
    offset = (slot * 2**29) & 0xFFFFFFFF
    signed = offset - 2**32 if offset >= 2**31 else offset
    return (signed // 2**29) % slots


def uint32_offset(slot: int, i: int, live: dict[int, int], slots: int) -> int:
    """Where `slot * 2^29`, computed in 32 unsigned bits, points: slot 8 is slot 0."""
    return ((slot * 2**29) & 0xFFFFFFFF) // 2**29 % slots


def inverse_order(slot: int, i: int, live: dict[int, int], slots: int) -> int:
    """Slots gathered by a sorting permutation where its inverse belongs: unseen while it is its own inverse."""
    at = list(live)
    order = sorted(range(len(at)), key=lambda n: live[at[n]])
    return live[at[order[order[at.index(i)]]]]


def read_from(place: Place) -> Callable[[Tensor, Batch, int], Tensor]:
    """A copy of the pool in which each live slot holds what another one holds."""

    def read(pool: Tensor, batch: Batch, layer: int) -> Tensor:
        found, live = pool.clone(), live_slots(batch)
        for i, slot in live.items():
            found[:, slot] = pool[:, place(slot, i, live, pool.shape[1])]
        return found

    return read


def written_to(place: Place, *, also: bool = False) -> Callable[[Published], None]:
    """What was published lies in another slot, and (unless `also`) the right one is as it was."""

    def move(done: Published) -> None:
        live, pool, before = live_slots(done.batch), done.pool, done.pool_before
        lengths = done.accepted.length.tolist()
        results = {i: pool[:, slot].clone() for i, slot in live.items() if lengths[i]}
        chosen = list(done.layers)
        for i in results if not also else ():
            pool[chosen, live[i]] = before[chosen, live[i]]
        for i, result in results.items():
            pool[chosen, place(live[i], i, live, pool.shape[1])] = result[chosen]

    return move


def a_free_slot(slot: int, i: int, live: dict[int, int], slots: int) -> int:
    """The first slot that belongs to nobody; one's own where all are taken."""
    return next((s for s in range(slots) if s not in live.values()), slot)


def _padding_to_zero(done: Published) -> None:
    """Padding requests write another request's state to the slot that -1 was clamped to."""
    live = live_slots(done.batch)
    others = [slot for slot in live.values() if slot]
    if others and len(live) < done.batch.requests:
        chosen = list(done.layers)
        done.pool[chosen, 0] = done.pool[chosen, others[-1]].clone()


def _padding_repeats(done: Published) -> None:
    """Padding requests repeat the first live index and write back what was there before."""
    live = live_slots(done.batch)
    if live and len(live) < done.batch.requests:
        chosen, slot = list(done.layers), live[min(live)]
        done.pool[chosen, slot] = done.pool_before[chosen, slot]


def _first_spoilt_by_padding(pool: Tensor, batch: Batch, layer: int) -> Tensor:
    """Padding aliases the scratch of the first live request: it starts from zero."""
    live = live_slots(batch)
    if not live or len(live) == batch.requests:
        return pool
    found = pool.clone()
    found[:, live[min(live)]] = 0
    return found


def _zeros(pool: Tensor, batch: Batch, layer: int) -> Tensor:
    return torch.zeros_like(pool)


def _layer_zero(pool: Tensor, batch: Batch, layer: int) -> Tensor:
    return pool[:1].expand_as(pool).contiguous()


def _two_layers(pool: Tensor, batch: Batch, layer: int) -> Tensor:
    return pool[torch.arange(len(pool), device=pool.device) % 2]


_READS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Tensor, Batch, int], Tensor]]] = {
    "reads_neighbour": ("verification starts from the state of the next request", ("C1", "A7", "DF11"),
                        ("requests>=2", "prefix"), read_from(neighbour)),
    "reads_slot_zero": ("verification starts from slot 0", ("A1", "C6", "DF4", "DF33"), ("prefix",), read_from(zero)),
    "reads_batch_index": ("the place in the batch is taken for the state slot", ("E8", "DF20"), ("prefix",),
                          read_from(batch_index)),
    "reads_int32_offset": ("the offset of a slot overflows 32 signed bits", ("P3", "P4"), ("slot>=4", "prefix"),
                           read_from(int32_offset)),
    "reads_uint32_offset": ("the offset of a slot overflows 32 unsigned bits", ("P2",), ("slot>=8", "prefix"),
                            read_from(uint32_offset)),
    "reads_inverse_order": ("slots are permuted by the sorting order instead of its inverse", ("C1", "DF22"),
                            ("requests>=3", "3-cycle", "prefix"), read_from(inverse_order)),
    "reads_zero": ("verification starts from a state of zeros", ("G1", "G2"), ("prefix",), _zeros),
    "reads_layer_zero": ("every layer starts from the state of layer 0", ("DF36",), ("layers>=2", "prefix"),
                         _layer_zero),
    "reads_two_layers": ("layers share a ring of two", ("D4", "I8"), ("layers>=3", "prefix"), _two_layers),
    "padding_spoils_first": ("with padding in the batch the first request starts from zero", ("E5", "E7"),
                             ("padding", "prefix"), _first_spoilt_by_padding),
}  # fmt: skip

_WRITES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Published], None]]] = {
    "writes_neighbour": ("publication lands in the slot of the next request", ("C1", "C3"), ("requests>=2",),
                         written_to(neighbour)),
    "writes_slot_zero": ("publication lands in slot 0", ("C6", "A1"), (), written_to(zero)),
    "writes_batch_index": ("publication lands in the slot numbered like the place in the batch", ("E8", "DF20"), (),
                           written_to(batch_index)),
    "writes_next_slot": ("publication lands one slot too far", ("F1", "F4", "F2"), (), written_to(one_further)),
    "writes_int32_offset": ("the offset of a destination overflows 32 signed bits", ("P3", "P4"), ("slot>=4",),
                            written_to(int32_offset)),
    "writes_uint32_offset": ("the offset of a destination overflows 32 unsigned bits", ("P2",), ("slot>=8",),
                             written_to(uint32_offset)),
    "writes_free_slot": ("publication also writes a slot that belongs to no request", ("C6", "D3"), ("free slot",),
                         written_to(a_free_slot, also=True)),
    "padding_writes_zero": ("the slot -1 of padding is clamped to 0 and written", ("E1",), ("padding",),
                            _padding_to_zero),
    "padding_repeats": ("padding repeats the first live slot and writes back its old state", ("E3",), ("padding",),
                        _padding_repeats),
}  # fmt: skip

FAULTS = [
    *(
        Fault(f"{kind}.{s}", what, s, "verify", classes, needs, on_verify(s, pool=change))
        for kind, (what, classes, needs, change) in _READS.items()
        for s in STATES
    ),
    *(
        Fault(f"{kind}.{s}", what, s, "publish", classes, needs, on_publish(s, after=change))
        for kind, (what, classes, needs, change) in _WRITES.items()
        for s in STATES
    ),
]
