"""`TritonBackend`: path-parallel verification and native replay in Triton, bit for bit its own one-token chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.protocol import (
    Accepted,
    AttentionOps,
    BackendBase,
    Batch,
    ConvOps,
    GdnOps,
    Limits,
    StepOps,
    StepOut,
)  # fmt: skip
from lumotree.contract import Contract, Dims
from lumotree.state import KVCache, Pools
from lumotree.verifier.kernels import INTERPRETED, attention, conv, gdn, kv, launch, workspace
from lumotree.verifier.kernels.workspace import TritonWorkspace


class TritonBackend(BackendBase):
    """Kernels of `lumotree.verifier.kernels` behind the protocol; runs on the GPU, or interpreted where there is none.

    binaries: hashes of the machine code that ran, for the two kernels whose bits rest on there being one of it per
    model ("gdn", "attention"); empty under the interpreter. Raises ContractError for sizes above the limits.
    """

    name = "triton"
    interpreted = INTERPRETED
    contract = Contract(claims="bitwise", graph_safe=True, max_rows=1024)
    #: verify, publish and native of Gated DeltaNet; a subclass may bring others with the same arguments.
    gdn_kernels: Any = gdn

    def __init__(self) -> None:
        self.binaries: dict[str, set[str]] = {"gdn": set(), "attention": set()}

    def _note(self, kernel: str, compiled: Any) -> None:
        if compiled is not None:
            self.binaries[kernel].add(str(compiled.hash))

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> TritonWorkspace:
        """All scratch; nothing is allocated later."""
        self.check_dims(dims, limits)
        return workspace.allocate(dims, limits, self.contract.max_rows, device)

    def check_dims(self, dims: Dims, limits: Limits) -> None:
        """Raise ContractError for a model that the kernels are not made for."""
        launch.check_limit("allocate", "dk", dims.dk, launch.MAX_KEY_DIM)
        launch.check_limit("allocate", "head_dim", dims.head_dim, launch.MAX_HEAD_DIM)
        launch.check_limit("allocate", "conv_width", dims.conv_width, launch.MAX_CONV_WIDTH)
        launch.check_limit("allocate", "path", limits.path, self.contract.max_rows)

    def gdn_verify(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: TritonWorkspace, out: Tensor, layer: int) -> None:
        """See `verify` of the GDN kernels."""
        launch.check_batch(batch, ws.limits)
        self._note("gdn", self.gdn_kernels.verify(ops, pool, batch, ws.gdn, out, layer))

    def gdn_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: TritonWorkspace, layers: Sequence[int]
    ) -> None:
        """See `publish` of the GDN kernels."""
        launch.check_accepted(batch, accepted, ws.limits)
        self._note("gdn", self.gdn_kernels.publish(pool, batch, accepted, ws.gdn, layers))

    def conv_verify(
        self, ops: ConvOps, pool: Tensor, batch: Batch, ws: TritonWorkspace, out: Tensor, layer: int
    ) -> None:
        """See `kernels.conv.verify`."""
        launch.check_batch(batch, ws.limits)
        conv.verify(ops, pool, batch, ws.conv, out, layer)

    def conv_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: TritonWorkspace, layers: Sequence[int]
    ) -> None:
        """See `kernels.conv.publish`."""
        launch.check_accepted(batch, accepted, ws.limits)
        conv.publish(pool, batch, accepted, ws.conv, layers)

    def attention_verify(
        self, ops: AttentionOps, cache: KVCache, batch: Batch, ws: TritonWorkspace, out: Tensor, layer: int
    ) -> None:
        """See `kernels.attention.verify`."""
        launch.check_batch(batch, ws.limits)
        self._note("attention", attention.verify(ops, cache, batch, ws.attention, out, layer))

    def kv_publish(
        self, cache: KVCache, batch: Batch, accepted: Accepted, ws: TritonWorkspace, layers: Sequence[int]
    ) -> None:
        """See `kernels.kv.publish`."""
        launch.check_accepted(batch, accepted, ws.limits)
        kv.publish(cache, batch, accepted, ws.attention, layers)

    def native_step(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        """One token of each request on every surface that `ops` has; state and KV advance in place."""
        if ops.gdn is not None and out.gdn is not None:
            self._note("gdn", self.gdn_kernels.native(ops.gdn, pools.recurrent, batch, out.gdn, layer))
        if ops.conv is not None and out.conv is not None:
            conv.native(ops.conv, pools.conv, batch, out.conv, layer)
        if ops.attention is not None and out.attention is not None:
            self._note("attention", attention.native(ops.attention, pools.cache, batch, out.attention, layer))
