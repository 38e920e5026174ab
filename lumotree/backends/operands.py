"""What every backend of ours refuses before it computes: operands of another dtype, stride or number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.backends.protocol import SHARED_OPERANDS, AttentionOps, Batch, ConvOps, GdnOps, StepOps
from lumotree.contract import Contract
from lumotree.errors import ContractError
from lumotree.state import Pools

#: Parameters and tables are fp32, everything else bf16 (contract section 2 to 4).
_FP32 = frozenset({"A_log", "dt_bias", "cos", "sin"})


def check_operands(where: str, ops: GdnOps | ConvOps | AttentionOps, rows: int, taps: int | None = None) -> None:
    """Raise ContractError naming the tensor for a wrong dtype, a stride, a wrong number of rows or of taps."""
    for name, value in vars(ops).items():
        wanted = torch.float32 if name in _FP32 else torch.bfloat16
        if value.dtype != wanted:
            raise ContractError(f"{where} {name}: expected {wanted}, got dtype={value.dtype}")
        if not value.is_contiguous():
            raise ContractError(f"{where} {name}: expected a contiguous tensor, got stride={value.stride()}")
        if name not in SHARED_OPERANDS and value.shape[0] < rows:
            raise ContractError(f"{where} {name}: expected at least {rows} rows, got shape={tuple(value.shape)}")
    if isinstance(ops, ConvOps) and taps is not None and ops.weight.shape[1] != taps:
        raise ContractError(f"{where} weight: expected {taps} taps, got shape={tuple(ops.weight.shape)}")


def check_recurrent_pool(where: str, pool: Tensor, ops: GdnOps, contract: Contract) -> None:
    """Raise ContractError when the recurrent pool has another dtype or layout than the contract declares."""
    if pool.dtype != contract.state_dtype:
        raise ContractError(f"{where} pool: expected {contract.state_dtype}, got dtype={pool.dtype}")
    hv, dv, dk = ops.v.shape[1], ops.v.shape[2], ops.k.shape[2]
    wanted = (hv, dv, dk) if contract.layout == "VK" else (hv, dk, dv)
    if tuple(pool.shape[2:]) != wanted:
        raise ContractError(
            f"{where} pool: expected [layers, slots, {wanted[0]}, {wanted[1]}, {wanted[2]}] (layout "
            f"{contract.layout}), got shape={tuple(pool.shape)}"
        )


def check_step(where: str, ops: StepOps, pools: Pools, batch: Batch, contract: Contract) -> None:
    """`check_operands` and `check_recurrent_pool` for the surfaces of a one-token step."""
    if ops.gdn is not None:
        check_operands(f"{where} gdn", ops.gdn, batch.rows)
        check_recurrent_pool(f"{where} gdn", pools.recurrent, ops.gdn, contract)
    if ops.conv is not None:
        check_operands(f"{where} conv", ops.conv, batch.rows, pools.conv.shape[-1] + 1)
    if ops.attention is not None:
        check_operands(f"{where} attention", ops.attention, batch.rows)
