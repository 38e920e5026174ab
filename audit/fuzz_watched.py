"""The engine of a program with its eyes open: after every call, nothing but the call's write set may have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from audit.distance import same_bits
from audit.engine import Engine, Running
from audit.fuzz_judge import MismatchError
from audit.guard import Snapshot
from lumotree.backends.protocol import Batch
from lumotree.state import State

#: (surface, layer) -> state or history of each request of a batch, as exported.
Exports = dict[tuple[str, int], list[Tensor]]


class Watched(Engine):
    """An engine that compares its memory with what each call may write."""

    deferred: frozenset[int] = frozenset()
    _waiting: Exports

    def publish(self, running: Running, paths: Sequence[Sequence[int] | None], apart: bool = False) -> None:
        """As the engine does; apart: a layer whose turn has not come must be exported as before. Pools alone would not
        show a publication that is deferred."""
        self._waiting = self._exports(running) if apart and self.world.dims.layers > 1 else {}
        super().publish(running, paths, apart)

    def after_verify(self, surface: str, layer: int, batch: Batch) -> None:
        """Outputs and, for attention, the candidates' slots; a slot with something deferred may be brought up to date,
        which `Driver` compares afterwards."""
        self.slab.accept(f"out.{surface}[{layer}]", slice(0, batch.rows))
        if surface == "attention":
            self._accept_kv([layer], batch.row_slot.long())
        for slot in self.deferred if surface != "attention" else ():
            self.slab.accept({"gdn": "pool.recurrent", "conv": "pool.conv"}[surface], (layer, slot))
        self._unchanged(f"{surface}_verify of layer {layer}")

    def after_publish(self, surface: str, layers: Sequence[int], running: Running, paths: Sequence[Any]) -> None:
        """The slots of requests that accept something, and their candidates and destinations."""
        chosen = [(t, p) for t, p in zip(running.turns, paths, strict=True) if t is not None]
        if surface == "attention":
            start = {t.key: self.requests[t.key].length for t, _ in chosen}
            ends = [self.committed(t.key, range(start[t.key], start[t.key] + len(p))) for t, p in chosen]
            self._accept_kv(list(layers), torch.cat([running.batch.row_slot.long(), *ends]))
        name = {"gdn": "pool.recurrent", "conv": "pool.conv"}.get(surface)
        for layer in layers if name else ():
            for turn, path in chosen:
                if path or self.requests[turn.key].slot in self.deferred:
                    self.slab.accept(str(name), (layer, self.requests[turn.key].slot))
        self._unchanged(f"{surface} publication of layers {list(layers)}")
        for layer in layers:
            self._waiting.pop((surface, layer), None)
        self._others_wait(surface, f"{surface} publication of layers {list(layers)}", running)

    def _others_wait(self, surface: str, what: str, running: Running) -> None:
        """Layers that are still to be published are exported as before."""
        waiting = [where for where in self._waiting if where[0] == surface]
        now = self._exports(running) if waiting else {}
        for where in waiting:
            for i, (got, want) in enumerate(zip(now[where], self._waiting[where], strict=True)):
                if not same_bits(got, want):
                    raise MismatchError(f"{what} moved layer {where[1]} of live request {i}, as exported", surface)

    def _exports(self, running: Running) -> Exports:
        """What an export says of the batch's requests; pools and workspace are put back."""
        kept = Snapshot([self.pools.recurrent, self.pools.conv, self.ws])
        keys = [turn.key for turn in running.turns if turn]
        found: Exports = {}
        for layer in range(self.world.dims.layers):
            states = [self.export(key, layer) for key in keys]
            found["gdn", layer] = [s.recurrent.clone() for s in states]
            found["conv", layer] = [s.conv.clone() for s in states]
        kept.restore()
        return found

    def after_native(self, layer: int, batch: Batch) -> None:
        """Outputs, the live slots and the committed KV slot of each token."""
        for surface in self.surfaces:
            self.slab.accept(f"out.{surface}[{layer}]", slice(0, batch.rows))
        for slot in [s for s in batch.state_slot.tolist() if s >= 0]:
            self.slab.accept("pool.recurrent", (layer, slot))
            self.slab.accept("pool.conv", (layer, slot))
        self._accept_kv([layer], batch.row_slot.long())
        self._unchanged(f"native_step of layer {layer}")

    def exported(self, key: int, others: Sequence[int] = ()) -> list[State]:
        """A request's states of all layers; an export may bring its own slot, `others` and deferred ones up to date."""
        states = [self.export(key, layer) for layer in range(self.world.dims.layers)]
        for slot in self.deferred | {self.requests[key].slot, *others}:
            self.slab.accept("pool.recurrent", (slice(None), slot))
            self.slab.accept("pool.conv", (slice(None), slot))
        self._unchanged(f"export of request {key}")
        return states

    def _accept_kv(self, layers: Sequence[int], at: Tensor) -> None:
        for layer in layers:
            self.slab.accept("cache.k", (layer, at))
            self.slab.accept("cache.v", (layer, at))

    def _unchanged(self, what: str) -> None:
        changed = self.slab.changed()
        if changed:
            raise MismatchError(f"{what} wrote where it may not: {', '.join(changed)}", "stray")
