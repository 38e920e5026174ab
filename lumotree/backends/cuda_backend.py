"""`CudaBackend`: Gated DeltaNet in CUDA C++, compiled when first used; convolution and attention in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, GdnOps, Limits, StepOps, StepOut
from lumotree.backends.triton_backend import TritonBackend
from lumotree.contract import Contract, Dims
from lumotree.state import Pools
from lumotree.verifier.cuda import gdn
from lumotree.verifier.kernels import launch, workspace
from lumotree.verifier.kernels.workspace import TritonWorkspace


class CudaBackend(TritonBackend):
    """Kernels of `lumotree.verifier.cuda` and, for convolution and attention, of `lumotree.verifier.kernels`.

    On a machine without a GPU the CUDA source runs in an emulation. Raises BackendError when a compiler is missing or
    the card is too old, ContractError for sizes above the limits.
    """

    name = "cuda"
    contract = Contract(claims="bitwise", graph_safe=True, max_rows=gdn.MAX_ROWS)

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> TritonWorkspace:
        """All scratch; compiles what is not compiled yet."""
        self.check_dims(dims, limits)
        spill = gdn.allocate_spill(dims, limits, device)
        return workspace.allocate(dims, limits, self.contract.max_rows, device, spill)

    def gdn_verify(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: TritonWorkspace, out: Tensor, layer: int) -> None:
        """See `cuda.gdn.verify`."""
        launch.check_batch(batch, ws.limits)
        gdn.verify(ops, pool, batch, ws.gdn, out, layer)

    def gdn_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: TritonWorkspace, layers: Sequence[int]
    ) -> None:
        """See `cuda.gdn.publish`."""
        launch.check_accepted(batch, accepted, ws.limits)
        gdn.publish(pool, batch, accepted, ws.gdn, layers)

    def native_step(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        """One token of each request on every surface that `ops` has; state and KV advance in place."""
        if ops.gdn is not None and out.gdn is not None:
            gdn.native(ops.gdn, pools.recurrent, batch, out.gdn, layer)
        super().native_step(StepOps(None, ops.conv, ops.attention), pools, batch, out, layer)
