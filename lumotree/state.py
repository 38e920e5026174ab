"""The state surfaces of a prefix: recurrent matrices R, convolution history C, attention K and V.

Pools hold many slots. They are the only mutable data of the project: verify reads them (and writes candidate KV),
publish changes them in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.contract import Contract, Dims


@dataclass(frozen=True)
class KVCache:
    """Paged attention cache of one model.

    k, v: bf16 `[layers, flat_slots, kv_heads, head_dim]`; flat slot = page * page_size + offset. `k` is stored rotated.
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Pools:
    """Every surface of every slot.

    recurrent: `[layers, slots, *dims.recurrent_shape(layout)]` in the contract's state dtype.
    conv: bf16 `[layers, slots, D, W-1]`, oldest input first.
    cache: see KVCache.
    """

    recurrent: Tensor
    conv: Tensor
    cache: KVCache

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, for copies and bitwise comparison."""
        return {"recurrent": self.recurrent, "conv": self.conv, "k": self.cache.k, "v": self.cache.v}


@dataclass(frozen=True)
class State:
    """What one slot holds, in canonical form: recurrent fp32 `[HV, dv, dk]`, conv bf16 `[D, W-1]` oldest first."""

    recurrent: Tensor
    conv: Tensor


def canonical_state(pools: Pools, contract: Contract, slot: int, layer: int) -> State:
    """Read a slot that holds nothing deferred: layout to `[HV, dv, dk]`, dtype to fp32. Bits of the state are kept."""
    recurrent = pools.recurrent[layer, slot]
    if contract.layout == "KV":
        recurrent = recurrent.transpose(-1, -2)
    return State(recurrent.to(torch.float32).contiguous().clone(), pools.conv[layer, slot].clone())


def empty_pools(dims: Dims, contract: Contract, slots: int, flat_slots: int, device: torch.device | str) -> Pools:
    """Zeroed pools; the audit poisons what must not be read."""
    kv = (dims.layers, flat_slots, dims.kv_heads, dims.head_dim)
    return Pools(
        torch.zeros(
            (dims.layers, slots, *dims.recurrent_shape(contract.layout)), dtype=contract.state_dtype, device=device
        ),
        torch.zeros((dims.layers, slots, dims.conv_channels, dims.conv_width - 1), dtype=torch.bfloat16, device=device),
        KVCache(
            torch.zeros(kv, dtype=torch.bfloat16, device=device), torch.zeros(kv, dtype=torch.bfloat16, device=device)
        ),
    )
