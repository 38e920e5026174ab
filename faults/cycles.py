"""Faults between cycles: what an earlier call left behind is used again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from faults.catalogue import Fault
from faults.slots import live_slots
from faults.wrap import Faulty, Kept, copied, remembering
from lumotree.backends.protocol import SURFACES, Accepted, Batch

STATES = ("gdn", "conv")


def _cloned(nest: Any) -> Any:
    """A dataclass with its tensors copied, one level of nesting included."""
    parts = {k: v.clone() if isinstance(v, Tensor) else _cloned(v) if k == "plan" else v for k, v in vars(nest).items()}
    return type(nest)(**parts)


def _first_batch_kept(surface: str) -> Fault:
    """Metadata of the first verification of a layer is used for all that follow."""
    verify = SURFACES[surface][0]

    def methods(faulty: Faulty) -> dict[str, Callable[..., Any]]:
        def method(ops: Any, pool: Any, batch: Batch, ws: Kept, out: Tensor, layer: int) -> None:
            first = ws.memory.setdefault(f"{verify}.{layer}", _cloned(batch))
            used = first if first.rows == batch.rows and first.requests == batch.requests else batch
            faulty.note(f"{verify}.batch", batch, used)
            getattr(faulty.inner, verify)(ops, pool, used, ws.inner, out, layer)

        return {verify: method}

    return Fault(f"first_batch_kept.{surface}", "verification keeps the metadata of its first cycle", surface,
                 "between", ("C7", "C1", "L5", "DF12"), ("depth>=1",),
                 lambda inner: remembering(inner, methods))  # fmt: skip


def _first_state_kept(surface: str) -> Fault:
    """The committed state that the first verification of a layer read is read by all that follow."""
    verify = SURFACES[surface][0]

    def methods(faulty: Faulty) -> dict[str, Callable[..., Any]]:
        def method(ops: Any, pool: Tensor, batch: Batch, ws: Kept, out: Tensor, layer: int) -> None:
            first = ws.memory.setdefault(f"{verify}.{layer}", pool.clone())
            faulty.note(f"{verify}.pool", pool[layer], first[layer])
            getattr(faulty.inner, verify)(ops, first, batch, ws.inner, out, layer)

        return {verify: method}

    return Fault(f"first_state_kept.{surface}", "verification keeps the committed state of its first cycle", surface,
                 "between", ("A1", "A4", "DF6", "DF33"), (), lambda inner: remembering(inner, methods))  # fmt: skip


def _first_ring_kept(surface: str) -> Fault:
    """Publication replays the operands that the first verification of a layer recorded."""
    verify = SURFACES[surface][0]

    def methods(faulty: Faulty) -> dict[str, Callable[..., Any]]:
        def method(ops: Any, pool: Tensor, batch: Batch, ws: Kept, out: Tensor, layer: int) -> None:
            inner = getattr(faulty.inner, verify)
            inner(ops, pool, batch, ws.inner, out, layer)
            first = ws.memory.setdefault(f"{verify}.{layer}", _cloned(ops))
            if differs_in_rows(first, ops):
                faulty.note(f"{verify}.recorded", ops, first)
                inner(first, pool, batch, ws.inner, torch.empty_like(out), layer)

        return {verify: method}

    return Fault(f"first_ring_kept.{surface}", "what is recorded for publication is never replaced", surface,
                 "between", ("A4", "D4", "L5"), (), lambda inner: remembering(inner, methods))  # fmt: skip


def differs_in_rows(a: Any, b: Any) -> bool:
    """Whether two operand sets of the same shapes differ."""
    pairs = [(getattr(a, k), v) for k, v in vars(b).items()]
    same_shapes = all(x.shape == y.shape for x, y in pairs)
    return same_shapes and any(not torch.equal(x, y) for x, y in pairs)


def _published_once(surface: str) -> Fault:
    """Only the first publication of a layer takes place."""
    publish = SURFACES[surface][1]

    def methods(faulty: Faulty) -> dict[str, Callable[..., Any]]:
        def method(pool: Any, batch: Batch, accepted: Accepted, ws: Kept, layers: Any) -> None:
            left = [layer for layer in layers if not ws.memory.get(f"{publish}.{layer}")]
            faulty.note(f"{publish}.layers", list(layers), left)
            getattr(faulty.inner, publish)(pool, batch, accepted, ws.inner, left)
            ws.memory.update({f"{publish}.{layer}": True for layer in layers})

        return {publish: method}

    return Fault(f"published_once.{surface}", "only the first cycle is published", surface, "between",
                 ("A4", "H12", "DF26"), (), lambda inner: remembering(inner, methods))  # fmt: skip


def _accepted_of_cycle_before(surface: str) -> Fault:
    """Publication cuts its path to the length that the cycle before accepted."""
    publish = SURFACES[surface][1]

    def methods(faulty: Faulty) -> dict[str, Callable[..., Any]]:
        def method(pool: Any, batch: Batch, accepted: Accepted, ws: Kept, layers: Any) -> None:
            old = ws.memory.get(publish)
            length = accepted.length
            if old is not None and old.shape == length.shape:
                length = torch.where(length > 0, torch.minimum(length, old.clamp(min=1)), length)
            ws.memory[publish] = accepted.length.clone()
            faulty.note(f"{publish}.accepted", accepted.length, length)
            getattr(faulty.inner, publish)(pool, batch, replace(accepted, length=length), ws.inner, layers)

        return {publish: method}

    return Fault(f"length_of_cycle_before.{surface}", "the accepted length is one cycle old", surface, "between",
                 ("C1", "C3", "C8"), ("depth>=1",), lambda inner: remembering(inner, methods),
                 programs=True)  # fmt: skip


def _own_copy_trusted(surface: str) -> Fault:
    """A slot's state is read from the wrapper's copy of what it published last, whoever owns the slot by now."""
    verify, publish = SURFACES[surface]

    def wrap(inner: Any) -> Faulty:
        faulty = Faulty(inner)
        last: dict[tuple[int, int], Tensor] = {}

        def before(ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            used = pool.clone()
            for slot in live_slots(batch).values():
                if (layer, slot) in last and last[layer, slot].shape == pool[layer, slot].shape:
                    used[layer, slot] = last[layer, slot]
            faulty.note(f"{verify}.pool", pool, used)
            getattr(inner, verify)(ops, used, batch, ws, out, layer)

        def after(pool: Tensor, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
            getattr(inner, publish)(pool, batch, accepted, ws, layers)
            last.update({(n, slot): pool[n, slot].clone() for n in layers for slot in live_slots(batch).values()})

        setattr(faulty, verify, before)
        setattr(faulty, publish, after)
        return faulty

    return Fault(f"own_copy_trusted.{surface}",
                 "a slot's state is the last one published there: roll back, restore and a new owner go unnoticed",
                 surface, "between", ("A4", "A12", "B14", "D1", "D2", "D4", "DF31"), (), wrap)  # fmt: skip


def _plain_step_reads_old(surface: str) -> Fault:
    """After a publication of two rows or more, the next plain step starts from the state before it."""
    publish = SURFACES[surface][1]

    def wrap(inner: Any) -> Faulty:
        faulty = Faulty(inner)
        old: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

        def after(pool: Tensor, batch: Batch, accepted: Accepted, ws: Any, layers: Any) -> None:
            lengths = accepted.length.tolist()
            saved = copied(pool)
            getattr(inner, publish)(pool, batch, accepted, ws, layers)
            for i, slot in live_slots(batch).items():
                for layer in layers:
                    old.pop((layer, slot), None)
                    if lengths[i] >= 2:
                        old[layer, slot] = saved[layer, slot].clone(), pool[layer, slot].clone()

        def step(ops: Any, pools: Any, batch: Batch, out: Any, layer: int) -> None:
            pool = pools.recurrent if surface == "gdn" else pools.conv
            for slot in live_slots(batch).values():
                then, now = old.pop((layer, slot), (None, None))
                if then is not None and now is not None and torch.equal(pool[layer, slot], now):
                    faulty.note("native_step.pool", now, then)
                    pool[layer, slot] = then
            inner.native_step(ops, pools, batch, out, layer)

        setattr(faulty, publish, after)
        setattr(faulty, "native_step", step)  # noqa: B010
        return faulty

    return Fault(f"plain_step_reads_old.{surface}",
                 "a plain step behind a cycle that accepted two rows or more starts from the state before it",
                 surface, "between", ("A1", "DF4", "DF33"), ("depth>=1",), wrap, programs=True)  # fmt: skip


def _metadata_after_plain_step() -> Fault:
    """Verification behind a plain step still counts the tokens of before it."""

    def wrap(inner: Any) -> Faulty:
        faulty = Faulty(inner)
        length: dict[int, int] = {}

        def step(ops: Any, pools: Any, batch: Batch, out: Any, layer: int) -> None:
            inner.native_step(ops, pools, batch, out, layer)
            for i, slot in live_slots(batch).items():
                length[slot] = int(batch.prefix_len[i])

        def verify(ops: Any, cache: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
            prefix = batch.prefix_len.clone()
            for i, slot in live_slots(batch).items():
                if length.get(slot) == int(prefix[i]) - 1:
                    prefix[i] -= 1
            faulty.note("attention_verify.prefix_len", batch.prefix_len, prefix)
            inner.attention_verify(ops, cache, replace(batch, prefix_len=prefix), ws, out, layer)

        setattr(faulty, "native_step", step)  # noqa: B010
        setattr(faulty, "attention_verify", verify)  # noqa: B010
        return faulty

    return Fault("length_before_plain_step.attention",
                 "verification behind a plain step does not see the token of that step", "attention", "between",
                 ("C7", "I1", "I4", "C4"), (), wrap, programs=True)  # fmt: skip


FAULTS = [
    *(_first_batch_kept(s) for s in SURFACES),
    *(_first_state_kept(s) for s in STATES),
    *(_first_ring_kept(s) for s in STATES),
    *(_published_once(s) for s in SURFACES),
    *(_accepted_of_cycle_before(s) for s in SURFACES),
    *(_own_copy_trusted(s) for s in STATES),
    *(_plain_step_reads_old(s) for s in STATES),
    _metadata_after_plain_step(),
]
