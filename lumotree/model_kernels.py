# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The GPU's matrix product: one pinned tile, one order over K, for every number of rows.

Row block, column block, K block, warps and stages are constants, so that each program runs the same instructions on a
row whatever the number of rows; rows beyond the end are zeros. Products of bf16 are exact in fp32, in which they are
summed. Nothing is split over K: the order of a row's sum would then depend on the split.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lumotree.backends import interpreter
from lumotree.errors import ContractError

#: Rows, columns and K of one program's tile. 16 rows are the least that a tensor-core product takes.
ROWS, COLS, DEPTH = 16, 64, 64
WARPS, STAGES = 4, 3

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


def triton_product(x: Tensor, weight: Tensor, size: int) -> Tensor:
    """`lumotree.invariant.Product` on a GPU: bf16 `x [n, K]`, `weight [N, K]` -> fp32 `[n, N]`.

    `size` changes nothing but the bound on n: the kernel's own row block is fixed. Raises ContractError for another
    dtype or a stride.
    """
    for name, value in (("x", x), ("weight", weight)):
        if value.dtype != torch.bfloat16 or not value.is_contiguous():
            raise ContractError(
                f"matrix product: expected contiguous bf16 {name}, got {value.dtype} stride={value.stride()}"
            )
    if x.shape[0] > size or x.shape[1] != weight.shape[1]:
        raise ContractError(f"matrix product: expected at most {size} rows of {weight.shape[1]}, got x {list(x.shape)}")
    rows, columns = x.shape[0], weight.shape[0]
    out = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLS))
    project[grid](
        x, weight, out, rows, columns, x.shape[1], BM=ROWS, BN=COLS, BK=DEPTH, num_warps=WARPS, num_stages=STAGES
    )
    return out
