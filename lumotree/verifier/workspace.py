"""What the torch verifier keeps between verification and publication: operands as rounded, nothing derived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.backends.protocol import ConvOps, GdnOps, Limits
from lumotree.contract import Contract, Dims
from lumotree.errors import ContractError
from lumotree.verifier.step import Operands, prepare


@dataclass(frozen=True)
class Workspace:
    """Replay operands of each layer, written by verify and read by publish.

    bf16 `k [L, T, HK, dk]`, `v [L, T, HV, dv]`, `a, b [L, T, HV]`, `x [L, T, D]`; fp32 `A_log, dt_bias [L, HV]`.
    NaN until recorded, so that publishing what was never verified shows.
    """

    limits: Limits
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    x: Tensor

    @staticmethod
    def make(dims: Dims, limits: Limits, device: torch.device | str) -> Workspace:
        """Allocate for a model and limits."""

        def unset(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.full(shape, torch.nan, dtype=dtype, device=device)

        layers, rows = limits.layers, limits.rows
        return Workspace(
            limits,
            k=unset(layers, rows, dims.hk, dims.dk),
            v=unset(layers, rows, dims.hv, dims.dv),
            a=unset(layers, rows, dims.hv),
            b=unset(layers, rows, dims.hv),
            A_log=unset(layers, dims.hv, dtype=torch.float32),
            dt_bias=unset(layers, dims.hv, dtype=torch.float32),
            x=unset(layers, rows, dims.conv_channels),
        )

    def record_gdn(self, ops: GdnOps, layer: int) -> None:
        """Keep the operands of a layer's replay. Raises ContractError when shapes or dtypes are not the workspace's."""
        for name in ("k", "v", "a", "b"):
            _record(f"gdn {name}", getattr(self, name)[layer], getattr(ops, name))
        self.A_log[layer].copy_(ops.A_log)
        self.dt_bias[layer].copy_(ops.dt_bias)

    def record_conv(self, ops: ConvOps, layer: int) -> None:
        """Keep a layer's conv inputs. Raises ContractError when shape or dtype is not the workspace's."""
        _record("conv x", self.x[layer], ops.x)

    def replay_operands(self, layer: int, rows: Sequence[int], contract: Contract) -> Operands:
        """The recorded operands of some rows after norms and gates, as verification computed them."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.k.device)
        k, v, a, b = (recorded[layer, index] for recorded in (self.k, self.v, self.a, self.b))
        ops = GdnOps(k, k, v, a, b, self.A_log[layer], self.dt_bias[layer])
        return prepare(ops, contract, query=False)


def _record(name: str, target: Tensor, value: Tensor) -> None:
    if value.dtype != target.dtype or value.shape[1:] != target.shape[1:]:
        want = ", ".join(map(str, target.shape[1:]))
        raise ContractError(f"{name}: expected {target.dtype} [rows, {want}], got {value.dtype} {list(value.shape)}")
    target[: len(value)].copy_(value)
