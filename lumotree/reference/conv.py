"""One row of the causal depthwise convolution in native precision (contract section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.contract import Contract
from lumotree.reference.elementwise import bf16_values, silu


def conv_step(history: Tensor, x: Tensor, weight: Tensor, contract: Contract) -> tuple[Tensor, Tensor]:
    """One row: (history after it, output).

    bf16 `history [D, W-1]` oldest first, `x [D]`, `weight [D, W]` oldest tap first. Products are summed oldest first
    in fp32, then SiLU in fp32; output bf16 `[D]`. Neither input is changed.
    """
    window = torch.cat([history, x[:, None]], dim=1)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap in range(weight.shape[1]):
        product = window[:, tap].to(torch.float32) * weight[:, tap].to(torch.float32)
        total = total + (bf16_values(product) if contract.conv == "bf16_product" else product)
    return window[:, 1:].contiguous(), silu(total).to(torch.bfloat16)
