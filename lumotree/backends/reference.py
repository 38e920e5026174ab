"""The reference as a backend: one row at a time, as the contract is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.backends.batch import flat_slots
from lumotree.backends.operands import check_operands, check_recurrent_pool, check_step
from lumotree.backends.protocol import (
    Accepted,
    AttentionOps,
    BackendBase,
    Batch,
    ConvOps,
    GdnOps,
    KVCache,
    Limits,
    StepOps,
    StepOut,
)
from lumotree.contract import Contract, Dims
from lumotree.errors import PathError
from lumotree.reference.attention import attention_step
from lumotree.reference.conv import conv_step
from lumotree.reference.gdn import gdn_row, gdn_step, load_state, store_state
from lumotree.state import Pools


@dataclass(frozen=True)
class RowMath:
    """The row functions that the backend walks with; a fault swaps one."""

    gdn_step: Callable[[Tensor, GdnOps, Contract], tuple[Tensor, Tensor]] = gdn_step
    conv_step: Callable[[Tensor, Tensor, Tensor, Contract], tuple[Tensor, Tensor]] = conv_step
    attention_step: Callable[..., tuple[Tensor, Tensor]] = attention_step


@dataclass(frozen=True)
class ReferenceWorkspace:
    """Operands recorded by verify for publish, first dim layers: `q, k, v, a, b, x` as in GdnOps and ConvOps, and each
    layer's `A_log, dt_bias [layers, HV]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    x: Tensor

    def record(self, ops: GdnOps, layer: int) -> None:
        """Keep the GDN operands of one layer."""
        for kept, given in ((self.q, ops.q), (self.k, ops.k), (self.v, ops.v), (self.a, ops.a), (self.b, ops.b)):
            kept[layer, : len(given)] = given
        self.A_log[layer], self.dt_bias[layer] = ops.A_log, ops.dt_bias

    def recorded(self, layer: int) -> GdnOps:
        """The GDN operands of one layer."""
        parts = (self.q, self.k, self.v, self.a, self.b, self.A_log, self.dt_bias)
        return GdnOps(*(part[layer] for part in parts))


@dataclass(frozen=True)
class _Request:
    """One live request: its number, state slot, global number of its first row, and rows."""

    index: int
    slot: int
    start: int
    parents: list[int]
    active: list[bool]

    def path(self, row: int) -> list[int]:
        """Rows from the root to `row`."""
        rows = [row]
        while self.parents[rows[0]] >= 0:
            rows.insert(0, self.parents[rows[0]])
        return rows


def _live(batch: Batch) -> Iterator[_Request]:
    """Requests that are not padding."""
    cu, parent, active = batch.cu_rows.tolist(), batch.parent.tolist(), batch.active.tolist()
    for i, slot in enumerate(batch.state_slot.tolist()):
        if slot >= 0:
            lo, hi = cu[i], cu[i + 1]
            yield _Request(i, slot, lo, parent[lo:hi], active[lo:hi])


def _accepted(batch: Batch, accepted: Accepted, contract: Contract) -> Iterator[tuple[_Request, list[int]]]:
    """Live requests that accept something, with their global rows in path order.

    Raises PathError for an empty path of a live request where the contract does not allow one.
    """
    lengths, rows = accepted.length.tolist(), accepted.rows.tolist()
    for request in _live(batch):
        if lengths[request.index]:
            yield request, [request.start + r for r in rows[request.index][: lengths[request.index]]]
        elif not contract.empty_path:
            raise PathError(f"publish: request {request.index} accepts no row; allowed only with empty_path=True")


class ReferenceBackend(BackendBase):
    """Walks rows parents first with the row functions of `lumotree.reference`, on any device, under any contract.

    A pool in bf16 is rounded when it is written, so published state equals a chain of native steps bit for bit only
    if the contract also carries in bf16.
    """

    name = "reference"

    def __init__(self, contract: Contract | None = None, math: RowMath | None = None) -> None:
        self.contract = contract or Contract()
        self.math = math or RowMath()

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> ReferenceWorkspace:
        """Room for the operands of `limits.rows` rows of every layer."""

        def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros((limits.layers, *shape), dtype=dtype, device=device)

        keys, values, gates = (limits.rows, dims.hk, dims.dk), (limits.rows, dims.hv, dims.dv), (limits.rows, dims.hv)
        return ReferenceWorkspace(
            q=room(*keys),
            k=room(*keys),
            v=room(*values),
            a=room(*gates),
            b=room(*gates),
            A_log=room(dims.hv, dtype=torch.float32),
            dt_bias=room(dims.hv, dtype=torch.float32),
            x=room(limits.rows, dims.conv_channels),
        )

    def gdn_verify(
        self, ops: GdnOps, pool: Tensor, batch: Batch, ws: ReferenceWorkspace, out: Tensor, layer: int
    ) -> None:
        """Each row steps from its parent's state; the pool is only read."""
        check_operands("gdn_verify", ops, batch.rows)
        check_recurrent_pool("gdn_verify", pool, ops, self.contract)
        ws.record(ops, layer)
        for request in _live(batch):
            states = {-1: load_state(pool[layer, request.slot], self.contract)}
            for row, parent in enumerate(request.parents):
                if request.active[row]:
                    t = request.start + row
                    states[row], out[t] = self.math.gdn_step(states[parent], gdn_row(ops, t), self.contract)

    def gdn_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: ReferenceWorkspace, layers: Sequence[int]
    ) -> None:
        """Replay the native step over the accepted rows from the pool's state."""
        for request, rows in _accepted(batch, accepted, self.contract):
            for layer in layers:
                R, ops = load_state(pool[layer, request.slot], self.contract), ws.recorded(layer)
                for t in rows:
                    R, _ = self.math.gdn_step(R, gdn_row(ops, t), self.contract)
                store_state(pool[layer, request.slot], R, self.contract)

    def conv_verify(
        self, ops: ConvOps, pool: Tensor, batch: Batch, ws: ReferenceWorkspace, out: Tensor, layer: int
    ) -> None:
        """Each row steps from its parent's history; the pool is only read."""
        check_operands("conv_verify", ops, batch.rows, pool.shape[-1] + 1)
        ws.x[layer, : len(ops.x)] = ops.x
        for request in _live(batch):
            histories = {-1: pool[layer, request.slot]}
            for row, parent in enumerate(request.parents):
                if request.active[row]:
                    t = request.start + row
                    histories[row], out[t] = self.math.conv_step(histories[parent], ops.x[t], ops.weight, self.contract)

    def conv_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: ReferenceWorkspace, layers: Sequence[int]
    ) -> None:
        """The last W-1 inputs of prefix + accepted rows."""
        for request, rows in _accepted(batch, accepted, self.contract):
            for layer in layers:
                history = pool[layer, request.slot]
                line = torch.cat([history, ws.x[layer, rows].T], dim=1)
                history.copy_(line[:, -history.shape[1] :])

    def attention_verify(
        self, ops: AttentionOps, cache: KVCache, batch: Batch, ws: ReferenceWorkspace, out: Tensor, layer: int
    ) -> None:
        """Each row sees prefix, ancestors and itself in position order; its key and value go to its candidate slot."""
        check_operands("attention_verify", ops, batch.rows)
        for request in _live(batch):
            for row in range(len(request.parents)):
                if request.active[row]:
                    ancestors = [request.start + r for r in request.path(row)[:-1]]
                    self._attend(ops, cache, batch, request, request.start + row, ancestors, out, layer)

    def _attend(
        self, ops: AttentionOps, cache: KVCache, batch: Batch, request: _Request, t: int, ancestors: list[int],
        out: Tensor, layer: int,
    ) -> None:  # fmt: skip
        prefix = torch.arange(int(batch.prefix_len[request.index]), device=batch.page_table.device)
        committed = flat_slots(batch.page_table, batch.page_size, request.index, prefix)
        seen = torch.cat([committed, batch.row_slot[ancestors].to(torch.int64)])
        slot, position = int(batch.row_slot[t]), int(batch.position[t])
        k, v = cache.k[layer], cache.v[layer]
        out[t], k[slot] = self.math.attention_step(
            ops.q[t], ops.k[t], ops.v[t], k[seen], v[seen], position, ops.cos, ops.sin
        )
        v[slot] = ops.v[t]

    def kv_publish(
        self, cache: KVCache, batch: Batch, accepted: Accepted, ws: ReferenceWorkspace, layers: Sequence[int]
    ) -> None:
        """Move accepted keys and values to the committed slots of their positions.

        A destination may be another row's candidate slot, so every source is read before anything is written.
        """
        sources, targets = [], []
        for request, rows in _accepted(batch, accepted, self.contract):
            start = int(batch.prefix_len[request.index])
            positions = torch.arange(start, start + len(rows), device=batch.page_table.device)
            sources.append(batch.row_slot[rows].to(torch.int64))
            targets.append(flat_slots(batch.page_table, batch.page_size, request.index, positions))
        if sources:
            source, target = torch.cat(sources), torch.cat(targets)
            for layer in layers:
                for surface in (cache.k, cache.v):
                    surface[layer, target] = surface[layer, source]

    def native_step(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        """One token a request: state, history and KV advance in place."""
        check_step("native_step", ops, pools, batch, self.contract)
        for request in _live(batch):
            t = request.start
            if not request.active[0]:
                continue
            if ops.gdn is not None and out.gdn is not None:
                slot = pools.recurrent[layer, request.slot]
                R, out.gdn[t] = self.math.gdn_step(load_state(slot, self.contract), gdn_row(ops.gdn, t), self.contract)
                store_state(slot, R, self.contract)
            if ops.conv is not None and out.conv is not None:
                history = pools.conv[layer, request.slot]
                advanced, out.conv[t] = self.math.conv_step(history, ops.conv.x[t], ops.conv.weight, self.contract)
                history.copy_(advanced)
            if ops.attention is not None and out.attention is not None:
                self._attend(ops.attention, pools.cache, batch, request, t, [], out.attention, layer)
