"""The reference of a program: the backend's own step, request by request and token by token, on pools of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from audit.calls import call
from audit.distance import same_bits
from audit.engine import Engine, Request
from audit.guard import poison_
from audit.play import Actor
from audit.world import Past, with_rows
from lumotree.backends.batch import build_batch
from lumotree.backends.protocol import Batch, StepOps, StepOut
from lumotree.state import KVCache, Pools, canonical_state
from lumotree.tree import Tree


@dataclass(frozen=True)
class Left:
    """What decoding the path to one row left, all layers: recurrent (pool layout), conv, k and v of the row itself, and
    the outputs by layer and surface."""

    recurrent: Tensor
    conv: Tensor
    k: Tensor
    v: Tensor
    out: list[dict[str, Tensor]]


@dataclass
class Sequential:
    """Pools as they must be, and the walk that finds out what a tree's rows must give.

    Shares the engine's requests and world, none of its memory.
    """

    engine: Engine
    backend: Any
    pools: Pools = field(init=False)

    def __post_init__(self) -> None:
        p = self.engine.pools
        self.pools = Pools(p.recurrent.clone(), p.conv.clone(), KVCache(p.cache.k.clone(), p.cache.v.clone()))
        self._batches: dict[tuple[int, tuple[int, ...], int], Batch] = {}

    def mirror(self, slot: int | None = None, kv: Tensor | None = None) -> None:
        """Take over what the engine itself has written: a state slot, some flat KV slots."""
        live = self.engine.pools
        if slot is not None:
            self.pools.recurrent[:, slot], self.pools.conv[:, slot] = live.recurrent[:, slot], live.conv[:, slot]
        if kv is not None:
            self.pools.cache.k[:, kv], self.pools.cache.v[:, kv] = live.cache.k[:, kv], live.cache.v[:, kv]

    def past(self, request: Request) -> Past:
        """What a request must have been left with."""
        layers = range(self.engine.world.dims.layers)
        states = [canonical_state(self.pools, self.engine.contract, request.slot, n) for n in layers]
        at = self.where(request, 0, request.length)
        stack = torch.stack([s.recurrent for s in states]), torch.stack([s.conv for s in states])
        return Past(*stack, self.pools.cache.k[:, at].clone(), self.pools.cache.v[:, at].clone())

    def where(self, request: Request, start: int, end: int) -> Tensor:
        """Flat slots of positions start..end-1."""
        return self.engine.flat(request, range(start, end))

    def walk(self, request: Request, actor: Actor) -> dict[int, Left]:
        """Active row -> what decoding its path leaves. Raises AssertionError naming what a step wrote elsewhere."""
        tree, slot = actor.tree, request.slot
        before = self._copies()
        left: dict[int, Left] = {}
        reach = self.where(request, request.length, request.length + tree.max_depth + 1)
        for row in tree.active_rows:
            path = [left[r] for r in tree.path(row)[:-1]]
            start = path[-1] if path else None
            self.pools.recurrent[:, slot] = before["recurrent"][:, slot] if start is None else start.recurrent
            self.pools.conv[:, slot] = before["conv"][:, slot] if start is None else start.conv
            for name, pool in (("k", self.pools.cache.k), ("v", self.pools.cache.v)):
                pool[:, reach] = before[name][:, reach]
                for at, one in zip(reach, path, strict=False):
                    pool[:, at] = getattr(one, name)
            left[row] = self._step(request, request.length + len(path), [with_rows(r, [row]) for r in actor.rows])
        self.pools.recurrent[:, slot], self.pools.conv[:, slot] = before["recurrent"][:, slot], before["conv"][:, slot]
        self.pools.cache.k[:, reach], self.pools.cache.v[:, reach] = before["k"][:, reach], before["v"][:, reach]
        wrong = [name for name, now in self._all().items() if not same_bits(now, before[name])]
        if wrong:
            raise AssertionError(f"one-token decoding wrote outside its request: {', '.join(wrong)}")
        return left

    def _all(self) -> dict[str, Tensor]:
        return self.pools.tensors()

    def _copies(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self._all().items()}

    def commit(self, request: Request, left: Sequence[Left]) -> None:
        """Make the state after a path (not empty) the request's own."""
        last, at = left[-1], self.where(request, request.length, request.length + len(left))
        self.pools.recurrent[:, request.slot], self.pools.conv[:, request.slot] = last.recurrent, last.conv
        self.pools.cache.k[:, at] = torch.stack([x.k for x in left], 1)
        self.pools.cache.v[:, at] = torch.stack([x.v for x in left], 1)

    def _step(self, request: Request, position: int, ops: list[StepOps]) -> Left:
        engine, batch = self.engine, self._batch(request, position)
        outs = []
        for layer, part in enumerate(ops):
            own = StepOps(**{s: getattr(part, s) for s in engine.surfaces})
            out = {s: poison_(torch.empty_like(o[:1])) for s, o in engine.out[layer].items()}
            call(self.backend, "native_step", engine.where, own, self.pools, batch, StepOut(**out), layer)
            outs.append({s: o[0] for s, o in out.items()})
        at, slot = int(batch.row_slot[0]), request.slot
        k, v = self.pools.cache.k[:, at].clone(), self.pools.cache.v[:, at].clone()
        return Left(self.pools.recurrent[:, slot].clone(), self.pools.conv[:, slot].clone(), k, v, outs)

    def _batch(self, request: Request, position: int) -> Batch:
        key = request.slot, request.pages, position
        if key not in self._batches:
            at = self.where(request, position, position + 1).tolist()
            tree = Tree.make([-1], slots=at, num_slots=self.engine.world.flat_slots, prefix_len=position)
            table = torch.tensor([request.pages], dtype=torch.int32)
            size = self.engine.world.page_size
            self._batches[key] = build_batch(
                [tree], state_slots=[request.slot], page_table=table, page_size=size, device=self.engine.device
            )
        return self._batches[key]
