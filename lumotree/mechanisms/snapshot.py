"""Snapshot and replay: what engines do that verify one chain of drafts and know no trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, GdnOps, Limits
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract, Dims
from lumotree.verifier.workspace import Workspace


@dataclass(frozen=True)
class SnapshotWorkspace(Workspace):
    """snapshot: the pool's slots before the verification, `[L, S, ..]` in its dtype."""

    snapshot: Tensor


class SnapshotChainBackend(TorchBackend):
    """Before a chain is verified, the state is copied aside; after it, the copy is put back and the accepted rows are
    replayed from it.

    A common practice rather than one paper's. Our reading: that the verification works on a temporary state, as the
    protocol demands, so that the copy is only read when rows were accepted.
    """

    name = "snapshot_chain"
    contract = Contract(trees=False)

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> SnapshotWorkspace:
        """Replay operands and one more pool."""
        shape = (limits.layers, limits.slots, *dims.recurrent_shape(self.contract.layout))
        snapshot = torch.zeros(shape, dtype=self.contract.state_dtype, device=device)
        return SnapshotWorkspace(**vars(super().allocate(dims, limits, device)), snapshot=snapshot)

    def gdn_verify(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: Workspace, out: Tensor, layer: int) -> None:
        """Copy the live slots aside, then verify the chains."""
        assert isinstance(ws, SnapshotWorkspace)
        for slot in batch.state_slot.tolist():
            if slot >= 0:
                ws.snapshot[layer, slot].copy_(pool[layer, slot])
        super().gdn_verify(ops, pool, batch, ws, out, layer)

    def gdn_publish(self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Workspace, layers: Sequence[int]) -> None:
        """Put the copies of requests that accepted rows back and replay."""
        assert isinstance(ws, SnapshotWorkspace)
        slots, lengths = batch.state_slot.tolist(), accepted.length.tolist()
        for slot, length in zip(slots, lengths, strict=True):
            for layer in layers if slot >= 0 and length else ():
                pool[layer, slot].copy_(ws.snapshot[layer, slot])
        super().gdn_publish(pool, batch, accepted, ws, layers)
