"""The layers of the hybrid model, row by row: a row's bits never depend on the other rows (contract section 7).

Activations have the model's dtype (bf16) between layers; inside a layer they are wide: fp32 for bf16, otherwise as they
are. Each function rounds once, at its end. Three rules keep rows apart on a CPU: products go through
`lumotree.invariant`, sums are spelled out with `halve`, and exp is called on one row at a time, since its vector body
and tail might differ. Everything else is correctly rounded elementwise arithmetic, multiplication and addition in
separate calls. On a GPU kernels with a pinned tile do the same work (`lumotree.model_kernels`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lumotree.invariant import multiply
from lumotree.verifier.step import halve, rowwise


def wide(x: Tensor) -> Tensor:
    """x in the dtype that layers compute in: fp32 for bf16; exact."""
    return x.to(torch.float32) if x.dtype == torch.bfloat16 else x


def _kernels() -> Any:
    """The GPU's kernels; they import triton, which models on a CPU do without."""
    from lumotree import model_kernels

    return model_kernels


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))` of wide `x [T, ..]` on a CPU."""
    return 1.0 / (1.0 + rowwise(torch.exp, -x))


def silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))` of wide `x [T, ..]` on a CPU."""
    return x / (1.0 + rowwise(torch.exp, -x))


def gated(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """`x * sigmoid(gate)` or `x * silu(gate)` of `[T, ..]`, in x's dtype. activation: "sigmoid" or "silu"."""
    if x.is_cuda:
        result: Tensor = _kernels().triton_gate(x, gate, silu=activation == "silu")
        return result
    factor = silu(wide(gate)) if activation == "silu" else sigmoid(wide(gate))
    return (wide(x) * factor).to(x.dtype)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Wide `x / sqrt(mean(x^2) + eps)` over the last dimension."""
    values = wide(x)
    mean = halve(values * values, -1) / x.shape[-1]
    return values * (1.0 / torch.sqrt(mean + eps)).unsqueeze(-1)


@dataclass(frozen=True)
class RmsNorm:
    """`x / rms(x) * (1 + weight)`: the family's zero-centred norm, over the last dimension. scale: wide 1 + weight."""

    scale: Tensor
    eps: float

    @staticmethod
    def make(weight: Tensor, eps: float) -> RmsNorm:
        """From the weight as a checkpoint has it."""
        return RmsNorm(1.0 + wide(weight), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, .., dim]`, same dtype out."""
        if x.is_cuda:
            normed: Tensor = _kernels().triton_norm(x, self.scale, self.eps)
            return normed
        return (unit_rms(x, self.eps) * self.scale).to(x.dtype)


@dataclass(frozen=True)
class GatedRmsNorm:
    """`x / rms(x) * weight * silu(gate)`: the norm behind a GDN layer, per head; its weight is not zero-centred."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: `[T, HV, dv]`, same dtype out."""
        if x.is_cuda:
            normed: Tensor = _kernels().triton_norm(x, self.weight, self.eps, gate)
            return normed
        return (unit_rms(x, self.eps) * wide(self.weight) * silu(wide(gate))).to(x.dtype)


@dataclass(frozen=True)
class Linear:
    """One or more projections of the same input, multiplied in one product.

    weight: `[sum of sizes, K]`, wide on a CPU (bf16 values are exact in it), as in the checkpoint on a GPU. sizes: rows
    of each projection.
    """

    weight: Tensor
    sizes: tuple[int, ...]

    @staticmethod
    def make(weights: Sequence[Tensor]) -> Linear:
        """Projections `[N_i, K]` of one input. The weight is copied: a product may depend on its alignment."""
        joined = torch.cat(list(weights))
        return Linear(joined if joined.is_cuda else wide(joined), tuple(len(w) for w in weights))

    def raw(self, x: Tensor) -> Tensor:
        """`[T, K]` -> wide `[T, sum of sizes]`, not rounded."""
        return multiply(x.to(self.weight.dtype), self.weight)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[T, K]` -> contiguous `[T, N_i]` in x's dtype."""
        return tuple(part.to(x.dtype).contiguous() for part in torch.split(self.raw(x), list(self.sizes), 1))


@dataclass(frozen=True)
class Mlp:
    """`down(silu(gate(x)) * up(x))`."""

    gate_up: Linear
    down: Linear

    @staticmethod
    def make(weights: Mapping[str, Tensor], prefix: str) -> Mlp:
        """From a checkpoint's tensors; prefix ends in "mlp."."""
        gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return Mlp(Linear.make([gate, up]), Linear.make([down]))

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H]` in and out."""
        gate, up = self.gate_up(x)
        return self.down(gated(up, gate, "silu"))[0]
