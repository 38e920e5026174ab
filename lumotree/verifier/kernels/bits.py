# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Scalar arithmetic of the kernels: bf16 as integers, gates, sums.

Annotations in modules with jitted functions are not postponed: Triton reads `tl.constexpr` from them.
"""

import triton
import triton.language as tl


@triton.jit
def bf16_to_f32(bits):
    """fp32 value of bf16 bits (int16); exact."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def f32_to_bf16(x):
    """Bits (int16) of fp32 rounded to nearest even bf16; any NaN becomes the quiet NaN 0x7fc0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    # Rounding up could carry a NaN's mantissa into the sign.
    return tl.where(x == x, rounded >> 16, 0x7FC0).to(tl.int16)


@triton.jit
def row_sum(x, axis: tl.constexpr):
    """`tl.sum` for fp32. The reduction is spelt out: under the interpreter `tl.sum` costs ten times as much."""
    return tl.reduce(x, axis, tl.standard._sum_combine)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), through exp(-|x|) so that nothing overflows."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """log1p(exp(x)), linear above 20.

    log1p(e) = log(u) * e / (u - 1) with u = 1 + e: the rounding of u cancels (Higham, Accuracy and Stability, 1.14.1),
    so very negative x keep their relative accuracy. softplus(0) is exactly fp32 log 2.
    """
    e = tl.exp(tl.where(x > 20.0, 20.0, x))
    u = 1.0 + e
    # u == 1: log1p(e) = e to fp32; the divisor is then replaced, the branch not taken must not divide by zero.
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)
