"""States from factors: what the deferred policies keep of a path instead of its state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.verifier.step import Operands


@dataclass(frozen=True)
class PathFactors:
    """Of one request's accepted path in one layer, parents first: fp32 k `[HV, n, dk]`, u `[HV, n, dv]`, decay
    `[HV, n]`; slot: of the recurrent pool.
    """

    slot: int
    k: Tensor
    u: Tensor
    decay: Tensor


def fused_update(state: Tensor, path: PathFactors) -> Tensor:
    """`R_n = c_n R_0 + sum_s D_ns k_s u_s^T`, fp32 `[HV, dk, dv]`: one product of rank n instead of n steps.

    c is the product of all decays, D_ns of those after s; both are products, not exponentials of sums, so that a decay
    of 0 is exact.
    """
    after = torch.ones_like(path.decay)
    for s in range(path.decay.shape[1] - 2, -1, -1):
        after[:, s] = after[:, s + 1] * path.decay[:, s + 1]
    whole = (after[:, 0] * path.decay[:, 0])[:, None, None]
    return whole * state + (after[:, :, None] * path.k).transpose(1, 2) @ path.u


def recurrence(x: Operands, start: Tensor, parents: list[int]) -> tuple[Tensor, Tensor]:
    """Outputs and factors u, fp32 `[HV, n, dv]`, of a tree by the contract's steps; start `[HV, dk, dv]`."""
    states: list[Tensor] = []
    outs, us = [], []
    for t, parent in enumerate(parents):
        decayed = x.decay[:, t, None, None] * (states[parent] if parent >= 0 else start)
        u = x.beta[:, t, None] * (x.v[:, t] - (decayed * x.k[:, t, :, None]).sum(1))
        states.append(decayed + x.k[:, t, :, None] * u[:, None, :])
        outs.append((states[t] * x.q[:, t, :, None]).sum(1))
        us.append(u)
    return torch.stack(outs, 1), torch.stack(us, 1)


def tf32(x: Tensor) -> Tensor:
    """fp32 rounded to TF32 (10 bits of mantissa, nearest even), as matrix units take their operands."""
    bits = x.contiguous().view(torch.int32)
    rounded = bits + 0xFFF + ((bits >> 13) & 1)
    return (rounded & ~0x1FFF).view(torch.float32)
