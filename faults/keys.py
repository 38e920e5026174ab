"""Faults of attention's memory: what is visible, at which position, in which slot, and where accepted KV goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from faults.catalogue import Fault, Knob, Wrap
from faults.outputs import active_of
from faults.paths import paths_of
from faults.slots import live_slots
from faults.topology import requests_of
from faults.wrap import Published, Verified, on_publish, on_verify
from lumotree.backends.batch import flat_slots
from lumotree.backends.protocol import Batch

Meta = Callable[[Batch], Batch]


def _position(change: Callable[[Batch], Tensor]) -> Meta:
    return lambda b: replace(b, position=change(b).to(b.position.dtype).clamp(min=0))


def _prefix_of_rows(b: Batch) -> Tensor:
    return b.prefix_len[b.row_request.long()]


def row_numbers(b: Batch) -> Tensor:
    """The number of each row within its request, [T]."""
    return torch.arange(b.rows, device=b.position.device) - b.cu_rows[b.row_request.long()]


def _inactive_before(b: Batch) -> Tensor:
    off = (~b.active).to(torch.int64)
    counted = off.cumsum(0) - off
    return counted - counted[b.cu_rows[b.row_request.long()].long()]


def _by_slot(b: Batch) -> Tensor:
    """The number of the candidate's slot in its page table, cut to the positions there are."""
    return torch.minimum(b.row_slot, b.position.max())


def _shifted(size: float) -> Meta:
    return _position(lambda b: b.position + int(size))


def _prefix(change: Callable[[Tensor], Tensor]) -> Meta:
    return lambda b: replace(b, prefix_len=change(b.prefix_len))


def _shorter(size: float) -> Meta:
    return _prefix(lambda n: (n - int(size)).clamp(min=0))


def _pages_of_neighbour(b: Batch) -> Batch:
    """Each request reads its neighbour's pages, where that has enough of them."""
    table, live = b.page_table.clone(), list(live_slots(b))
    need = -(-b.prefix_len // b.page_size)
    for n, i in enumerate(live):
        other = live[(n + 1) % len(live)]
        if int((b.page_table[other] >= 0).sum()) >= int(need[i]):
            table[i] = b.page_table[other]
    return replace(b, page_table=table)


def _linear_pages(b: Batch) -> Batch:
    """Committed pages are taken to follow the first one."""
    first = b.page_table[:, :1]
    count = torch.arange(b.page_table.shape[1], device=first.device)
    highest = int(b.page_table.max())
    run = torch.minimum(first + count, torch.full_like(first, highest))
    return replace(b, page_table=torch.where(b.page_table >= 0, run, b.page_table).to(b.page_table.dtype))


def _slots_rolled(b: Batch) -> Batch:
    """Candidates write their keys and values to the next candidate's slot, and read them there."""
    slot = b.row_slot.clone()
    for lo, hi in requests_of(b):
        slot[lo:hi] = slot[lo:hi].roll(-1)
    return replace(b, row_slot=slot)


def _keys_unrotated(done: Verified) -> None:
    rows = active_of(done.batch)
    done.pool.k[done.layer, done.batch.row_slot[rows].long()] = done.ops.k[rows]


def _values_unwritten(done: Verified) -> None:
    at = done.batch.row_slot[active_of(done.batch)].long()
    done.pool.v[done.layer, at] = done.pool_before.v[done.layer, at]


def _key_for_value(done: Verified) -> None:
    rows = active_of(done.batch)
    done.pool.v[done.layer, done.batch.row_slot[rows].long()] = done.ops.k[rows]


#: accepted local rows, request, batch -> (rows that are read, positions that are written).
Moves = Callable[[list[int], int, Batch], tuple[list[int], list[int]]]


def _right(path: list[int], i: int, b: Batch) -> tuple[list[int], list[int]]:
    start = int(b.prefix_len[i])
    return path, list(range(start, start + len(path)))


def _to_row_numbers(path: list[int], i: int, b: Batch) -> tuple[list[int], list[int]]:
    room = int((b.page_table[i] >= 0).sum()) * b.page_size - 1
    return path, [min(int(b.prefix_len[i]) + row, room) for row in path]


def _depth_one_late(path: list[int], i: int, b: Batch) -> tuple[list[int], list[int]]:
    source, target = _right(path, i, b)
    return source[:1] + source[:-1], target


def _without_root(path: list[int], i: int, b: Batch) -> tuple[list[int], list[int]]:
    source, target = _right(path, i, b)
    return source[1:], target[1:]


def _reversed(path: list[int], i: int, b: Batch) -> tuple[list[int], list[int]]:
    source, target = _right(path, i, b)
    return source[::-1], target


def _first_prefix(path: list[int], i: int, b: Batch) -> tuple[list[int], list[int]]:
    """Every request's accepted rows go behind the prefix of the first."""
    start = int(b.prefix_len[min(live_slots(b))])
    room = int((b.page_table[i] >= 0).sum()) * b.page_size - len(path)
    return path, list(range(min(start, room), min(start, room) + len(path)))


def moved(moves: Moves, *, keys: bool = True, values: bool = True, one_by_one: bool = False,
          linear: bool = False) -> Callable[[Published], None]:  # fmt: skip
    """Publication done anew from what was there before.

    keys, values: whether they are moved. one_by_one: each row is written before the next is read. linear: destinations
    follow the first one, whatever the page table says.
    """

    def after(done: Published) -> None:
        b = done.batch
        for now, before in ((done.pool.k, done.pool_before.k), (done.pool.v, done.pool_before.v)):
            now.copy_(before)
        for i, path in enumerate(paths_of(done.accepted)):
            if not path or int(b.state_slot[i]) < 0:
                continue
            rows, positions = moves(path, i, b)
            source = b.row_slot[[int(b.cu_rows[i]) + r for r in rows]].long()
            target = flat_slots(b.page_table, b.page_size, i, positions)
            if linear and len(target):
                target = (target[0] + torch.arange(len(target))).clamp(max=done.pool.k.shape[1] - 1)
            for now, before, on in ((done.pool.k, done.pool_before.k, keys), (done.pool.v, done.pool_before.v, values)):
                for layer in done.layers if on else ():
                    for s, t in zip(source.tolist(), target.tolist(), strict=True):  # the last of one place stays
                        now[layer, t] = (now if one_by_one else before)[layer, s]

    return after


_BATCH: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Meta]] = {
    "position_is_row": ("a row's position is its number in the buffer, not its depth", ("H1", "DF7", "DF13"),
                        ("branch",), _position(lambda b: _prefix_of_rows(b) + row_numbers(b))),
    "position_is_prefix": ("every row stands at the position of the root", ("G1", "I3"), ("depth>=1",),
                           _position(_prefix_of_rows)),
    "position_is_depth": ("positions start at 0 behind every prefix", ("I1", "G6"), ("prefix",),
                          _position(lambda b: b.position - _prefix_of_rows(b))),
    "position_from_slot": ("positions are read off the KV slots", ("I2",), (), _position(_by_slot)),
    "position_counts_inactive": ("inactive rows in front count towards a position", ("B11", "E7", "G5"), ("inactive",),
                                 _position(lambda b: b.position + _inactive_before(b))),
    "pages_of_neighbour": ("a request reads the page table of the next one", ("C1", "F5"), ("requests>=2", "prefix"),
                           _pages_of_neighbour),
    "pages_in_line": ("committed pages are read as if they followed each other", ("DF3", "DF32"), ("prefix",),
                      _linear_pages),
    "prefix_ignored": ("no committed token is visible", ("I4", "G2"), ("prefix",),
                       _prefix(lambda n: torch.zeros_like(n))),
    "ghost_key": ("one slot behind the committed prefix is visible", ("J1", "C4", "C9"), (), _prefix(lambda n: n + 1)),
    "kv_slots_rolled": ("candidates' keys and values lie one candidate further", ("DF32", "H11"), ("rows>=2",),
                        _slots_rolled),
}  # fmt: skip

_LEFT: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Verified], None]]] = {
    "keys_unrotated": ("keys are cached before rotation", ("DF13", "DF14"), ("depth>=1",), _keys_unrotated),
    "values_unwritten": ("candidates' values are not cached", ("J3", "DF27"), (), _values_unwritten),
    "keys_for_values": ("candidates' keys are cached in place of their values", ("DF32",), (), _key_for_value),
}  # fmt: skip

_MOVES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Published], None]]] = {
    "kv_to_row_numbers": ("accepted rows land at the prefix plus their number, with gaps", ("H1", "DF3"), ("branch",),
                          moved(_to_row_numbers)),
    "kv_one_late": ("each accepted row is read one step late", ("J1", "DF6"), ("depth>=1",), moved(_depth_one_late)),
    "kv_without_root": ("the root's keys and values are not moved", ("I7", "H8"), (), moved(_without_root)),
    "kv_reversed": ("the accepted path is moved leaf first", ("DF24",), ("depth>=1",), moved(_reversed)),
    "kv_of_first_prefix": ("all requests commit behind the first one's prefix", ("C7", "F5", "K12"), ("requests>=2",),
                           moved(_first_prefix)),
    "keys_only": ("keys are moved, values are not", ("D1", "H11"), (), moved(_right, values=False)),
    "values_only": ("values are moved, keys are not", ("H11",), (), moved(_right, keys=False)),
    "kv_one_by_one": ("each row is written before the next is read", ("DF22", "F2"), ("overlap", "depth>=2"),
                      moved(_right, one_by_one=True)),
    "kv_ignores_pages": ("destinations are taken to follow the first one", ("H11", "I6", "F1"), ("depth>=1",),
                         moved(_right, linear=True)),
}  # fmt: skip


def _meta(kind: str) -> Fault:
    statement, classes, needs, change = _BATCH[kind]
    return Fault(f"{kind}.attention", statement, "attention", "verify", classes, needs,
                 on_verify("attention", batch=change))  # fmt: skip


def _sized(kind: str, statement: str, classes: tuple[str, ...], change: Callable[[float], Meta]) -> Fault:
    def at(size: float) -> Wrap:
        return on_verify("attention", batch=change(size))

    return Fault(f"{kind}.attention", statement, "attention", "verify", classes, ("prefix",), at(3),
                 knob=Knob((3, 2, 1), "tokens", at))  # fmt: skip


FAULTS = [
    *(_meta(kind) for kind in _BATCH),
    _sized("position_behind", "positions are too small by a constant, as after images", ("I2", "DF13"),
           lambda size: _shifted(-size)),
    _sized("position_ahead", "positions are too large by a constant", ("I1", "I6", "J1"), _shifted),
    _sized("prefix_short", "the last committed tokens are not visible", ("C4", "I4", "I7"), _shorter),
    *(
        Fault(f"{kind}.attention", what, "attention", "verify", classes, needs, on_verify("attention", after=after))
        for kind, (what, classes, needs, after) in _LEFT.items()
    ),
    *(
        Fault(f"{kind}.attention", what, "attention", "publish", classes, needs, on_publish("attention", after=after))
        for kind, (what, classes, needs, after) in _MOVES.items()
    ),
]  # fmt: skip
