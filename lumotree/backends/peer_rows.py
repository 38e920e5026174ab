"""What the adapters share: row numbers in the forms that peers want, publication by copy, and tree walks.

Peers publish by *copying* the state that verification stored for the last accepted row; none of the tree-capable
ones replays operands. A peer that only knows chains is walked over a tree one depth at a time, every row starting
from its parent's stored state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.backends.protocol import Accepted, BackendBase, Batch, GdnOps, Limits, StepOps, StepOut, Workspace
from lumotree.contract import Dims
from lumotree.state import Pools


def local_rows(batch: Batch) -> Tensor:
    """int64 `[T]`: number of each row within its request."""
    rows = torch.arange(batch.rows, device=batch.parent.device)
    return rows - batch.cu_rows[batch.row_request.long()]


def widest_request(batch: Batch) -> int:
    """Rows of the largest request; reads the device."""
    sizes = batch.cu_rows[1:] - batch.cu_rows[:-1]
    return int(sizes.max()) if batch.requests else 0


def to_table(values: Tensor, batch: Batch, width: int, fill: float = 0) -> Tensor:
    """`[T, ...]` to the rectangle `[B, width, ...]` that peers take; the places behind a request's rows get `fill`."""
    table = torch.full((batch.requests, width, *values.shape[1:]), fill, dtype=values.dtype, device=values.device)
    table[batch.row_request.long(), local_rows(batch)] = values
    return table


def from_table(table: Tensor, batch: Batch) -> Tensor:
    """`[B, width, ...]` back to `[T, ...]`."""
    return table[batch.row_request.long(), local_rows(batch)]


def child_links(batch: Batch, width: int) -> tuple[Tensor, Tensor]:
    """First active child and next active sibling of every row, int32 `[B, width]`, -1 = none; reads the device.

    Inactive rows are linked from nowhere, so no active row can reach one.
    """
    first = torch.full((batch.requests, width), -1, dtype=torch.int32)
    sibling = first.clone()
    last_child: dict[tuple[int, int], int] = {}
    rows = zip(batch.row_request.tolist(), local_rows(batch).tolist(), batch.parent.tolist(), batch.active.tolist(),
               strict=True)  # fmt: skip
    for request, row, parent, active in rows:
        if not active or parent < 0:
            continue
        older = last_child.get((request, parent))
        if older is None:
            first[request, parent] = row
        else:
            sibling[request, older] = row
        last_child[request, parent] = row
    return first.to(batch.parent.device), sibling.to(batch.parent.device)


def last_accepted(batch: Batch, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """(physical row in the batch, pool slot), both int64, of the last accepted row of each live request.

    Padding requests and empty paths are left out: nothing of theirs is touched. Reads the device.
    """
    live = torch.nonzero((accepted.length > 0) & (batch.state_slot >= 0)).flatten()
    local = accepted.rows[live, accepted.length[live].long() - 1]
    return batch.cu_rows[live].long() + local, batch.state_slot[live].long()


def publish_by_copy(pool: Tensor, stored: Tensor, batch: Batch, accepted: Accepted, layers: Iterable[int]) -> None:
    """Copy `stored[layer, last accepted row]` (`[L, rows, ...]`) into `pool[layer, slot]`, in place."""
    rows, slots = last_accepted(batch, accepted)
    for layer in layers:
        pool[layer].index_copy_(0, slots, stored[layer].index_select(0, rows))


def take_rows(ops: GdnOps, rows: Tensor) -> GdnOps:
    """The operands of some rows."""
    return GdnOps(ops.q[rows], ops.k[rows], ops.v[rows], ops.a[rows], ops.b[rows], ops.A_log, ops.dt_bias)


def row_states(dims: Dims, layout: str, dtype: torch.dtype, layers: int, rows: int, device: torch.device) -> Tensor:
    """Zeroed storage for the recurrent state behind every row, `[L, rows, *dims.recurrent_shape(layout)]`."""
    return torch.zeros((layers, rows, *dims.recurrent_shape(layout)), dtype=dtype, device=device)


@dataclass(frozen=True)
class WalkWorkspace:
    """`states [L, rows, ...]`: the state behind every row of the last verification, in the pool's layout."""

    states: Tensor


class WalkedBackend(BackendBase):
    """A peer that knows one-token steps only, walked over trees. Subclasses write `step`."""

    def step(self, ops: GdnOps, states: Tensor) -> tuple[Tensor, Tensor]:
        """Advance n independent rows by one token: `states [n, ...]` -> outputs `[n, HV, dv]` and new states."""
        raise NotImplementedError

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Workspace:
        """One state a row and layer."""
        return WalkWorkspace(row_states(dims, self.contract.layout, torch.float32, limits.layers, limits.rows, device))

    def _walk(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: Workspace, out: Tensor, layer: int) -> None:
        stored = ws.states[layer]
        depth = batch.position - batch.prefix_len[batch.row_request.long()]
        for d in range(int(depth.max()) + 1 if batch.rows else 0):
            rows = torch.nonzero((depth == d) & batch.active).flatten()
            request = batch.row_request[rows].long()
            if d == 0:
                before = pool[layer, batch.state_slot[request].long()]
            else:
                before = stored[batch.cu_rows[request].long() + batch.parent[rows].long()]
            out[rows], stored[rows] = self.step(take_rows(ops, rows), before)

    def _copy(self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Workspace, layers: Iterable[int]) -> None:
        publish_by_copy(pool, ws.states, batch, accepted, layers)

    def _one_token(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        if ops.gdn is None or out.gdn is None or not batch.rows:
            return
        slots = batch.state_slot[batch.row_request.long()].long()
        outputs, states = self.step(ops.gdn, pools.recurrent[layer, slots])
        out.gdn.copy_(outputs)
        pools.recurrent[layer].index_copy_(0, slots, states)

    gdn_verify = _walk
    gdn_publish = _copy
    native_step = _one_token
