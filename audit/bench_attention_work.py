"""What the attention bench runs on: a batch of one tree behind a long prefix, its float64 truth, its native chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from audit.operands import rope_tables
from lumotree.backends.batch import build_batch
from lumotree.backends.protocol import AttentionOps, Batch, StepOps, StepOut
from lumotree.contract import Dims
from lumotree.reference.oracle_tokens import OracleAttention, attention_oracle
from lumotree.state import KVCache, Pools
from lumotree.tree import Tree
from lumotree.tree_named import named
from lumotree.verifier.attention import rope

PAGE = 16
#: Caches of several layers are read in turn until they are larger than a card's last-level cache, as in decoding.
COLD_BYTES = 192 << 20
MAX_LAYERS = 8


@dataclass(frozen=True)
class Plan:
    """One workload. prefix: committed tokens of each request; batch: requests, each with the tree `tree`."""

    dims: Dims
    tree: str
    prefix: int
    batch: int
    device: str
    seed: int


class Workload:
    """Operands, paged caches of `layers` layers with shuffled pages, and the same keys and values contiguous.

    Keys and values are standard normal, so scores are too; operands of all layers are the same.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, d = plan, plan.dims
        shape = named(plan.tree)
        self.rows = shape.n
        room = plan.prefix + shape.n
        self.pages = -(-room // PAGE)
        self.layers = 1
        if plan.device.startswith("cuda"):
            self.layers = max(1, min(MAX_LAYERS, -(-COLD_BYTES // self._kv_bytes())))
        generator = torch.Generator(plan.device).manual_seed(plan.seed)
        table = torch.randperm(plan.batch * self.pages, generator=torch.Generator().manual_seed(plan.seed))
        table = table.reshape(plan.batch, self.pages).to(torch.int32)
        first = plan.batch * self.pages * PAGE
        self.trees = [
            Tree.make(
                shape.parents, active=shape.active, prefix_len=plan.prefix, slots=first + i * shape.n + torch.arange(
                    shape.n).flip(0).numpy(),
            )
            for i in range(plan.batch)
        ]  # fmt: skip
        self.batch = self._batch(self.trees, table, list(range(plan.batch)))
        self.table = table

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=plan.device, dtype=torch.bfloat16)

        flat = (self.layers, first + plan.batch * shape.n, d.kv_heads, d.head_dim)
        self.cache = KVCache(draw(*flat), draw(*flat))
        total = plan.batch * shape.n
        cos, sin = (x.to(plan.device) for x in rope_tables(d, room + 2))
        kv = (total, d.kv_heads, d.head_dim)
        self.ops = AttentionOps(draw(total, d.q_heads, d.head_dim), draw(*kv), draw(*kv), cos, sin)

    def _batch(self, trees: list[Tree], table: Tensor, slots: list[int]) -> Batch:
        return build_batch(list(trees), state_slots=slots, page_table=table, page_size=PAGE, device=self.plan.device)

    def _kv_bytes(self) -> int:
        d = self.plan.dims
        return 4 * self.plan.batch * (self.plan.prefix + self.rows) * d.kv_heads * d.head_dim

    @property
    def active(self) -> int:
        """Active rows in all."""
        return int(self.batch.active.sum())

    def floor_bytes(self) -> int:
        """Bytes of one layer, each read or written once: prefix, and per active row K and V twice, q and output."""
        d = self.plan.dims
        kv = 4 * d.kv_heads * d.head_dim
        return kv * self.plan.batch * self.plan.prefix + self.active * (2 * kv + 4 * d.q_heads * d.head_dim)

    def flops(self) -> int:
        """Multiplications and additions of one layer: scores and weighted sums of the keys that a row sees."""
        seen = sum(self.plan.prefix + int(t.depth[r]) + 1 for t in self.trees for r in t.active_rows)
        return 4 * seen * self.plan.dims.q_heads * self.plan.dims.head_dim

    def slots_of(self, request: int, positions: range) -> Tensor:
        """Flat slots of committed positions."""
        at = torch.arange(positions.start, positions.stop, device=self.plan.device)
        return self.batch.page_table[request].long()[at // PAGE] * PAGE + at % PAGE

    def truth(self, request: int, probs: str) -> OracleAttention:
        """Float64 outputs and bounds of one request in layer 0, one KV head at a time to spare memory."""
        lo, d = request * self.rows, self.plan.dims
        where = self.slots_of(request, range(self.plan.prefix))
        group, rows = d.q_heads // d.kv_heads, slice(lo, lo + self.rows)
        parts = []
        for head in range(d.kv_heads):
            one = slice(head, head + 1)
            ops = AttentionOps(
                self.ops.q[rows, head * group : (head + 1) * group], self.ops.k[rows, one], self.ops.v[rows, one],
                self.ops.cos, self.ops.sin,
            )  # fmt: skip
            k, v = (x[0, where, one] for x in (self.cache.k, self.cache.v))
            parts.append(attention_oracle(self.trees[request], ops, k, v, probs))
        joined = {n: torch.cat([getattr(p, n) for p in parts], 1) for n in ("out", "bound", "keys", "keys_bound")}
        return OracleAttention(parts[0].rows, **joined)

    def native_bits(self, backend: Any, out: Tensor) -> tuple[int, int]:
        """Rows of the first request's deepest path that have the bits of the backend's own decoding, and all of them.

        Decodes into committed slots behind the prefix, which nothing else reads.
        """
        tree = self.trees[0]
        path = [int(r) for r in tree.path(max(tree.leaves, key=lambda r: int(tree.depth[r])))]
        same = 0
        none = torch.zeros((1, 1, 1), device=self.plan.device)
        for step, row in enumerate(path):
            position = self.plan.prefix + step
            slot = int(self.slots_of(0, range(position, position + 1)))
            one = self._batch([Tree.make([-1], slots=[slot], prefix_len=position)], self.table[:1], [0])
            ops = replace(self.ops, **{n: getattr(self.ops, n)[row : row + 1].clone() for n in ("q", "k", "v")})
            got = torch.empty_like(out[:1])
            backend.native_step(StepOps(attention=ops), Pools(none, none, self.cache), one, StepOut(attention=got), 0)
            same += int(torch.equal(got.view(torch.int16), out[row : row + 1].view(torch.int16)))
        return same, len(path)

    @cached_property
    def contiguous(self) -> Contiguous:
        """Built when first asked for."""
        return Contiguous.of(self)


@dataclass(frozen=True)
class Contiguous:
    """What kernels without pages and without RoPE are given: q bf16 `[B, Hq, rows, dh]`, rotated; k, v one bf16
    `[B, Hkv, prefix + rows, dh]` a layer, candidates appended; mask bool `[rows, prefix + rows]`; ancestors int64
    `[rows]`, bit c of a row: candidate c is it or an ancestor. An inactive row sees itself and the prefix.
    """

    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    mask: Tensor
    ancestors: Tensor

    @staticmethod
    def of(w: Workload) -> Contiguous:
        """Copies of what the workload holds."""
        p, d, n = w.plan, w.plan.dims, w.rows
        at = w.batch.position.long()
        cos, sin = w.ops.cos[at], w.ops.sin[at]
        q = rope(w.ops.q, cos, sin).view(p.batch, n, d.q_heads, d.head_dim).transpose(1, 2).contiguous()
        rows = {"k": rope(w.ops.k, cos, sin), "v": w.ops.v}
        joined: dict[str, list[Tensor]] = {"k": [], "v": []}
        for layer in range(w.layers):
            for name, candidates in rows.items():
                pool = getattr(w.cache, name)[layer]
                whole = torch.empty((p.batch, d.kv_heads, p.prefix + n, d.head_dim), dtype=pool.dtype, device=p.device)
                for i in range(p.batch):
                    whole[i, :, : p.prefix] = pool[w.slots_of(i, range(p.prefix))].transpose(0, 1)
                    whole[i, :, p.prefix :] = candidates[i * n : (i + 1) * n].transpose(0, 1)
                joined[name].append(whole)
        own = torch.zeros((n, n), dtype=torch.bool)
        for row in range(n):
            up = row
            while up >= 0:
                own[row, up] = True
                up = int(w.trees[0].parents[up])
        ancestors = (own.long() << torch.arange(n)).sum(1)
        mask = torch.cat([torch.ones((n, p.prefix), dtype=torch.bool), own], 1)
        return Contiguous(q, joined["k"], joined["v"], mask.to(p.device), ancestors.to(p.device))


def errors(w: Workload, out: Tensor, truths: Mapping[int, OracleAttention]) -> dict[str, float]:
    """Cells, how many lie outside the bound, the worst error over bound, largest and root mean square error."""
    ratios, distances = [], []
    for request, truth in truths.items():
        got = out[torch.tensor(truth.rows, device=out.device) + request * w.rows].double()
        off = (got - truth.out).abs()
        ratios.append((off / truth.bound).flatten())
        distances.append(off.flatten())
    ratio, off = torch.cat(ratios), torch.cat(distances)
    return {
        "cells": ratio.numel(),
        "outside": int((~(ratio <= 1)).sum()),
        "worst": float(ratio.max()),
        "largest": float(off.max()),
        "rms": float(off.square().mean().sqrt()),
    }
