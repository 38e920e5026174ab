"""What the deferred policies share: verification keeps factors, publication marks the path, the state comes later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.operands import check_operands, check_recurrent_pool
from lumotree.backends.protocol import Accepted, Batch, GdnOps, Limits
from lumotree.backends.torch_backend import TorchSteps
from lumotree.backends.variants import local_rows
from lumotree.contract import Contract, Dims
from lumotree.mechanisms.factors import PathFactors, fused_update
from lumotree.state import Pools, State
from lumotree.verifier.gdn import matrix
from lumotree.verifier.lanes import accepted_lanes, check_room
from lumotree.verifier.step import Operands


class DeferredFactors(TorchSteps):
    """Base of the deferred policies, Gated DeltaNet alone. A workspace is a dict: `limits`; `stash[layer]`, k, u and
    decay of all rows of the last verification; `due[layer]`, `PathFactors` of accepted paths not yet in the pool.

    The pool changes at the next verification of the layer, or when `export` asks. Attention is not covered.
    """

    contract = Contract(claims="algebra")
    attention_verify = kv_publish = None  # type: ignore[assignment]

    def verify_tree(self, x: Operands, start: Tensor, parents: list[int]) -> tuple[Tensor, Tensor]:
        """fp32 outputs and factors u, `[HV, n, dv]`, of a tree; operands `[HV, n, ..]`, start `[HV, dk, dv]`."""
        raise NotImplementedError

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> dict[str, Any]:
        """Room for the factors of `limits.rows` rows in every layer."""

        def empty(*shape: int) -> Tensor:
            return torch.zeros((limits.layers, limits.rows, dims.hv, *shape), device=device)

        stash = {"k": empty(dims.dk), "u": empty(dims.dv), "decay": empty()}
        return {"limits": limits, "stash": stash, "due": {}}

    def gdn_verify(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: dict[str, Any], out: Tensor, layer: int) -> None:
        """Flush what the last publication left, then verify each request's tree and stash its factors."""
        check_operands("gdn_verify", ops, batch.rows)
        check_recurrent_pool("gdn_verify", pool, ops, self.contract)
        check_room(batch, ws["limits"], layer)
        self.flush(pool, ws, layer)
        stash = ws["stash"]
        for slot, index, local, parents in local_rows(self._prepare(ops), batch):
            start = matrix(pool[layer], slot, slice(None), self.contract.layout).to(torch.float32)
            o, u = self.verify_tree(local, start, parents)
            out[index] = o.transpose(0, 1).to(out.dtype)
            for name, value in (("k", local.k), ("u", u), ("decay", local.decay)):
                stash[name][layer, index] = value.transpose(0, 1)

    def gdn_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: dict[str, Any], layers: Sequence[int]
    ) -> None:
        """Mark the accepted paths as due. Raises PathError for a path that cannot have been accepted."""
        slots, stash = batch.state_slot.tolist(), ws["stash"]
        lanes = accepted_lanes(batch, accepted, ws["limits"], empty_path=self.contract.empty_path)
        for layer in layers:
            self.flush(pool, ws, layer)
            rows = [(slots[lane.request], torch.tensor(lane.rows, device=pool.device)) for lane in lanes]
            ws["due"][layer] = [
                PathFactors(slot, *(stash[name][layer, at].transpose(0, 1).clone() for name in ("k", "u", "decay")))
                for slot, at in rows
            ]

    def export(self, pools: Pools, ws: dict[str, Any], slot: int, layer: int) -> State:
        """The slot's state with everything due applied."""
        self.flush(pools.recurrent, ws, layer)
        return super().export(pools, ws, slot, layer)

    def flush(self, pool: Tensor, ws: dict[str, Any], layer: int) -> None:
        """Apply to the pool what is due in a layer, as the next verification does first."""
        for path in ws["due"].pop(layer, []):
            home = matrix(pool[layer], path.slot, slice(None), self.contract.layout)
            home.copy_(fused_update(home.to(torch.float32), path))
