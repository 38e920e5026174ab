"""The reference of a program: the backend's own step, request by request and token by token, on pools of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.calls import call
from audit.engine import Engine, Request
from audit.guard import poison_
from audit.play import Actor
from audit.slab import Slab
from audit.world import Past
from lumotree.backends.batch import build_batch
from lumotree.backends.protocol import SHARED_OPERANDS, Batch, StepOps, StepOut
from lumotree.state import KVCache, Pools, canonical_state
from lumotree.tree import Tree


@dataclass(frozen=True)
class Left:
    """What decoding the path to one row left, all layers: recurrent (pool layout), conv, keys and values of every place
    that the tree can reach, the row's own at `depth`."""

    recurrent: Tensor
    conv: Tensor
    keys: Tensor
    values: Tensor
    depth: int

    @property
    def k(self) -> Tensor:
        """Keys of the row itself."""
        return self.keys[:, self.depth]

    @property
    def v(self) -> Tensor:
        """Values of the row itself."""
        return self.values[:, self.depth]


@dataclass(frozen=True)
class Walk:
    """What decoding the paths of a tree gave: what each active row's left; outputs of all rows by layer and surface,
    inactive ones poisoned."""

    left: dict[int, Left]
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
        live = self.engine.pools.tensors()
        self._slab = Slab([(n, tuple(t.shape), t.dtype) for n, t in live.items()], self.engine.device)
        for name, tensor in live.items():
            self._slab[name].copy_(tensor)
        kept = self._slab
        self.pools = Pools(kept["recurrent"], kept["conv"], KVCache(kept["k"], kept["v"]))
        self._batches: dict[tuple[int, tuple[int, ...], int], Batch] = {}
        self._ints: dict[tuple[str, tuple[Any, ...]], Tensor] = {}
        self._like: Batch | None = None

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
        return Past(*stack, self.pools.cache.k[:, at], self.pools.cache.v[:, at])  # copies: picked, not cut out

    def where(self, request: Request, start: int, end: int) -> Tensor:
        """Flat slots of positions start..end-1."""
        return self.engine.flat(request, range(start, end))

    def walk(self, request: Request, actor: Actor) -> Walk:
        """Decode the path of every active row. Raises AssertionError naming what a step wrote elsewhere."""
        tree, start = actor.tree, request.length
        self._slab.accept_all()
        reach = self.where(request, start, start + tree.max_depth + 1)
        origin = self._left(request.slot, reach, 0)
        out = [{s: poison_(torch.empty_like(o[: tree.n])) for s, o in outs.items()} for outs in self.engine.out]
        rows = [_rows(part, tree.n, self.engine.surfaces) for part in actor.rows]
        left: dict[int, Left] = {}
        stands = -1  # the row that the pools stand behind: a chain goes on where it is
        for row in tree.active_rows:
            parent, depth = int(tree.parents[row]), int(tree.depth[row])
            if parent != stands:
                self._put(request.slot, reach, left[parent] if parent >= 0 else origin)
            outs = [StepOut(**{s: o[row : row + 1] for s, o in part.items()}) for part in out]
            self._step(request, start + depth, [part[row] for part in rows], outs)
            left[row], stands = self._left(request.slot, reach, depth), row
        self._put(request.slot, reach, origin)
        wrong = self._slab.changed()
        if wrong:
            raise AssertionError(f"one-token decoding wrote outside its request: {', '.join(wrong)}")
        return Walk(left, out)

    def _left(self, slot: int, reach: Tensor, depth: int) -> Left:
        p = self.pools
        return Left(
            p.recurrent[:, slot].clone(), p.conv[:, slot].clone(), p.cache.k[:, reach], p.cache.v[:, reach], depth
        )

    def _put(self, slot: int, reach: Tensor, left: Left) -> None:
        self.pools.recurrent[:, slot], self.pools.conv[:, slot] = left.recurrent, left.conv
        self.pools.cache.k[:, reach], self.pools.cache.v[:, reach] = left.keys, left.values

    def commit(self, request: Request, left: Sequence[Left]) -> None:
        """Make the state after a path (not empty) the request's own."""
        last, at = left[-1], self.where(request, request.length, request.length + len(left))
        self.pools.recurrent[:, request.slot], self.pools.conv[:, request.slot] = last.recurrent, last.conv
        self.pools.cache.k[:, at] = torch.stack([x.k for x in left], 1)
        self.pools.cache.v[:, at] = torch.stack([x.v for x in left], 1)

    def _step(self, request: Request, position: int, ops: list[StepOps], outs: list[StepOut]) -> None:
        engine, batch = self.engine, self._batch(request, position)
        for layer, (part, out) in enumerate(zip(ops, outs, strict=True)):
            call(self.backend, "native_step", engine.where, part, self.pools, batch, out, layer)

    def _batch(self, request: Request, position: int) -> Batch:
        key = request.slot, request.pages, position
        if key not in self._batches:
            at = self.engine.places(request, [position])
            if self._like is None:
                self._like = self._built(request, position, at)
            self._batches[key] = replace(
                self._like,
                position=self._kept("position", (position,)),
                prefix_len=self._kept("prefix_len", (position,)),
                state_slot=self._kept("state_slot", (request.slot,)),
                row_slot=self._kept("row_slot", tuple(at)),
                page_table=self._kept("page_table", (request.pages,)),
            )
        return self._batches[key]

    def _built(self, request: Request, position: int, at: list[int]) -> Batch:
        """One row of one request; another request's or position's differs in five tensors."""
        engine = self.engine
        tree = Tree.make([-1], slots=at, num_slots=engine.world.flat_slots, prefix_len=position)
        table, size = self._int32([request.pages]), engine.world.page_size
        return build_batch([tree], state_slots=[request.slot], page_table=table, page_size=size, device=engine.device)

    def _kept(self, name: str, values: tuple[Any, ...]) -> Tensor:
        """A tensor of a batch: steps at one position, or of one request, share it."""
        if (name, values) not in self._ints:
            self._ints[name, values] = self._int32(values)
        return self._ints[name, values]

    def _int32(self, values: Sequence[Any]) -> Tensor:
        return torch.from_numpy(np.array(values, np.int32)).to(self.engine.device)


def _rows(ops: StepOps, count: int, surfaces: Sequence[str]) -> list[StepOps]:
    """The operands of some surfaces row by row, in memory of their own."""
    parts = [_rows_of(getattr(ops, surface), count) for surface in surfaces]
    return [StepOps(**dict(zip(surfaces, row, strict=True))) for row in zip(*parts, strict=True)]


def _rows_of(part: Any, count: int) -> list[Any]:
    kind, ones = type(part), [1] * count
    apart = [[v] * count if k in SHARED_OPERANDS else v.clone().split_with_sizes(ones) for k, v in vars(part).items()]
    return [kind(*row) for row in zip(*apart, strict=True)]
