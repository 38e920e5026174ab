"""The one recurrent step that verification, publication and one-token decoding share.

Bits must depend on a row's operands and its parent's state only: not on how many rows, paths, heads of a tile or
requests are computed together. Three rules give that by construction, none of them by luck:

* State tiles are only touched by elementwise multiplications and additions. IEEE 754 defines each result from its
  two operands, wherever the element stands in the tensor and whatever vector width computes it. Multiplication and
  addition are separate calls, so that no compiler can contract them to an FMA.
* Sums run in an order spelled out here (`halve`), as elementwise additions of slices, never as a library reduction
  whose tree depends on shapes, strides or threads.
* exp and log1p are not correctly rounded and their vector body and scalar tail may differ, so they are called on one
  row at a time (`rowwise`): an element's place in that call is fixed by its head alone. Square root and division are
  correctly rounded and may be batched.

Inside, a state tile is `[paths, heads, dk, dv]`: sums over dk then add whole contiguous dv vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.protocol import GdnOps
from lumotree.contract import Contract

#: Slices from which on, if their number is odd, they are added one by one.
FEW = 8
# Numbers as tensors: torch makes one of a Python number in every call, which costs more than small rows do.
_NORM_EPS, _LINEAR_ABOVE, ONE = (torch.tensor(x, dtype=torch.float32, device="cpu") for x in (1e-6, 20.0, 1.0))

#: Sum of a tile over its second-last dimension; may destroy the tile.
Reduce = Callable[[Tensor], Tensor]


def halve(tile: Tensor, dim: int) -> Tensor:
    """Sum over `dim`, destroying `tile`: the last half is added to the first until one slice is left.

    The order depends on the length of `dim` alone; an odd length keeps its middle slice for the next round, so
    nothing is padded. Returns a view of `tile` without `dim`.
    """
    n = tile.shape[dim]
    while n > FEW or n % 2 == 0:
        half = n // 2
        if n % 2:
            tile.narrow(dim, 0, half).add_(tile.narrow(dim, n - half, half))
            tile = tile.narrow(dim, 0, n - half)
        else:
            # Both views in one call: the calls are most of the cost of small tiles.
            tile, last = tile.split_with_sizes((half, half), dim)
            tile.add_(last)
        n -= half
    if n == 1:
        return tile.select(dim, 0)
    slices = tile.unbind(dim)
    while n > 1:
        kept = n - n // 2
        for i in range(n - kept):
            slices[i].add_(slices[kept + i])
        n = kept
    return slices[0]


def halve_rows(tile: Tensor) -> Tensor:
    """`halve` over dk of a `[.., dk, dv]` tile: the reduction of the native step."""
    return halve(tile, -2)


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each row of `x [T, ..]` in a call of its own, so that T cannot change its bits.

    A row of more than 32768 elements (torch's grain size) is split by the number of threads, which must then stay.
    """
    if x.shape[0] == 1:
        return function(x.contiguous())
    x = x.clone(memory_format=torch.contiguous_format)
    in_place(function, x.unbind())
    return x


#: Functions of one tensor -> the same on each tensor of a list, in place: a loop in C++, which on a CPU is all they do.
_LOOPS: dict[Any, Callable[[tuple[Tensor, ...]], None]] = {
    torch.exp: torch._foreach_exp_,
    torch.log: torch._foreach_log_,
    torch.log1p: torch._foreach_log1p_,
}


def in_place(function: Callable[[Tensor], Tensor], rows: Sequence[Tensor]) -> None:
    """Replace each contiguous tensor by `function` of it, in a call of its own."""
    loop = _LOOPS.get(function)
    if loop is not None and rows and not rows[0].is_cuda:  # on a GPU the loop is one kernel, of its own arithmetic
        loop(tuple(rows))
        return
    for row in rows:
        row.copy_(function(row))


def softplus(x: Tensor, form: str) -> Tensor:
    """fp32 softplus of `x [T, H]`, linear above 20, in the declared form."""
    e = rowwise(torch.exp, x)
    soft = rowwise(torch.log1p, e) if form == "log1p" else rowwise(torch.log, e + ONE)
    return torch.where(x > _LINEAR_ABOVE, x, soft)


def sigmoid(x: Tensor) -> Tensor:
    """fp32 `1 / (1 + exp(-x))` of `x [T, H]`."""
    return rowwise(torch.exp, -x).add_(ONE).reciprocal_()


def normalise(x: Tensor, form: str) -> Tensor:
    """fp32 L2-normalised `x [T, H, dk]` (bf16), in the declared form."""
    wide = x.float()
    root = halve(wide * wide, -1).add_(_NORM_EPS).sqrt_().unsqueeze(-1)
    if form == "sqrt":
        return wide / root
    unit = wide * root.reciprocal()
    return unit.bfloat16().float() if form == "bf16" else unit


@lru_cache(maxsize=64)
def inverse_root(n: int) -> Tensor:
    """fp32 `n^-1/2`, a number."""
    return torch.tensor(n**-0.5, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Operands:
    """fp32 operands of the update. Key heads are already spread to value heads.

    q (scaled by dk^-1/2), k `[.., HV, dk]`; v `[.., HV, dv]`; decay = exp(g), beta `[.., HV]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def take(self, rows: Sequence[int], heads: slice) -> Operands:
        """Operands of some rows and heads. One row, or all in their order, are views; others are gathered."""
        if heads.start == 0 and heads.stop == self.v.shape[1] and list(rows) == list(range(len(self.v))):
            return self
        pick = slice(rows[0], rows[0] + 1) if len(rows) == 1 else torch.tensor(rows, device=self.v.device)
        return Operands(*(x[pick, heads] for x in (self.q, self.k, self.v, self.decay, self.beta)))

    def part(self, rows: slice) -> Operands:
        """Operands of consecutive rows, as views."""
        if rows.stop - rows.start == len(self.v):
            return self
        return Operands(*(x[rows] for x in (self.q, self.k, self.v, self.decay, self.beta)))


def joined(parts: Sequence[Operands]) -> Operands:
    """The rows of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((x.q, x.k, x.v, x.decay, x.beta) for x in parts), strict=True)
    return Operands(*(torch.cat(column) for column in columns))


def prepare(ops: GdnOps, contract: Contract, *, query: bool = True) -> Operands:
    """Norms and gates of T rows (contract section 2). Without `query` (replay needs none) the result's q is k."""
    hk, hv, dk = ops.k.shape[1], ops.v.shape[1], ops.k.shape[2]
    keys = torch.cat([ops.k, ops.q], 1) if query else ops.k  # one pass over both: on small rows the calls are the cost
    count = keys.shape[0]
    heads = normalise(keys, contract.norm).view(count, 1 + query, hk, dk)
    spread = heads.unsqueeze(3 if contract.head_map == "grouped" else 2)
    many = (hk, hv // hk) if contract.head_map == "grouped" else (hv // hk, hk)
    spread = spread.expand(-1, -1, *many, -1).reshape(count, 1 + query, hv, dk)
    k = spread[:, 0]
    q = spread[:, 1] * inverse_root(dk) if query else k
    g = torch.exp(ops.A_log.contiguous()).neg_() * softplus(ops.a.float() + ops.dt_bias, contract.softplus)
    beta = sigmoid(ops.b.float())
    if contract.beta == "bf16":
        beta = beta.bfloat16().float()
    return Operands(q, k, ops.v.float(), rowwise(torch.exp, g), beta)


def step(state: Tensor, scratch: Tensor, x: Operands, reduce: Reduce, *, output: bool) -> Tensor | None:
    """One token for each path, in place; order of operations as in contract section 2.

    state, scratch: fp32 `[P, h, dk, dv]`; x: operands of P rows and h heads. Returns fp32 `o [P, h, dv]`, a view of
    `scratch`, or None without `output`; the state's bits are the same either way.
    """
    k = x.k.unsqueeze(-1)
    state.mul_(x.decay.unsqueeze(-1).unsqueeze(-1))
    torch.mul(state, k, out=scratch)
    u = (x.v - reduce(scratch)).mul_(x.beta.unsqueeze(-1))
    torch.mul(k, u.unsqueeze(-2), out=scratch)
    state.add_(scratch)
    if not output:
        return None
    torch.mul(state, x.q.unsqueeze(-1), out=scratch)
    return reduce(scratch)
