"""bf16 in float64: round-to-nearest-even without passing through fp32, spacing, and rounding of uncertain values.

float64 -> fp32 -> bf16 rounds twice and is wrong just beside a tie: 1 + 2^-8 + 2^-40 is 1 + 2^-7 in bf16, but fp32
makes a tie of it, which goes to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT_BITS = 0x7FF
_MANTISSA_WIDTH = 52
_SMALLEST_NORMAL = 1023 - 126  # biased float64 exponent of 2^-126, below which bf16 spacing is constant
_OVERFLOW = 2.0**128

#: Smallest normal number of fp32 and bf16: the most that flushing a subnormal to zero can change.
TINY = 2.0**-126


def bf16_ulp(x: Tensor) -> Tensor:
    """Distance between the bf16 numbers around |x|, float64: 2^(e - 7), and 2^-133 for subnormals."""
    exponent = (x.view(torch.int64) >> _MANTISSA_WIDTH) & _EXPONENT_BITS
    return ((exponent.clamp(min=_SMALLEST_NORMAL) - 7) << _MANTISSA_WIDTH).view(torch.float64)


def to_bf16(x: Tensor) -> Tensor:
    """float64 -> nearest bf16 value, ties to even, as float64. Overflow gives infinity, NaN stays NaN."""
    ulp = bf16_ulp(x)
    rounded = torch.round(x / ulp) * ulp  # ulp is a power of two: only torch.round rounds
    return torch.where(rounded.abs() >= _OVERFLOW, torch.copysign(torch.full_like(x, torch.inf), x), rounded)


def half_ulp_bound(x: Tensor, error: Tensor) -> Tensor:
    """Most by which rounding to bf16 moves any value within `error` of x, subnormal flush included."""
    reach = x.abs() + error
    return 0.5 * bf16_ulp(reach) + torch.where(reach < 2 * TINY, TINY, 0.0)


def to_bf16_uncertain(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """bf16(x), and how far from it bf16(y) can be for any y within `error` of x; elementwise float64.

    Rounding is monotone, so bf16(y) lies between bf16(x - error) and bf16(x + error): zero, unless a tie is in reach.
    """
    rounded = to_bf16(x)
    spread = torch.maximum(to_bf16(x + error) - rounded, rounded - to_bf16(x - error))
    return rounded, spread + torch.where(x.abs() < 2 * TINY, TINY, 0.0)


def to_bf16_rows(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 of the vectors `x [.., n]`, each within `error [..]` in L2 norm of the true one, and the new L2 error.

    An element without a tie in reach lands on bf16(x) exactly. The others move by their share of `error` plus at most
    one ulp, so a vector moves by at most error + |ulps of such elements|. Beside a power of two the tie below is only
    a quarter ulp away. On a CPU the first dim is worked through one by one to stay in the cache.
    """
    rounded, bound = torch.empty_like(x), torch.empty_like(error)
    for i in range(x.shape[0]) if x.device.type == "cpu" else (slice(None),):
        reach = error[i][..., None]
        ulp = bf16_ulp(x[i])
        steps = x[i] / ulp
        nearest = torch.round(steps)
        to_tie = (0.5 - (steps - nearest).abs()).clamp(max=0.25) * ulp
        torch.mul(nearest, ulp, out=rounded[i])
        loose = to_tie <= reach
        ulps = bf16_ulp(x[i].abs() + reach) * loose
        bound[i] = error[i] * loose.any(-1) + torch.linalg.vector_norm(ulps, dim=-1) + TINY * x.shape[-1] ** 0.5
    return rounded, bound
