"""`FusedBackend`: `TritonBackend` with the convolution fused with GDN's operands and with the move of accepted KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, ConvOps, Limits
from lumotree.backends.triton_backend import TritonBackend
from lumotree.contract import Dims
from lumotree.state import KVCache
from lumotree.verifier.kernels import fused_conv, launch
from lumotree.verifier.kernels.workspace import TritonWorkspace


@dataclass(frozen=True)
class FusedWorkspace(TritonWorkspace):
    """q, k, v: bf16 `[rows, channels]`, the convolution's output as GDN takes it."""

    q: Tensor
    k: Tensor
    v: Tensor


class FusedBackend(TritonBackend):
    """`kernels.fused_conv` behind the protocol, so that it is audited; its one-token step is `TritonBackend`'s.

    The protocol has one output of the convolution and a publication for each surface, so here the three parts are put
    together again and each surface is published by a launch of its own. An engine calls `fused_conv` itself.
    """

    name = "triton_fused"

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> FusedWorkspace:
        """All scratch; nothing is allocated later."""
        base = super().allocate(dims, limits, device)
        key, value = dims.hk * dims.dk, dims.hv * dims.dv
        if 2 * key + value != dims.conv_channels:  # small shapes whose convolution is not GDN's own
            key = dims.conv_channels // 4
            value = dims.conv_channels - 2 * key
        q, k, v = (torch.zeros((limits.rows, size), dtype=torch.bfloat16, device=device) for size in (key, key, value))
        return FusedWorkspace(**vars(base), q=q, k=k, v=v)

    def conv_verify(
        self, ops: ConvOps, pool: Tensor, batch: Batch, ws: TritonWorkspace, out: Tensor, layer: int
    ) -> None:
        """See `kernels.fused_conv.verify`."""
        assert isinstance(ws, FusedWorkspace)
        launch.check_batch(batch, ws.limits)
        launch.check_shape("conv", "out", out, (batch.rows, pool.shape[2]))
        parts = (ws.q[: batch.rows], ws.k[: batch.rows], ws.v[: batch.rows])
        fused_conv.verify(ops, pool, batch, ws.conv, parts, layer)
        torch.cat(parts, 1, out=out)

    def conv_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: TritonWorkspace, layers: Sequence[int]
    ) -> None:
        """See `kernels.fused_conv.publish`."""
        launch.check_accepted(batch, accepted, ws.limits)
        fused_conv.publish(batch, accepted, histories=fused_conv.Histories(pool, ws.conv, layers))

    def kv_publish(
        self, cache: KVCache, batch: Batch, accepted: Accepted, ws: TritonWorkspace, layers: Sequence[int]
    ) -> None:
        """See `kernels.fused_conv.publish`."""
        launch.check_accepted(batch, accepted, ws.limits)
        fused_conv.publish(batch, accepted, moves=fused_conv.Moves(cache, layers))
