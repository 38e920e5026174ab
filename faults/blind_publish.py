"""Blind faults of publication: what it replays, how far it counts, and where it puts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from faults.catalogue import Fault, Knob, Wrap
from faults.keys import moved, row_numbers
from faults.paths import Paths, changed, paths_of
from faults.slots import live_slots
from faults.stored import stored_as
from faults.wrap import Faulty, Kept, Published, on_publish, remembering
from lumotree.backends.batch import flat_slots
from lumotree.backends.protocol import SHARED_OPERANDS, Accepted, Batch


def _first_decay_twice(inner: Any) -> Faulty:
    """The state in the pool is decayed by the root's gate before the replay does so."""

    def methods(faulty: Faulty) -> dict[str, Callable[..., Any]]:
        def verify(ops: Any, pool: Tensor, batch: Batch, ws: Kept, out: Tensor, layer: int) -> None:
            roots = batch.cu_rows[:-1].clamp(max=batch.rows - 1).long()
            gate = torch.nn.functional.softplus(ops.a[roots].to(torch.float32) + ops.dt_bias)
            ws.memory[f"decay.{layer}"] = torch.exp(-torch.exp(ops.A_log) * gate)
            faulty.inner.gdn_verify(ops, pool, batch, ws.inner, out, layer)

        def publish(pool: Tensor, batch: Batch, accepted: Accepted, ws: Kept, layers: Any) -> None:
            before = pool.clone()
            for i, slot in live_slots(batch).items():
                for layer in layers if int(accepted.length[i]) else ():
                    pool[layer, slot] *= ws.memory[f"decay.{layer}"][i].view(-1, 1, 1).to(pool.dtype)
            faulty.note("gdn_publish.pool", before, pool)
            faulty.inner.gdn_publish(pool, batch, accepted, ws.inner, layers)

        return {"gdn_verify": verify, "gdn_publish": publish}

    return remembering(inner, methods)


def _one_ring(inner: Any) -> Faulty:
    """What a layer records also takes the place of what the layers before it recorded."""

    def methods(faulty: Faulty) -> dict[str, Callable[..., Any]]:
        def verify(ops: Any, pool: Tensor, batch: Batch, ws: Kept, out: Tensor, layer: int) -> None:
            faulty.inner.gdn_verify(ops, pool, batch, ws.inner, out, layer)
            own = {k: v.clone() for k, v in vars(ops).items() if k in SHARED_OPERANDS}
            ws.memory[f"own.{layer}"] = own
            for before in range(layer):
                kept = ws.memory.get(f"own.{before}")
                if kept is not None:
                    faulty.note("gdn_verify.recorded", before, layer)
                    scratch = torch.empty_like(out)
                    faulty.inner.gdn_verify(replace(ops, **kept), pool, batch, ws.inner, scratch, before)

        return {"gdn_verify": verify}

    return remembering(inner, methods)


def _global_rows(inner: Any) -> Faulty:
    """Publication finds the operands of each request where those of the first one lie."""
    faulty = Faulty(inner)

    def verify(ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        inner.gdn_verify(ops, pool, batch, ws, out, layer)
        local = row_numbers(batch)
        wrong = replace(ops, **{k: v if k in SHARED_OPERANDS else v[local].contiguous() for k, v in vars(ops).items()})
        faulty.note("gdn_verify.recorded", ops, wrong)
        inner.gdn_verify(wrong, pool, batch, ws, torch.empty_like(out), layer)

    setattr(faulty, "gdn_verify", verify)  # noqa: B010
    return faulty


def _global_sources(batch: Batch) -> Batch:
    local = row_numbers(batch)
    return replace(batch, row_slot=batch.row_slot[local])


def _ragged_tail_stale(done: Published) -> None:
    whole = done.batch.requests // 4 * 4
    for i, slot in live_slots(done.batch).items():
        if i >= whole > 0:
            layers = list(done.layers)
            done.pool[layers, slot] = done.pool_before[layers, slot]


def _head_kept(now: Tensor, before: Tensor, length: int) -> Tensor:
    """A path shorter than the window keeps the committed inputs at their places instead of moving them up."""
    found, kept = now.clone(), max(now.shape[1] - length, 0)
    found[:, :kept] = before[:, :kept]
    return found


def _exact_stale(now: Tensor, before: Tensor, length: int) -> Tensor:
    """A path exactly as long as the window falls between the two branches."""
    return before.clone() if length == now.shape[1] else now


def _bits(size: float) -> Wrap:
    def cut(i: int, path: list[int], batch: Batch, paths: Paths) -> list[int]:
        return path[: len(path) % 2 ** int(size)]

    return on_publish("conv", accepted=changed(cut))


def _page_of_root(path: list[int], i: int, b: Batch) -> tuple[list[int], list[int]]:
    """Every accepted row lands on the page of the root, at its own offset in a page."""
    start = int(b.prefix_len[i])
    page = start // b.page_size * b.page_size
    return path, [page + (start + n) % b.page_size for n in range(len(path))]


def _sources_cleared(done: Published) -> None:
    """Candidates' slots are cleared behind the move, those that have just become committed ones included."""
    b = done.batch
    for i, path in enumerate(paths_of(done.accepted)):
        if not path or int(b.state_slot[i]) < 0:
            continue
        start = int(b.prefix_len[i])
        source = b.row_slot[[int(b.cu_rows[i]) + r for r in path]].tolist()
        target = set(flat_slots(b.page_table, b.page_size, i, list(range(start, start + len(path)))).tolist())
        lost = [s for s in source if s in target]
        for layer in done.layers if lost else ():
            done.pool.k[layer, lost], done.pool.v[layer, lost] = 0.0, 0.0


def _fault(kind: str, surface: str, statement: str, classes: tuple[str, ...], needs: tuple[str, ...], wrap: Wrap,
           knob: Knob | None = None, unread: str = "") -> Fault:  # fmt: skip
    return Fault(f"{kind}.{surface}", statement, surface, "publish", classes, needs, wrap, knob=knob, unread=unread,
                 blind=True)  # fmt: skip


def _after(surface: str, change: Callable[[Published], None]) -> Wrap:
    return on_publish(surface, after=change)


FAULTS = [
    _fault("first_decay_twice", "gdn", "the replay decays the committed state by the root's gate once too often",
           ("N7", "N9"), ("prefix",), _first_decay_twice,
           unread="a bank or a snapshot is written over the committed state, which publication does not read"),
    _fault("one_ring", "gdn", "layers share one ring of recorded operands: each replays the last layer's",
           ("D4", "DF36"), ("layers>=2",), _one_ring),
    _fault("global_rows", "gdn", "accepted rows index the batch's operands without their request's offset",
           ("F5", "K12"), ("requests>=2",), _global_rows),
    _fault("global_rows", "attention", "accepted rows index the batch's KV slots without their request's offset",
           ("F5", "K12"), ("requests>=2",), on_publish("attention", batch=_global_sources)),
    _fault("ragged_batch", "gdn", "requests behind the last full four of a batch are not published",
           ("A2", "B12"), ("ragged batch",), _after("gdn", _ragged_tail_stale)),
    _fault("head_kept", "conv", "behind a path shorter than the window, committed inputs stay in their places",
           ("B1", "B4", "DF11"), ("prefix",), _after("conv", stored_as(_head_kept))),
    _fault("exact_length_stale", "conv", "a path exactly as long as the history leaves the old one",
           ("B1", "F2"), ("path = history",), _after("conv", stored_as(_exact_stale))),
    _fault("length_in_bits", "conv", "the accepted length is kept in a few bits and starts again at 0",
           ("B7", "C9"), ("depth>=3",), _bits(2), Knob((2, 3, 4), "bits", _bits)),
    _fault("one_page", "attention", "the page of a path's root is taken for all of its rows",
           ("F2", "H11", "I6"), ("path over pages",), _after("attention", moved(_page_of_root))),
    _fault("sources_cleared", "attention", "moved rows' slots are cleared although they are committed ones by now",
           ("D3", "DF22"), ("overlap",), _after("attention", _sources_cleared)),
]  # fmt: skip
