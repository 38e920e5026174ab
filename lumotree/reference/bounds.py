"""Derived error bounds: how far any correct fp32 implementation may be from the float64 oracle.

Nothing here is measured. The model is the standard one (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
ed., sections 2.2 and 3.1): each fp32 operation is exact up to a relative error u = 2^-24, a sum or dot product of n
terms in *any* order up to gamma_n = n u / (1 - n u) times the sum of magnitudes. So split reductions, other tiles, FMA
contraction, `x / sqrt`, either state layout and a decay applied behind the dot product all fit. Not covered: TF32 or
bf16 dot products, and WY or UT algebra, which solves a triangular system instead of stepping row by row.

**Recurrence.** Per value row (h, i), in L2 norm over dk. Write T = I - beta k k^T, R' = d R. The exact step is
R_new = R' T + beta v k^T. With |k| <= 1 (also <= 1 + 2^-8 when rounded to bf16) and 0 <= beta <= 1, T has spectral
norm <= 1: an error eps in the parent's row reaches the child as at most d eps and never grows along a path. Each row
adds `local`, the terms of `RowBound.step`. Two-factor products of errors are written out where they could matter; what
is left (products of two terms each below 2^-12, float64 rounding in the oracle: about dk 2^-53, the 2^-104 that
squares of subnormal keys lose beside the norm's 1e-6) is below 2^-11 of the terms kept, which `SECOND` covers.

**Elementary functions** are allowed what fast GPU intrinsics deliver (CUDA C++ Programming Guide, Mathematical
Functions, Intrinsic Functions; PTX ISA: ex2, rsqrt, sqrt, div .approx). Whatever can underflow may flush: `TINY`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.reference.rounding import TINY, half_ulp_bound

#: Unit roundoff of fp32, and the largest relative size of one ulp.
U: float = 2.0**-24
#: Unit roundoff of bf16.
U_BF16 = 2.0**-9
ULP: float = 2.0**-23
#: Terms of higher order, and the oracle's own rounding.
SECOND: float = 1.0 + 2.0**-10
#: __expf: 2 + floor(|1.173 x|) ulp; one more for a last multiplication or scaling.
EXP_ULPS, EXP_ULPS_SLOPE = 3.0, 1.173
#: rsqrt.approx 2 ulp; sqrt.approx 1 and division 2; 1 / sqrt and a multiplication.
RSQRT_ULPS = 4.0
#: __fdividef and div.approx.
DIV_ULPS = 2.0
#: logf 1, __logf 3 ulp outside [0.5, 2]; within, an absolute error of 2^-21.41, which only log(1 + e) can meet.
LOG_ULPS, LOG_ABSOLUTE = 3.0, 2.0**-21.41
#: Smallest key block after which an online softmax rescales.
SOFTMAX_BLOCK = 16
#: Above 1 / sqrt(1e-6): factor of the norm on what a subnormal loses.
NORM_GAIN = 1001.0


def gamma(terms: int) -> float:
    """Relative error of a sum of products with `terms` terms in any order."""
    return terms * U / (1 - terms * U)


def exp_error(x: Tensor) -> Tensor:
    """Relative error of exp(x) for an exact fp32 argument."""
    return (EXP_ULPS + EXP_ULPS_SLOPE * x.abs()) * ULP


def softplus_error(c: Tensor, value: Tensor, form: str) -> Tensor:
    """Absolute error of softplus at c, a rounded fp32 sum; `value` is exact.

    The slope sigmoid(c) <= 1 carries the error of the argument and of exp. `log(1 + e)` also rounds 1 + e, which costs
    u whatever the value is. Beside the switch at 20 an implementation may take the other branch: exp(-20).
    """
    argument: Tensor = U * c.abs() + TINY
    slope = torch.sigmoid(c + argument)
    curved = slope * exp_error(c) + (LOG_ULPS * ULP + U) * value + (U + LOG_ABSOLUTE if form == "log_exp" else 0.0)
    switch = torch.where((c - 20.0).abs() <= 2.0 * argument, math.exp(-19.99), 0.0)
    return slope * argument + torch.where(c > 20.0 + 2.0 * argument, 0.0, curved) + switch + TINY


def decay_error(A_log: Tensor, softplus: Tensor, softplus_err: Tensor) -> Tensor:
    """Absolute error of exp(-exp(A_log) softplus): the exponent's error, that of exp, and underflow."""
    A = torch.exp(A_log)
    g = A * softplus
    exponent = (A * softplus_err + g * (exp_error(A_log) + U)) * SECOND
    return torch.exp(-g) * torch.expm1((exponent + exp_error(g)).clamp(max=64.0)) + TINY


def sigmoid_error(x: Tensor, value: Tensor) -> Tensor:
    """Absolute error of 1 / (1 + exp(-x)) for an exact x: exp carries weight 1 - sigmoid, then a sum and a division."""
    relative = torch.sigmoid(-x) * exp_error(x) + U + DIV_ULPS * ULP
    return value * relative * SECOND + TINY


def norm_error(dim: int, scaled: bool) -> float:
    """Relative error of each element of a normalised key, or (scaled) of a query with its dk^-1/2.

    Half of the sum's error (and of adding a rounded 1e-6), root and quotient, one product; two roundings for the scale.
    """
    return (0.5 * (gamma(dim) + 2 * U) + RSQRT_ULPS * ULP + U + (2 * U if scaled else 0.0)) * SECOND


def norm_floor(dim: int) -> float:
    """L2 error that flushed subnormal inputs and results cost a normalised vector."""
    return math.sqrt(dim) * TINY * NORM_GAIN


@dataclass(frozen=True)
class RowBound:
    """What bounds one row: exact magnitudes and errors of its factors, float64 `[HV]`.

    decay, beta: values; key, query: L2 norms of the normalised vectors. `*_err`: absolute errors, those of key and
    query in L2 norm.
    """

    decay: Tensor
    decay_err: Tensor
    beta: Tensor
    beta_err: Tensor
    key: Tensor
    key_err: Tensor
    query: Tensor
    query_err: Tensor
    dk: int

    def step(self, parent: Tensor, parent_err: Tensor, new: Tensor, surprise: Tensor) -> Tensor:
        """L2 error of the new state's rows, `[HV, dv]`.

        parent, new: exact row norms |R|, |R_new|; parent_err: eps of the parent's rows; surprise: exact |v - R' k|.
        R' enters the dot product and the sum with errors that need not be the same (the decay may be applied behind
        the dot product), so its local error counts twice.
        """
        d, beta, k = self.decay[:, None], self.beta[:, None], self.key[:, None]
        k_err, beta_err = self.key_err[:, None], self.beta_err[:, None]
        flush = 2 * TINY * math.sqrt(self.dk)
        inherited = d * parent_err
        decayed_err = (self.decay_err[:, None] * (1 + U) + U * d) * (parent + parent_err) + flush
        off = inherited + decayed_err
        decayed = d * parent + off
        k_max = k + k_err
        dot_err = (gamma(self.dk) * k_max + k_err) * decayed + k * decayed_err + self.dk * TINY
        residual = surprise + k * off
        residual_max = residual + dot_err
        u_err = beta * (dot_err + U * residual_max) + (beta_err + U * (beta + beta_err)) * residual_max + TINY
        u_max = beta * residual + u_err
        outer_err = u_err * k_max + beta * residual * k_err + U * u_max * k_max + flush
        local = decayed_err + outer_err
        return inherited + (local + U * (new + inherited + local)) * SECOND

    def output(self, state: Tensor, state_err: Tensor, value: Tensor) -> Tensor:
        """Error of the bf16 output `R q`, `[HV, dv]`. state: exact row norms; value: exact output."""
        q, q_err = self.query[:, None], self.query_err[:, None]
        q_max, reach = q + q_err, state + state_err
        error = state_err * q_max + state * q_err + gamma(self.dk) * reach * q_max + self.dk * TINY
        return bf16_output(value, error)


def bf16_output(value: Tensor, error: Tensor) -> Tensor:
    """Error after the result, itself within `error` of value, is rounded to bf16."""
    error = error * SECOND
    return error + half_ulp_bound(value, error)


def conv_error(total: Tensor, magnitude: Tensor, taps: int, value: Tensor) -> Tensor:
    """Error of the bf16 output of the convolution.

    total: exact sum of tap products; magnitude: sum of their magnitudes; value: exact silu(total). The slope of silu
    within the sum's error, `sigmoid (1 + x (1 - sigmoid))`, is bounded at the worse end of each factor.
    """
    sum_err = gamma(taps) * magnitude + 2 * taps * TINY
    slope = torch.sigmoid(total + sum_err) * (1 + (total.abs() + sum_err) * torch.sigmoid(sum_err - total))
    quotient = torch.sigmoid(-total) * exp_error(total) + 2 * U + DIV_ULPS * ULP
    return bf16_output(value, slope * sum_err + value.abs() * quotient + (1 + total.abs()) * TINY)


def rope_error(first: Tensor, second: Tensor) -> Tensor:
    """Error of `x1 cos - x2 sin` before bf16: two products, one sum. first, second: magnitudes of the products."""
    return 2 * U * (first + second) * SECOND + 3 * TINY


def score_error(magnitude: Tensor, moved: Tensor, scale: float, dim: int) -> Tensor:
    """Absolute error of a scaled score.

    Scaling costs two roundings, a factor log2(e) for exp2 two more. magnitude: sum of |q||k| at their largest;
    moved: how far bf16 flips of rotated q and k can move the dot product.
    """
    return scale * ((gamma(dim) + 4 * U) * magnitude + moved) * SECOND + dim * TINY


def softmax_error(score_err: Tensor, below_max: Tensor, keys: int) -> Tensor:
    """Relative error of an unnormalised softmax weight.

    below_max: exact max - score. A common shift of all scores cancels. An online softmax multiplies by one more exp a
    block; their arguments sum to no more than the spread of the scores, already in the slope of `exp_error` twice.
    """
    rescale = -(-keys // SOFTMAX_BLOCK) * (EXP_ULPS * ULP + U)
    return torch.expm1((score_err + U * below_max + 2 * exp_error(below_max) + rescale).clamp(max=64.0))


def attention_error(
    value: Tensor, weighted: Tensor, spread: Tensor, mass: Tensor, keys: int, largest: Tensor
) -> Tensor:
    """Error of the bf16 attention output `[A, Hq, dh]`.

    weighted: sum p |v|; spread: sum p rho |v|, with rho the relative error of each weight; mass: sum p rho `[A, Hq]`;
    largest: max |v|. From o' - o = sum p rho' (v - o) / (1 + sum p rho'), |rho'| <= rho; then the sums of weights and
    of values, and the division. Unbounded where mass reaches 1.
    """
    mass = mass[..., None]
    moved = (spread + mass * value.abs()) / (1 - mass).clamp(min=TINY)
    arithmetic = (2 * gamma(keys) + (DIV_ULPS + 1) * ULP) * (weighted + moved) * (1 + mass)
    error = torch.where(mass < 1, moved + arithmetic + keys * TINY * (1 + largest), torch.inf)
    return bf16_output(value, error)
