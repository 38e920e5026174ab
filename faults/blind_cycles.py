"""Blind faults between cycles: what an earlier call left is taken for this one's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from faults.catalogue import Fault, Wrap
from faults.paths import accepted_as, active_rows, linked, paths_of
from faults.slots import live_slots
from faults.wrap import Faulty, Kept, remembering
from lumotree.backends.protocol import SHARED_OPERANDS, Accepted, Batch

Methods = Callable[[Faulty], dict[str, Callable[..., Any]]]


def _old_prefix(faulty: Faulty) -> dict[str, Callable[..., Any]]:
    """The last live request's committed length is that of the verification before, where it has grown since."""

    def verify(ops: Any, cache: Any, batch: Batch, ws: Kept, out: Tensor, layer: int) -> None:
        key, prefix = f"prefix.{layer}", batch.prefix_len.clone()
        i, slot = max(live_slots(batch).items(), default=(0, -1))
        old = ws.memory.get(key)
        if old is not None and int(old[0]) == slot and 0 <= int(old[1]) < int(prefix[i]):
            prefix[i] = int(old[1])
        if slot >= 0:
            ws.memory[key] = torch.tensor([slot, int(batch.prefix_len[i])])
        faulty.note("attention_verify.prefix_len", batch.prefix_len, prefix)
        faulty.inner.attention_verify(ops, cache, replace(batch, prefix_len=prefix), ws.inner, out, layer)

    return {"attention_verify": verify}


def _fewer_rows(faulty: Faulty) -> dict[str, Callable[..., Any]]:
    """A verification of fewer rows than the one before leaves that one's operands recorded."""

    def verify(ops: Any, pool: Tensor, batch: Batch, ws: Kept, out: Tensor, layer: int) -> None:
        faulty.inner.gdn_verify(ops, pool, batch, ws.inner, out, layer)
        own = {k: v for k, v in vars(ops).items() if k not in SHARED_OPERANDS}
        old = ws.memory.get(f"rows.{layer}")
        if old is not None and len(old["k"]) > batch.rows > 0:
            wrong = replace(ops, **{k: old[k][: batch.rows].clone() for k in own})
            faulty.note("gdn_verify.recorded", ops, wrong)
            faulty.inner.gdn_verify(wrong, pool, batch, ws.inner, torch.empty_like(out), layer)
        ws.memory[f"rows.{layer}"] = {k: v.clone() for k, v in own.items()}

    return {"gdn_verify": verify}


def _idle_sticks(faulty: Faulty) -> dict[str, Callable[..., Any]]:
    """A request that accepted nothing is skipped once more."""

    def publish(pool: Tensor, batch: Batch, accepted: Accepted, ws: Kept, layers: Any) -> None:
        for layer in layers:
            idle = ws.memory.get(f"idle.{layer}", torch.zeros(pool.shape[1], dtype=torch.bool))
            now, length = idle.clone(), accepted.length.clone()
            for i, slot in live_slots(batch).items():
                now[slot] = not int(accepted.length[i])
                if idle[slot]:
                    length[i] = 0
            ws.memory[f"idle.{layer}"] = now
            faulty.note("conv_publish.length", accepted.length, length)
            faulty.inner.conv_publish(pool, batch, replace(accepted, length=length), ws.inner, [layer])

    return {"conv_publish": publish}


def _double_buffer(faulty: Faulty) -> dict[str, Callable[..., Any]]:
    """From the third verification of a layer on, every second one reads the state that the one before it read."""

    def verify(ops: Any, pool: Tensor, batch: Batch, ws: Kept, out: Tensor, layer: int) -> None:
        count = int(ws.memory.get(f"count.{layer}", torch.tensor(0))) + 1
        old = ws.memory.get(f"state.{layer}")
        used = pool.clone()
        if old is not None and count >= 3 and count % 2:
            used[layer] = old
        ws.memory |= {f"count.{layer}": torch.tensor(count), f"state.{layer}": pool[layer].clone()}
        faulty.note("gdn_verify.pool", pool, used)
        faulty.inner.gdn_verify(ops, used, batch, ws.inner, out, layer)

    return {"gdn_verify": verify}


def _leftover_rows(faulty: Faulty) -> dict[str, Callable[..., Any]]:
    """Behind a path shorter than the one before, that one's last rows are published too."""

    def publish(pool: Tensor, batch: Batch, accepted: Accepted, ws: Kept, layers: Any) -> None:
        paths, old = paths_of(accepted), ws.memory.get("paths")
        wrong = [list(p) for p in paths]
        if old is not None and torch.equal(old["slots"], batch.state_slot):
            for i, before in enumerate(paths_of(Accepted(old["rows"], old["length"]))):
                if paths[i] and int(batch.state_slot[i]) >= 0:
                    on = active_rows(batch, i)
                    wrong[i] += [r for r in before[len(paths[i]) :] if r in on and r > paths[i][-1]]
        told = accepted_as(wrong, accepted)
        ws.memory["paths"] = {
            "slots": batch.state_slot.clone(), "rows": accepted.rows.clone(), "length": accepted.length.clone()
        }  # fmt: skip
        faulty.note("gdn_publish.accepted", accepted, told)
        faulty.inner.gdn_publish(pool, linked(batch, paths_of(told)), told, ws.inner, layers)

    return {"gdn_publish": publish}


def _wrapped(methods: Methods) -> Wrap:
    return lambda inner: remembering(inner, methods)


def _fault(kind: str, surface: str, statement: str, classes: tuple[str, ...], needs: tuple[str, ...],
           methods: Methods, programs: bool) -> Fault:  # fmt: skip
    return Fault(f"{kind}.{surface}", statement, surface, "between", classes, needs, _wrapped(methods),
                 programs=programs, blind=True)  # fmt: skip


FAULTS = [
    _fault("old_prefix", "attention", "the last request of a batch still has its committed length of the cycle before",
           ("C1", "C7", "I1"), (), _old_prefix, True),
    _fault("fewer_rows", "gdn", "a cycle of fewer rows than the one before replays that one's operands",
           ("C7", "D4", "L5"), (), _fewer_rows, True),
    _fault("idle_sticks", "conv", "a request that accepted nothing is not published in the next cycle either",
           ("A5", "B7", "DF26"), ("empty path",), _idle_sticks, True),
    _fault("double_buffer", "gdn", "from the third cycle on, every second one starts from the state before the last",
           ("D4", "A4", "H12"), (), _double_buffer, True),
    _fault("leftover_rows", "gdn", "behind a path shorter than the last cycle's, that one's further rows are replayed",
           ("C3", "C8", "D4"), ("depth>=1",), _leftover_rows, True),
]  # fmt: skip
