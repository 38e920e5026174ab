"""The built-in path-parallel verifier in torch, on all three surfaces; paths are planned on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

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
    Pools,
    StepOps,
    StepOut,
)
from lumotree.contract import Contract, Dims
from lumotree.errors import ContractError
from lumotree.verifier import attention, conv, gdn
from lumotree.verifier.lanes import Lane, accepted_lanes, check_room, packed, root_lanes
from lumotree.verifier.step import Operands, Reduce, halve_rows, prepare
from lumotree.verifier.workspace import Workspace


class Bounded(Protocol):
    """A workspace that knows what it was allocated for."""

    @property
    def limits(self) -> Limits: ...


class TorchSteps(BackendBase):
    """The native step, attention and what verification shares with them; a workspace only needs `limits`.

    Subclasses change `reduce_native` or `reduce_verify` (the order of sums over dk).
    Raises ContractError for a contract that cannot be kept: graph_safe, or a bf16 pool with a carry in fp32 under the
    claim "bitwise" (one-token steps hand the state on through the pool, so the two would differ).
    """

    reduce_native: Reduce = staticmethod(halve_rows)
    reduce_verify: Reduce = staticmethod(halve_rows)

    def __init__(self, contract: Contract | None = None) -> None:
        self.contract = type(self).contract if contract is None else contract
        self._scratch = gdn.Scratch()
        if self.contract.graph_safe:
            raise ContractError(f"{self.name}: graph_safe=True is not supported; paths are planned on the host")

    def native_step(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        """One token for each live request: the same step as verification, with the state stored behind it."""
        check_step("native_step", ops, pools, batch, self.contract)
        lanes, slots = root_lanes(batch), batch.state_slot.tolist()
        if ops.gdn is not None and out.gdn is not None:
            self._replay(self._prepare(ops.gdn), pools.recurrent[layer], lanes, slots, out.gdn)
        if ops.conv is not None and out.conv is not None:
            conv.verify(ops.conv.x, ops.conv.weight, pools.conv[layer], batch, out.conv, self.contract.conv)
            conv.publish(ops.conv.x, pools.conv[layer], lanes, slots)
        if ops.attention is not None and out.attention is not None:
            attention.verify(ops.attention, pools.cache, batch, out.attention, layer)

    def attention_verify(
        self, ops: AttentionOps, cache: KVCache, batch: Batch, ws: Bounded, out: Tensor, layer: int
    ) -> None:
        """See `lumotree.verifier.attention.verify`."""
        check_operands("attention_verify", ops, batch.rows)
        check_room(batch, ws.limits, layer)
        attention.verify(ops, cache, batch, out, layer)

    def kv_publish(self, cache: KVCache, batch: Batch, accepted: Accepted, ws: Bounded, layers: Sequence[int]) -> None:
        """Move the candidates' KV. Raises PathError for a path that cannot have been accepted."""
        attention.publish(cache, batch, self._accepted(batch, accepted, ws), layers)

    def _replay(
        self, ops: Operands, pool: Tensor, lanes: Sequence[Lane], slots: Sequence[int], out: Tensor | None = None
    ) -> None:
        gdn.replay(ops, pool, lanes, slots, self.contract, self._scratch, self.reduce_native, out)

    def _prepare(self, ops: GdnOps) -> Operands:
        return prepare(ops, self.contract)

    def _accepted(self, batch: Batch, accepted: Accepted, ws: Bounded) -> list[Lane]:
        return accepted_lanes(batch, accepted, ws.limits, empty_path=self.contract.empty_path)


class TorchBackend(TorchSteps):
    """Verification along parallel paths, publication by native replay; bitwise equal to its own `native_step`."""

    name = "torch"

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Workspace:
        """Replay operands of every layer."""
        return Workspace.make(dims, limits, device)

    def gdn_verify(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: Workspace, out: Tensor, layer: int) -> None:
        """See `lumotree.verifier.gdn.verify`; records the replay operands."""
        check_operands("gdn_verify", ops, batch.rows)
        check_recurrent_pool("gdn_verify", pool, ops, self.contract)
        check_room(batch, ws.limits, layer)
        ws.record_gdn(ops, layer)
        gdn.verify(self._prepare(ops), pool[layer], batch, out, self.contract, self._scratch, self.reduce_verify)

    def gdn_publish(self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Workspace, layers: Sequence[int]) -> None:
        """Native replay of the accepted rows. Raises PathError for a path that cannot have been accepted."""
        rows, lanes = packed(self._accepted(batch, accepted, ws))
        if lanes:
            gdn.replay_layers(
                lambda layer: ws.replay_operands(layer, rows, self.contract), pool, layers, lanes,
                batch.state_slot.tolist(), self.contract, self._scratch, self.reduce_native,
            )  # fmt: skip

    def conv_verify(self, ops: ConvOps, pool: Tensor, batch: Batch, ws: Workspace, out: Tensor, layer: int) -> None:
        """See `lumotree.verifier.conv.verify`; records the inputs."""
        check_operands("conv_verify", ops, batch.rows, pool.shape[-1] + 1)
        check_room(batch, ws.limits, layer)
        ws.record_conv(ops, layer)
        conv.verify(ops.x, ops.weight, pool[layer], batch, out, self.contract.conv)

    def conv_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Workspace, layers: Sequence[int]
    ) -> None:
        """Gather the histories. Raises PathError for a path that cannot have been accepted."""
        lanes, slots = self._accepted(batch, accepted, ws), batch.state_slot.tolist()
        for layer in layers:
            conv.publish(ws.x[layer], pool[layer], lanes, slots)
