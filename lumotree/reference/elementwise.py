"""Elementwise functions of the contract in fp32, composed so that an element's bits do not depend on its place.

`torch.sigmoid`, `softplus` and `silu` treat the vector body and the tail of a tensor differently on a CPU; exp, log1p
and division do not (contract section 7).
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`, fp32."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))`, fp32; -0 where exp(-x) overflows."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor, form: str) -> Tensor:
    """`log1p(exp(x))` or `log(1 + exp(x))` ("log_exp"), fp32, linear above 20."""
    e = torch.exp(x)
    curved = torch.log1p(e) if form == "log1p" else torch.log(1.0 + e)
    return torch.where(x > 20.0, x, curved)


def bf16_values(x: Tensor) -> Tensor:
    """fp32 tensor of the bf16 values nearest to x."""
    return x.to(torch.bfloat16).to(torch.float32)
