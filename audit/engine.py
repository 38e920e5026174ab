"""A small serving engine round one backend: requests with slots and pages, verify, publish, one-token steps.

It lays memory out and makes the calls; it judges nothing. Operands, metadata and outputs lie at the same addresses in
every step, as in an engine whose graphs are captured, and are poisoned as soon as a call that reads them is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.calls import call, canonical
from audit.guard import poison_
from audit.slab import Slab
from audit.world import BF16, Draws, Past, World, is_row, operand_shape
from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import (
    SHARED_OPERANDS,
    SURFACES,
    Accepted,
    Batch,
    Limits,
    Plan,
    StepOps,
    StepOut,
    complete_surfaces,
)
from lumotree.errors import ContractError
from lumotree.state import KVCache, Pools, State
from lumotree.tree import Tree

PLACEMENTS = ("scattered", "inplace", "shuffled")


@dataclass(frozen=True)
class Request:
    """A live request: state slot, pages in position order, committed tokens."""

    slot: int
    pages: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class Turn:
    """What one request does in a verification: its tree (slots and prefix are the engine's) and its rows' operands,
    one StepOps of N rows a layer."""

    key: int
    tree: Tree
    rows: list[StepOps]


@dataclass(frozen=True)
class Running:
    """A verification whose path is not chosen yet: entry None is a padding request."""

    turns: tuple[Turn | None, ...]
    trees: tuple[Tree | None, ...]
    batch: Batch
    offsets: tuple[int, ...]
    backwards: bool = False


class Engine:
    """See the module. surfaces: those that the backend both verifies and publishes.

    Raises ContractError where a request or batch does not fit into the world; refusals of the backend pass, anything
    else that it raises is a BackendError.
    """

    def __init__(self, backend: Any, world: World, device: torch.device | str = "cpu", where: str = "program") -> None:
        self.backend, self.world, self.device, self.where = backend, world, torch.device(device), where
        self.contract, self.draws = backend.contract, Draws(world)
        self.surfaces = complete_surfaces(backend)
        self.slab = Slab(self._parts(), device)
        self.pools = Pools(
            self.slab["pool.recurrent"], self.slab["pool.conv"], KVCache(self.slab["cache.k"], self.slab["cache.v"])
        )
        self._ops = [self._operand_buffers(layer) for layer in range(world.dims.layers)]
        self._rows = tuple(filter(is_row, self.slab.parts))
        self._operands = [tuple(r for r in self._rows if f"[{n}]." in r) for n in range(world.dims.layers)]
        self._metadata = tuple(name for name in self.slab.parts if name.startswith(("batch.", "plan.")))
        self.out = [{s: self.slab[f"out.{s}[{n}]"] for s in self.surfaces} for n in range(world.dims.layers)]
        self.requests: dict[int, Request] = {}
        self.free_slots = np.random.default_rng([world.seed, 79, world.layout]).permutation(world.slots).tolist()
        self._pages = self.draws.pages()
        self.spare = [self._pages.pop() for _ in range(world.spare_pages)]
        self._steps = 0
        self._loose: list[Tensor] = []
        self.ws = self.workspace()
        self.slab.accept_all()

    # Memory

    def _parts(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        w, d, i32 = self.world, self.world.dims, torch.int32
        kv = (d.layers, w.flat_slots, d.kv_heads, d.head_dim)
        parts = [
            (
                "pool.recurrent",
                (d.layers, w.slots, *d.recurrent_shape(self.contract.layout)),
                self.contract.state_dtype,
            ),
            ("pool.conv", (d.layers, w.slots, d.conv_channels, d.conv_width - 1), BF16),
            ("cache.k", kv, BF16),
            ("cache.v", kv, BF16),
        ]
        operands = [
            (f"{surface}[{layer}].{name}", operand_shape(w, surface, name, value), value.dtype)
            for layer, params in enumerate(self.draws.params)
            for surface in self.surfaces
            for name, value in vars(getattr(params, surface)).items()
        ]
        # What differs by row lies together, so that it is poisoned in one call.
        parts += sorted(operands, key=lambda part: is_row(part[0]))
        b, t = w.requests, w.rows
        flat = {"cu_rows": b + 1, "parent": t, "position": t, "row_request": t, "row_slot": t, "state_slot": b}
        parts += [(f"batch.{name}", (n,), i32) for name, n in {**flat, "prefix_len": b}.items()]
        parts += [("batch.active", (t,), torch.bool), ("batch.page_table", (b, w.pages), i32)]
        parts += [(f"plan.{name}", (2 * t + 2,), i32) for name in Plan.__dataclass_fields__]
        parts += [("accepted.rows", (b, t), i32), ("accepted.length", (b,), i32)]
        shapes = {"gdn": (t, d.hv, d.dv), "conv": (t, d.conv_channels), "attention": (t, d.q_heads, d.head_dim)}
        return parts + [(f"out.{s}[{n}]", shapes[s], BF16) for s in self.surfaces for n in range(d.layers)]

    def _operand_buffers(self, layer: int) -> dict[str, dict[str, Tensor]]:
        buffers = {}
        for surface in self.surfaces:
            params = vars(getattr(self.draws.params[layer], surface))
            buffers[surface] = {name: self.slab[f"{surface}[{layer}].{name}"] for name in params}
            for name in params.keys() & SHARED_OPERANDS:
                buffers[surface][name].copy_(params[name])
        return buffers

    def workspace(self) -> Any:
        """A new workspace for everything the world allows."""
        w = self.world
        limits = Limits(w.requests, w.rows, w.rows, w.slots, w.dims.layers)
        return call(self.backend, "allocate", self.where, w.dims, limits, self.device)

    # Requests

    def admit(self, key: int, past: Past, share: int | None = None) -> None:
        """Give a request a slot and pages, and write its past there. share: a request whose full pages of the common
        past are used together with it."""
        if not self.free_slots:
            raise ContractError(f"{self.where}: no free slot for request {key}")
        common = past.length // self.world.page_size if share is not None else 0
        shared = self.requests[share].pages[:common] if share is not None else ()
        own = tuple(self._pages.pop() for _ in range(self.world.pages - common))
        self.requests[key] = Request(self.free_slots.pop(), (*shared, *own), past.length)
        self.write(key, past, skip=common * self.world.page_size)

    def write(self, key: int, past: Past, skip: int = 0) -> None:
        """Write a past into a request's slot and pages, KV of the first `skip` tokens left out."""
        self.write_state(self.requests[key].slot, past)
        at = self.committed(key, range(skip, past.length))
        self.pools.cache.k[:, at] = past.k[:, skip:].to(self.device)
        self.pools.cache.v[:, at] = past.v[:, skip:].to(self.device)
        self.slab.accept_all()

    def write_state(self, slot: int, past: Past) -> None:
        """Write the states and histories of a past into a slot."""
        recurrent = past.recurrent if self.contract.layout == "VK" else past.recurrent.mT
        self.pools.recurrent[:, slot] = recurrent.to(self.device, self.contract.state_dtype)
        self.pools.conv[:, slot] = past.conv.to(self.device)

    def read(self, key: int) -> Past:
        """What a request's slot and pages hold: states as exported, which applies what is deferred."""
        length = self.requests[key].length
        states = [self.export(key, layer) for layer in range(self.world.dims.layers)]
        at = self.committed(key, range(length))
        stack = (torch.stack([s.recurrent for s in states]), torch.stack([s.conv for s in states]))
        return Past(*stack, self.pools.cache.k[:, at].clone(), self.pools.cache.v[:, at].clone())

    def finish(self, key: int) -> list[int]:
        """Free a request's slot and the pages that nobody else uses, and poison them; flat KV slots of those pages."""
        request = self.requests.pop(key)
        used = {page for r in self.requests.values() for page in r.pages}
        freed = [page for page in request.pages if page not in used]
        self.free_slots.append(request.slot)
        self._pages += reversed(freed)
        self.poison_slot(request.slot)
        flat = [p * self.world.page_size + o for p in freed for o in range(self.world.page_size)]
        self.poison_kv(flat)
        return flat

    def poison_slot(self, slot: int) -> None:
        """What a free state slot holds must not matter."""
        for pool in (self.pools.recurrent, self.pools.conv):
            pool[:, slot] = poison_(pool[:, slot].clone())
        self.slab.accept_all()

    def poison_kv(self, flat: Sequence[int]) -> None:
        """What free KV slots hold must not matter."""
        at = torch.as_tensor(flat, dtype=torch.int64, device=self.device)
        for surface in (self.pools.cache.k, self.pools.cache.v):
            surface[:, at] = poison_(surface[:, at])
        self.slab.accept_all()

    def committed(self, key: int, positions: Iterable[int]) -> Tensor:
        """Flat KV slots, int64, of positions of a live request."""
        return self.flat(self.requests[key], positions)

    def flat(self, request: Request, positions: Iterable[int]) -> Tensor:
        """Flat KV slots, int64, of positions in a request's pages."""
        return torch.from_numpy(np.array(self.places(request, positions), np.int64)).to(self.device)

    def places(self, request: Request, positions: Iterable[int]) -> list[int]:
        """The same as plain numbers."""
        size = self.world.page_size
        return [request.pages[p // size] * size + p % size for p in positions]

    def export(self, key: int, layer: int) -> State:
        """Canonical state of a request."""
        slot = self.requests[key].slot
        state = call(self.backend, "export", self.where, self.pools, self.ws, slot, layer)
        return canonical(state, self.world.dims, self.where)

    # Steps

    def batch(self, turns: Sequence[Turn | None], slots: Sequence[Sequence[int]]) -> tuple[Batch, list[Tree | None]]:
        """Metadata of some turns, candidates in the given flat slots, in the engine's buffers."""
        trees = [self._placed(t, s) if t else None for t, s in zip(turns, slots, strict=True)]
        table = [list(self.requests[t.key].pages) if t else [-1] * self.world.pages for t in turns]
        made = build_batch(
            trees,
            state_slots=[self.requests[t.key].slot if t else -1 for t in turns],
            page_table=torch.from_numpy(np.array(table, np.int32).reshape(len(turns), -1)),
            page_size=self.world.page_size,
            device=self.device,
        )
        self.slab.poison(self._metadata)
        return self._kept("batch", made, plan=self._kept("plan", made.plan)), trees

    def _placed(self, turn: Turn, slots: Sequence[int]) -> Tree:
        length, count = self.requests[turn.key].length, self.world.flat_slots
        return Tree.make(turn.tree.parents, active=turn.tree.active, slots=slots, num_slots=count, prefix_len=length)

    def _kept(self, kind: str, record: Any, **more: Any) -> Any:
        """A record with its tensors in the engine's buffers, which are poisoned behind them."""
        tensors = {k: v for k, v in vars(record).items() if isinstance(v, Tensor)}
        return replace(record, **{k: self._keep(f"{kind}.{k}", v) for k, v in tensors.items()}, **more)

    def _keep(self, name: str, value: Tensor) -> Tensor:
        if self.world.fresh:
            return value.to(self.device, copy=True)
        buffer = self.slab[name]
        if buffer.dim() != value.dim() or buffer.shape[1:] != value.shape[1:]:
            buffer = buffer.flatten()[: value.numel()].view(value.shape)
        return buffer[: value.shape[0]].copy_(value)

    def candidates(self, turn: Turn, placement: str, free: list[int]) -> list[int]:
        """Flat slots for a turn's candidates, taken from `free` unless they lie behind the prefix."""
        n = turn.tree.n
        if placement == "scattered":
            return [free.pop() for _ in range(n)]
        start = self.requests[turn.key].length
        own = self.places(self.requests[turn.key], range(start, start + n))
        return self._shuffled(own) if placement == "shuffled" else own

    def _free(self, taken: Sequence[int]) -> list[int]:
        """Flat slots of pages that no request owns, shuffled."""
        spare = [p * self.world.page_size + o for p in self.spare for o in range(self.world.page_size)]
        return self._shuffled([slot for slot in spare if slot not in taken])

    def _shuffled(self, values: Sequence[int]) -> list[int]:
        return np.random.default_rng([self.world.seed, 80, self.world.layout, self._steps]).permutation(values).tolist()  # type: ignore

    def verify(
        self, turns: Sequence[Turn | None], placement: str = "scattered", *, backwards: bool = False,
        taken: Sequence[int] = (),
    ) -> Running:  # fmt: skip
        """Verify a batch on every surface and layer; outputs are in `out`, row by row in the order of the turns.

        backwards: surfaces in the other order, as hybrid models need not have all in one layer. taken: flat KV slots
        that another verification uses.
        """
        self._steps += 1
        free = self._free(taken) if placement == "scattered" else []
        slots = [self.candidates(t, placement, free) if t else [] for t in turns]
        batch, trees = self.batch(turns, slots)
        for layer, outs in enumerate(self.out):
            ops = self._load([t.rows[layer] for t in turns if t], layer)
            for surface in reversed(self.surfaces) if backwards else self.surfaces:
                poison_(outs[surface])
                self.slab.accept_all()
                args = (getattr(ops, surface), self._pool(surface), batch, self.ws, outs[surface][: batch.rows], layer)
                call(self.backend, SURFACES[surface][0], self.where, *args)
                self.after_verify(surface, layer, batch)
        offsets = (0, *np.cumsum([t.n if t else 0 for t in trees]).tolist())
        return Running(tuple(turns), tuple(trees), batch, offsets, backwards)

    def after_verify(self, surface: str, layer: int, batch: Batch) -> None:
        """Hook: called right behind each verify call."""

    def after_publish(self, surface: str, layers: Sequence[int], running: Running, paths: Sequence[Any]) -> None:
        """Hook: called right behind each publish call."""

    def after_native(self, layer: int, batch: Batch) -> None:
        """Hook: called right behind each one-token call."""

    def _load(self, parts: list[StepOps], layer: int) -> StepOps:
        """Operands of a layer in the engine's buffers, rows of all requests one behind the other."""
        parts, made = parts or [self.draws.rows(0)[layer]], {}
        self.slab.poison(self._operands[layer])
        for surface in self.surfaces:
            own, kept = [getattr(part, surface) for part in parts], self._ops[layer][surface]
            names = [name for name in kept if name not in SHARED_OPERANDS]
            rows = {n: self._gathered(f"{surface}[{layer}].{n}", [getattr(part, n) for part in own]) for n in names}
            made[surface] = type(own[0])(**{**kept, **rows})
            self._loose += rows.values() if self.world.fresh else ()
        return StepOps(**made)

    def _gathered(self, name: str, values: list[Tensor]) -> Tensor:
        if len(values) == 1 or self.world.fresh or values[0].device != self.device:
            return self._keep(name, values[0] if len(values) == 1 else torch.cat(values))
        return torch.cat(values, out=self.slab[name][: sum(map(len, values))])

    def _pool(self, surface: str) -> Any:
        return {"gdn": self.pools.recurrent, "conv": self.pools.conv, "attention": self.pools.cache}[surface]

    def expire(self) -> None:
        """Operands are gone: the next layer's or step's lie where they lay."""
        for tensor in self._loose:
            poison_(tensor)
        self._loose = []
        self.slab.poison(self._rows)
        self.slab.accept_all()

    def publish(self, running: Running, paths: Sequence[Sequence[int] | None], apart: bool = False) -> None:
        """Publish a path for each turn (None and () accept nothing) and let the requests grow.

        apart: one call a layer, last layer first.
        """
        self.expire()
        chosen = [tuple(p or ()) for p in paths]
        made = accepted_paths(chosen, self.device, self.world.rows)
        self.slab.poison(("accepted.rows", "accepted.length"))
        accepted = Accepted(self._keep("accepted.rows", made.rows), self._keep("accepted.length", made.length))
        self.slab.accept_all()
        layers = list(range(self.world.dims.layers))
        for surface in reversed(self.surfaces) if running.backwards else self.surfaces:
            for part in [[n] for n in reversed(layers)] if apart else [layers]:
                args = (self._pool(surface), running.batch, accepted, self.ws, part)
                call(self.backend, SURFACES[surface][1], self.where, *args)
                self.after_publish(surface, part, running, chosen)
        for turn, path in zip(running.turns, chosen, strict=True):
            if turn is not None:
                self.grow(turn.key, len(path))
        poison_(accepted.rows)
        poison_(accepted.length)
        self.release(running)

    def grow(self, key: int, tokens: int) -> None:
        """Count committed tokens."""
        request = self.requests[key]
        self.requests[key] = replace(request, length=request.length + tokens)

    def release(self, running: Running) -> None:
        """Candidates' KV slots that did not become committed ones are free again, and so is the metadata."""
        self.expire()
        live = [self.requests[t.key] for t in running.turns if t]
        kept = {slot for request in live for slot in self.places(request, range(request.length))}
        candidates = [int(s) for t in running.trees if t for s in t.slots]
        self.poison_kv([s for s in candidates if s not in kept])

    def native(self, turns: Sequence[Turn | None], apart: bool = False) -> Batch:
        """One token of each turn by the backend's own step; outputs are in `out`, one row a live request.

        apart: attention in a call of its own, as in a model whose layers have either attention or the other two.
        """
        requests = [self.requests[t.key] if t else None for t in turns]
        slots = [self.places(r, [r.length]) if r else [] for r in requests]
        batch, _ = self.batch(turns, slots)
        for layer, outs in enumerate(self.out):
            ops = self._load([t.rows[layer] for t in turns if t], layer)
            for surface in self.surfaces:
                poison_(outs[surface])
            self.slab.accept_all()
            last = [s for s in self.surfaces if apart and s == "attention"]
            for part in ([s for s in self.surfaces if s not in last], last):
                if part:
                    out = StepOut(**{s: outs[s][: batch.rows] for s in part})
                    own = StepOps(**{s: getattr(ops, s) for s in part})
                    call(self.backend, "native_step", self.where, own, self.pools, batch, out, layer)
            self.after_native(layer, batch)
        for turn in turns:
            if turn is not None:
                self.grow(turn.key, 1)
        self.expire()
        return batch
