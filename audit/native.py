"""The backend's own one-token chain: what plain decoding of each root-to-row path would have computed and left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from audit.calls import call
from audit.cases import Case
from audit.guard import poison_, same_except
from lumotree.backends.batch import build_batch
from lumotree.backends.protocol import AttentionOps, Batch, ConvOps, GdnOps, StepOps, StepOut
from lumotree.state import KVCache, Pools
from lumotree.tree import Tree


@dataclass
class RowTrace:
    """After row r of one request and layer, decoded one token at a time; None where a surface is not covered.

    Lists by row, None for inactive rows: recurrent (pool layout and dtype), conv bf16 `[D, W-1]`, k (rotated) and v
    bf16 `[Hkv, dh]`, and the outputs gdn `[HV, dv]`, conv_out `[D]`, attention `[Hq, dh]`, all bf16.
    """

    recurrent: list[Tensor | None]
    conv: list[Tensor | None]
    k: list[Tensor | None]
    v: list[Tensor | None]
    gdn_out: list[Tensor | None]
    conv_out: list[Tensor | None]
    attention_out: list[Tensor | None]
    damage: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, n: int) -> RowTrace:
        """Nothing decoded yet."""
        empty: list[list[Tensor | None]] = [[None] * n for _ in range(7)]
        recurrent, conv, k, v, gdn_out, conv_out, attention_out = empty
        return cls(recurrent, conv, k, v, gdn_out, conv_out, attention_out)


def rows_of(trace: Sequence[Tensor | None], rows: Sequence[int]) -> list[Tensor]:
    """The traced values of some rows; empty where the surface is not covered."""
    return [value for value in (trace[row] for row in rows) if value is not None]


def row_ops(case: Case, row: int, layer: int, surfaces: Sequence[str]) -> StepOps:
    """Operands of one global row."""
    g, c, a = case.gdn[layer], case.conv[layer], case.attention[layer]
    one = slice(row, row + 1)
    return StepOps(
        GdnOps(g.q[one], g.k[one], g.v[one], g.a[one], g.b[one], g.A_log, g.dt_bias) if "gdn" in surfaces else None,
        ConvOps(c.x[one], c.weight) if "conv" in surfaces else None,
        AttentionOps(a.q[one], a.k[one], a.v[one], a.cos, a.sin) if "attention" in surfaces else None,
    )


def step_batch(case: Case, request: int, committed: int) -> Batch:
    """One token of one request behind `committed` tokens; its KV goes to the committed slot of its position."""
    slot = int(case.committed(request, [committed])[0])
    tree = Tree.make([-1], slots=[slot], prefix_len=committed)
    return build_batch(
        [tree],
        state_slots=[case.state_slots[request]],
        page_table=case.page_table[request : request + 1],
        page_size=case.spec.page_size,
        device=case.device,
    )


def _out(case: Case, surfaces: Sequence[str]) -> StepOut:
    d = case.dims
    shapes = {"gdn": (1, d.hv, d.dv), "conv": (1, d.conv_channels), "attention": (1, d.q_heads, d.head_dim)}
    return StepOut(
        **{
            s: poison_(torch.empty(shape, dtype=torch.bfloat16, device=case.device))
            for s, shape in shapes.items()
            if s in surfaces
        }
    )


class NativeChain:
    """Decodes rows of one case with the backend's native step on pools of its own.

    Only the surfaces in `surfaces` are stepped. State of the parent is written into the live slot before each row, so
    that a tree is walked in as many steps as it has active rows.
    """

    def __init__(self, backend: Any, case: Case, surfaces: Sequence[str]) -> None:
        self.backend, self.case, self.surfaces = backend, case, surfaces
        p = case.pools
        self.pools = Pools(p.recurrent.clone(), p.conv.clone(), KVCache(p.cache.k.clone(), p.cache.v.clone()))

    def walk(self, request: int, layer: int) -> RowTrace:
        """Trace of every active row of one request."""
        tree = self.case.trees[request]
        trace = RowTrace.of_rows(tree.n)
        batches = {d: step_batch(self.case, request, tree.prefix_len + d) for d in range(tree.max_depth + 1)}
        for row in tree.active_rows:
            self._load_parent(trace, request, row, layer)
            self._step(trace, request, row, layer, batches[int(tree.depth[row])])
        trace.damage = self._damage(request, layer)
        self._reset(request, layer)
        return trace

    def _damage(self, request: int, layer: int) -> dict[str, list[str]]:
        """Surface -> what the last step changed besides the request's own slot and the committed slots of its path."""
        tree, case = self.case.trees[request], self.case
        own = torch.tensor([case.state_slots[request]], device=case.device)
        path = case.committed(request, range(tree.prefix_len, tree.prefix_len + tree.max_depth + 1))
        watched = (
            ("gdn", "pool.recurrent", self.pools.recurrent, case.pools.recurrent, own),
            ("conv", "pool.conv", self.pools.conv, case.pools.conv, own),
            ("attention", "cache.k", self.pools.cache.k, case.pools.cache.k, path),
            ("attention", "cache.v", self.pools.cache.v, case.pools.cache.v, path),
        )
        damage: dict[str, list[str]] = {"gdn": [], "conv": [], "attention": []}
        for surface, name, now, before, written in watched:
            if not same_except(now[layer : layer + 1], before[layer : layer + 1], written):
                damage[surface].append(f"{name} (native step)")
        return damage

    def chain(self, request: int, layer: int, path: Sequence[int]) -> RowTrace:
        """Trace of one path decoded in place from the committed state, nothing reloaded in between."""
        tree = self.case.trees[request]
        trace = RowTrace.of_rows(tree.n)
        self._reset(request, layer)
        for step, row in enumerate(path):
            self._step(trace, request, row, layer, step_batch(self.case, request, tree.prefix_len + step))
        return trace

    def _reset(self, request: int, layer: int) -> None:
        slot, saved = self.case.state_slots[request], self.case.pools
        self.pools.recurrent[layer, slot] = saved.recurrent[layer, slot]
        self.pools.conv[layer, slot] = saved.conv[layer, slot]
        self.pools.cache.k[layer] = saved.cache.k[layer]
        self.pools.cache.v[layer] = saved.cache.v[layer]

    def _load_parent(self, trace: RowTrace, request: int, row: int, layer: int) -> None:
        tree, slot = self.case.trees[request], self.case.state_slots[request]
        self._reset(request, layer)
        path = tree.path(row)[:-1]
        if not path:
            return
        recurrent, conv = trace.recurrent[path[-1]], trace.conv[path[-1]]
        if recurrent is not None:
            self.pools.recurrent[layer, slot] = recurrent
        if conv is not None:
            self.pools.conv[layer, slot] = conv
        keys, values = rows_of(trace.k, path), rows_of(trace.v, path)
        if keys:
            where = self.case.committed(request, range(tree.prefix_len, tree.prefix_len + len(path)))
            self.pools.cache.k[layer, where] = torch.stack(keys)
            self.pools.cache.v[layer, where] = torch.stack(values)

    def _step(self, trace: RowTrace, request: int, row: int, layer: int, batch: Batch) -> None:
        ops = row_ops(self.case, self.case.offsets[request] + row, layer, self.surfaces)
        out = _out(self.case, self.surfaces)
        call(self.backend, "native_step", self.case.spec.id, ops, self.pools, batch, out, layer)
        slot, kv = self.case.state_slots[request], int(batch.row_slot[0])
        if out.gdn is not None:
            trace.gdn_out[row] = out.gdn[0]
            trace.recurrent[row] = self.pools.recurrent[layer, slot].clone()
        if out.conv is not None:
            trace.conv_out[row] = out.conv[0]
            trace.conv[row] = self.pools.conv[layer, slot].clone()
        if out.attention is not None:
            trace.attention_out[row] = out.attention[0]
            trace.k[row] = self.pools.cache.k[layer, kv].clone()
            trace.v[row] = self.pools.cache.v[layer, kv].clone()
