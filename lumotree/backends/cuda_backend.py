"""`CudaBackend`: Gated DeltaNet in CUDA C++, compiled when first used; convolution and attention in Triton."""

from __future__ import annotations

import torch

from lumotree.backends.protocol import Limits
from lumotree.backends.triton_backend import TritonBackend
from lumotree.contract import Contract, Dims
from lumotree.verifier.cuda import gdn
from lumotree.verifier.kernels import workspace
from lumotree.verifier.kernels.workspace import TritonWorkspace


class CudaBackend(TritonBackend):
    """Kernels of `lumotree.verifier.cuda` and, for convolution and attention, of `lumotree.verifier.kernels`.

    On a machine without a GPU the CUDA source runs in an emulation. Raises BackendError when a compiler is missing or
    the card is too old, ContractError for sizes above the limits.
    """

    name = "cuda"
    contract = Contract(claims="bitwise", graph_safe=True, max_rows=gdn.MAX_ROWS)
    gdn_kernels = gdn

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> TritonWorkspace:
        """All scratch; compiles what is not compiled yet."""
        self.check_dims(dims, limits)
        spill = gdn.allocate_spill(dims, limits, device)
        return workspace.allocate(dims, limits, self.contract.max_rows, device, spill)
