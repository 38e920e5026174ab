"""One row of the Gated DeltaNet recurrence in native precision (contract section 2).

A row is a `GdnOps` without its leading dimension: bf16 `q, k [HK, dk]`, `v [HV, dv]`, `a, b [HV]`, fp32 `A_log,
dt_bias [HV]`. States are fp32 `[HV, dv, dk]` whatever the pool's layout and dtype; `load_state` and `store_state`
translate. Every operation below works on tensors of one row, so its bits cannot depend on how many rows there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.backends.protocol import GdnOps
from lumotree.contract import Contract
from lumotree.reference.elementwise import bf16_values, sigmoid, softplus

NORM_EPS = 1e-6


def gdn_row(ops: GdnOps, row: int) -> GdnOps:
    """Operands of one row."""
    return GdnOps(ops.q[row], ops.k[row], ops.v[row], ops.a[row], ops.b[row], ops.A_log, ops.dt_bias)


def normalise(x: Tensor, norm: str) -> Tensor:
    """L2 norm over the last dim with epsilon; x fp32 `[HK, dk]`."""
    squares = (x * x).sum(-1, keepdim=True) + NORM_EPS
    if norm == "sqrt":
        return x / torch.sqrt(squares)
    unit = x * torch.rsqrt(squares)
    return bf16_values(unit) if norm == "bf16" else unit


def per_value_head(x: Tensor, value_heads: int, head_map: str) -> Tensor:
    """`[HK, dk]` -> `[HV, dk]`: the key head that each value head reads."""
    key_heads = x.shape[0]
    group = value_heads // key_heads
    heads = [h // group if head_map == "grouped" else h % key_heads for h in range(value_heads)]
    return x[heads]


def gates(row: GdnOps, contract: Contract) -> tuple[Tensor, Tensor]:
    """Decay exp(g) and write strength beta, fp32 `[HV]`."""
    g = -torch.exp(row.A_log) * softplus(row.a.to(torch.float32) + row.dt_bias, contract.softplus)
    beta = sigmoid(row.b.to(torch.float32))
    return torch.exp(g), bf16_values(beta) if contract.beta == "bf16" else beta


def gdn_update(R: Tensor, row: GdnOps, contract: Contract) -> Tensor:
    """State after the row: `R' = exp(g) R`, `u = beta (v - R' k)`, `R' + u k^T`; fp32, R is not changed."""
    heads = R.shape[0]
    k = per_value_head(normalise(row.k.to(torch.float32), contract.norm), heads, contract.head_map)[:, None, :]
    decay, beta = gates(row, contract)
    decayed = decay[:, None, None] * R
    u = beta[:, None] * (row.v.to(torch.float32) - (decayed * k).sum(-1))
    return decayed + u[:, :, None] * k


def gdn_read(R: Tensor, row: GdnOps, contract: Contract) -> Tensor:
    """Output `R q` of a row, bf16 `[HV, dv]`. The norm's bf16 variant rounds before the dk^-1/2 scale."""
    unit = normalise(row.q.to(torch.float32), contract.norm) * row.q.shape[-1] ** -0.5
    q = per_value_head(unit, R.shape[0], contract.head_map)[:, None, :]
    return (R * q).sum(-1).to(torch.bfloat16)


def carried(R: Tensor, contract: Contract) -> Tensor:
    """The state as a child row reads it: fp32 values, rounded to bf16 where the contract carries it so."""
    return bf16_values(R) if contract.carry == "bf16" else R


def gdn_step(R: Tensor, row: GdnOps, contract: Contract) -> tuple[Tensor, Tensor]:
    """One row: (state that a child reads fp32 `[HV, dv, dk]`, output bf16 `[HV, dv]`). The output reads the state
    before it is carried.
    """
    updated = gdn_update(R, row, contract)
    return carried(updated, contract), gdn_read(updated, row, contract)


def load_state(pool_slot: Tensor, contract: Contract) -> Tensor:
    """A slot of the recurrent pool as fp32 `[HV, dv, dk]`, always a copy."""
    canonical = pool_slot.transpose(-1, -2) if contract.layout == "KV" else pool_slot
    return canonical.to(torch.float32, copy=True).contiguous()


def store_state(pool_slot: Tensor, R: Tensor, contract: Contract) -> None:
    """Write fp32 `[HV, dv, dk]` to a slot of the pool in its layout and dtype."""
    pool_slot.copy_(R.transpose(-1, -2) if contract.layout == "KV" else R)
