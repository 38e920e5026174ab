"""The per-node bank: a sequential tree walk that keeps every row's state, as most serving engines do.

Memory grows with layers x rows x state (4.5 GiB for 48 layers of a 27B model with 32 rows). Publication copies the
accepted node's state, so it is bitwise what verification computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.backends.operands import check_operands, check_recurrent_pool
from lumotree.backends.protocol import Accepted, Batch, ConvOps, GdnOps, Limits
from lumotree.backends.torch_backend import TorchSteps
from lumotree.contract import Dims
from lumotree.verifier import conv
from lumotree.verifier.lanes import Lane, accepted_lanes, ancestor_rows, check_room


@dataclass(frozen=True)
class Bank:
    """What each row leaves behind: `recurrent [L, T, *slot of the pool]` in its dtype, `conv` bf16 `[L, T, D, W-1]`."""

    limits: Limits
    recurrent: Tensor
    conv: Tensor


class BankBackend(TorchSteps):
    """Row by row from the bank entry of the parent; attention and the native step are the torch backend's."""

    name = "bank"

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Bank:
        """A bank of `limits.layers` x `limits.rows` states and conv windows, NaN until verified."""
        rows = (limits.layers, limits.rows)
        shape = (*rows, *dims.recurrent_shape(self.contract.layout))
        window = (*rows, dims.conv_channels, dims.conv_width - 1)
        return Bank(
            limits,
            torch.full(shape, torch.nan, dtype=self.contract.state_dtype, device=device),
            torch.full(window, torch.nan, dtype=torch.bfloat16, device=device),
        )

    def gdn_verify(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: Bank, out: Tensor, layer: int) -> None:
        """Advance each active row from its parent's bank entry into its own."""
        check_operands("gdn_verify", ops, batch.rows)
        check_recurrent_pool("gdn_verify", pool, ops, self.contract)
        check_room(batch, ws.limits, layer)
        prepared, bank = self._prepare(ops), ws.recurrent[layer]
        for row, source in _walk(batch, pool[layer], bank):
            bank[row].copy_(source)
            self._replay(prepared, bank, [Lane((row,), -1, 0)], [row], out)

    def gdn_publish(self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Bank, layers: Sequence[int]) -> None:
        """Copy the last accepted node's state. Raises PathError for a path that cannot have been accepted."""
        self._copy(pool, batch, accepted, ws.limits, ws.recurrent, layers)

    def conv_verify(self, ops: ConvOps, pool: Tensor, batch: Batch, ws: Bank, out: Tensor, layer: int) -> None:
        """Shift each active row's input into its parent's window."""
        check_operands("conv_verify", ops, batch.rows, pool.shape[-1] + 1)
        check_room(batch, ws.limits, layer)
        bank = ws.conv[layer]
        for row, source in _walk(batch, pool[layer], bank):
            window = torch.cat([source, ops.x[row].unsqueeze(-1)], dim=1)
            out[row] = conv.convolve(window.t().unsqueeze(0), ops.weight, self.contract.conv)[0]
            bank[row].copy_(window[:, 1:])

    def conv_publish(self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Bank, layers: Sequence[int]) -> None:
        """Copy the last accepted node's window. Raises PathError for a path that cannot have been accepted."""
        self._copy(pool, batch, accepted, ws.limits, ws.conv, layers)

    def _copy(
        self, pool: Tensor, batch: Batch, accepted: Accepted, limits: Limits, bank: Tensor, layers: Sequence[int]
    ) -> None:
        slots = batch.state_slot.tolist()
        for lane in accepted_lanes(batch, accepted, limits, empty_path=self.contract.empty_path):
            for layer in layers:
                pool[layer, slots[lane.request]] = bank[layer, lane.rows[-1]]


def _walk(batch: Batch, pool: Tensor, bank: Tensor) -> list[tuple[int, Tensor]]:
    """Active rows, parents first, each with the pool or bank entry that it starts from."""
    slots, request = batch.state_slot.tolist(), batch.row_request.tolist()
    return [
        (row, bank[path[-2]] if len(path) > 1 else pool[slots[request[row]]])
        for row, path in ancestor_rows(batch).items()
    ]
