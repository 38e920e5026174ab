# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The layers' kernels on a GPU: one pinned tile and one order of sums, for every number of rows.

Tile shapes, warps and stages are constants or follow from a row's width, and no contraction is allowed outside the
matrix product, so each program runs the same instructions on a row whatever the number of rows. Nothing is split over
the length of a sum: its order would then depend on the split. Products of bf16 are exact in fp32, in which they are
summed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lumotree.backends import interpreter
from lumotree.errors import ContractError

#: Rows, columns and K of one program of the product. 16 rows are the least that a tensor-core product takes.
ROWS, COLS, DEPTH = 16, 64, 64
WARPS, STAGES = 4, 3
#: Elements of one program of an elementwise kernel.
BLOCK = 1024

interpreter.prepare()  # without a GPU: bf16 tiles need the interpreter's repair


@triton.jit(do_not_specialize=("rows", "columns", "depth"), do_not_specialize_on_alignment=("x", "weight", "out"))
def project(
    x, weight, out, rows, columns, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (row block, column block): `out[m, n] = sum_k x[m, k] weight[n, k]`, fp32."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, depth, BK):
        inside = start + k < depth
        a = tl.load(
            x + m[:, None].to(tl.int64) * depth + (start + k)[None, :],
            mask=(m < rows)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            weight + n[None, :].to(tl.int64) * depth + (start + k)[:, None],
            mask=(n < columns)[None, :] & inside[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total)
    at = out + m[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(at, total, mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit
def logistic(x):
    """1 / (1 + exp(-x)), fp32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize_on_alignment=("x", "scale", "gate", "out"))
def norm_rows(
    x, scale, gate, out, eps,
    DIM: tl.constexpr, BD: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Program (row): `x / sqrt(mean(x^2) + eps) * scale`, times `silu(gate)` if GATED."""
    at = tl.program_id(0).to(tl.int64) * DIM + tl.arange(0, BD)
    inside = tl.arange(0, BD) < DIM
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, 0) / DIM
    value = value * tl.rsqrt(mean + eps) * tl.load(scale + tl.arange(0, BD), mask=inside, other=0.0).to(tl.float32)
    if GATED:
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        value = value * (g * logistic(g))
    tl.store(out + at, value.to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=("count",), do_not_specialize_on_alignment=("x", "gate", "out"))
def gate_elements(x, gate, out, count, SILU: tl.constexpr, B: tl.constexpr):
    """`x * silu(gate)` or `x * sigmoid(gate)`."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    factor = logistic(g)
    if SILU:
        factor = g * factor
    tl.store(out + at, (value * factor).to(tl.bfloat16), mask=at < count)


def check_bf16(what: str, **tensors: Tensor) -> None:
    """Raise ContractError, naming the tensor, for another dtype than bf16 or a stride."""
    for name, value in tensors.items():
        if value.dtype != torch.bfloat16 or not value.is_contiguous():
            raise ContractError(f"{what}: expected contiguous bf16 {name}, got {value.dtype} stride={value.stride()}")


def triton_product(x: Tensor, weight: Tensor, size: int) -> Tensor:
    """`lumotree.invariant.Product` on a GPU: bf16 `x [n, K]`, `weight [N, K]` -> fp32 `[n, N]`.

    `size` changes nothing but the bound on n: the kernel's own row block is fixed. Raises ContractError for another
    dtype, a stride or too many rows.
    """
    check_bf16("matrix product", x=x, weight=weight)
    if x.shape[0] > size or x.shape[1] != weight.shape[1]:
        raise ContractError(f"matrix product: expected at most {size} rows of {weight.shape[1]}, got x {list(x.shape)}")
    rows, columns = x.shape[0], weight.shape[0]
    out = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLS))
    project[grid](
        x, weight, out, rows, columns, x.shape[1], BM=ROWS, BN=COLS, BK=DEPTH, num_warps=WARPS, num_stages=STAGES
    )
    return out


def triton_norm(x: Tensor, scale: Tensor, eps: float, gate: Tensor | None = None) -> Tensor:
    """RMS norm over the last dimension of bf16 `x [.., dim]` with `scale [dim]`, gated if there is a gate; bf16 out."""
    x = x.contiguous()
    check_bf16("norm", x=x, gate=x if gate is None else gate)
    out = torch.empty_like(x)
    dim, block = x.shape[-1], triton.next_power_of_2(x.shape[-1])
    if x.numel():
        norm_rows[(x.numel() // dim,)](
            x, scale, x if gate is None else gate, out, eps, DIM=dim, BD=block, GATED=gate is not None,
            num_warps=max(1, min(8, block // 256)), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def triton_gate(x: Tensor, gate: Tensor, *, silu: bool) -> Tensor:
    """`x * silu(gate)` or `x * sigmoid(gate)`, bf16 of one shape, fp32 inside."""
    x, gate = x.contiguous(), gate.contiguous()
    check_bf16("gate", x=x, gate=gate)
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        gate_elements[grid](x, gate, out, x.numel(), SILU=silu, B=BLOCK, num_warps=WARPS, enable_fp_fusion=False)
    return out
