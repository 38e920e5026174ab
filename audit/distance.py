"""Every metric of the audit, once.

All functions take torch tensors on any device and return tensors there, unless they say `float`, `int` or `bool`.
`cells` is the number of leading dimensions that are kept: with `cells=2`, `[rows, heads, dv]` gives `[rows, heads]`.
A metric never hides a NaN: errors carry it, and `ratios` turns it into infinity.

Raises ContractError when shapes, dtypes or probabilities make the question meaningless.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lumotree.errors import ContractError

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ULP_DTYPES = (torch.bfloat16, torch.float32)

#: ULP distance of a pair in which either side is NaN: larger than that of any two numbers.
ULP_NAN = 2**62

#: Contract section 6: `E_tree <= PAIRED_FACTOR * E_native + PAIRED_RELATIVE * M64 + PAIRED_FLOOR`.
PAIRED_FACTOR = 1.10
PAIRED_RELATIVE = 2.0**-24
PAIRED_FLOOR = 2.0**-149


def bit_pattern(x: Tensor) -> Tensor:
    """Return `x` reinterpreted as integers of its width; nothing is converted."""
    if x.dtype.is_complex or x.element_size() not in _INT_OF_SIZE:
        raise ContractError(f"bits: expected a real, integer or bool tensor, got dtype={x.dtype}")
    return x.detach().contiguous().view(_INT_OF_SIZE[x.element_size()])


def differing_mask(a: Tensor, b: Tensor) -> Tensor:
    """Return a bool tensor, True where the bit patterns differ.

    NaNs with other payloads differ, and so do -0 and +0; a NaN equals itself.
    """
    _same_kind(a, b)
    return bit_pattern(a) != bit_pattern(b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether `a` and `b` hold the same bits in every element (True for two empty tensors)."""
    _same_kind(a, b)
    x, y = bit_pattern(a).flatten(), bit_pattern(b).flatten()
    if _in_words(x) and _in_words(y):
        x, y = x.view(torch.int64), y.view(torch.int64)
    # On a CPU numpy compares integers about four times as fast as torch.equal.
    return bool(np.array_equal(x.numpy(), y.numpy())) if x.device.type == "cpu" else torch.equal(x, y)


def _in_words(flat: Tensor) -> bool:
    """Whether a flat tensor can be read eight bytes at a time."""
    size = flat.element_size()
    return flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0


def differing(a: Tensor, b: Tensor) -> int:
    """Return how many elements differ in their bits."""
    return int(differing_mask(a, b).sum())


def differing_cells(a: Tensor, b: Tensor, cells: int) -> Tensor:
    """Return the count of differing elements in each cell, int64."""
    return _flat(differing_mask(a, b), cells).sum(-1)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return, per element, how many representable numbers lie between `a` and `b` (bf16 or fp32), int64.

    -0 and +0 are 0 apart, infinity is 1 above the largest number, and a NaN on either side gives `ULP_NAN`.
    """
    _same_kind(a, b)
    if a.dtype not in _ULP_DTYPES:
        raise ContractError(f"ulp distance: expected bf16 or fp32 tensors, got dtype={a.dtype}")
    distance = (_ordinal(a) - _ordinal(b)).abs()
    return torch.where(a.isnan() | b.isnan(), torch.full_like(distance, ULP_NAN), distance)


def rms_error(got: Tensor, reference: Tensor, cells: int) -> Tensor:
    """Return the root of the mean squared error of each cell against a float64 reference."""
    return _flat(_error(got, reference), cells).square().mean(-1).sqrt()


def max_error(got: Tensor, reference: Tensor, cells: int) -> Tensor:
    """Return the largest absolute error of each cell against a float64 reference; a NaN in a cell makes it NaN."""
    return _flat(_error(got, reference), cells).abs().amax(-1)


def max_magnitude(reference: Tensor, cells: int) -> Tensor:
    """Return the largest magnitude of each cell, float64: M64 of the paired rule."""
    return _flat(reference.double(), cells).abs().amax(-1)


def relative_l2(got: Tensor, reference: Tensor, cells: int = 0) -> Tensor:
    """Return `|got - reference| / |reference|` of each cell in float64; 0 / 0 is 0, and x / 0 is infinity."""
    a, b = got.double(), reference.double()
    _same_kind(a, b)
    error, norm = _flat(a - b, cells).norm(dim=-1), _flat(b, cells).norm(dim=-1)
    return torch.where((norm == 0) & (error == 0), torch.zeros_like(error), error / norm)


def ratios(error: Tensor, bound: Tensor | float) -> Tensor:
    """Return `error / bound` element by element, float64; above 1 the bound is broken.

    An error that is NaN or infinite has ratio infinity; error 0 within bound 0 has ratio 0; any error above bound 0
    has ratio infinity. Raises ContractError for a bound that is negative, NaN or infinite: it would judge nothing.
    """
    limit = torch.as_tensor(bound, dtype=torch.float64, device=error.device)
    if not bool((limit.isfinite() & (limit >= 0)).all()):
        raise ContractError("ratio: expected every bound to be finite and >= 0, got a NaN, infinite or negative one")
    size = error.double().abs()
    ratio = torch.where((size == 0) & (limit == 0), torch.zeros_like(size), size / limit)
    return torch.where(size.isfinite(), ratio, torch.full_like(ratio, torch.inf))


def worst_ratio(error: Tensor, bound: Tensor | float) -> float:
    """Return the largest of `ratios`. Raises ContractError when there is no element: nothing is not a pass."""
    values = ratios(error, bound)
    if values.numel() == 0:
        raise ContractError("worst ratio: expected at least one cell, got an empty tensor")
    return float(values.max())


def paired_rule(e_tree: Tensor, e_native: Tensor, m64: Tensor) -> Tensor:
    """Return the ratio of the published paired rule (contract section 6) in each cell; it holds where <= 1.

    All three are float64 and of one shape: error of the tree arm, error of the native arm (both RMS or both max),
    and the largest oracle magnitude. Where the native arm itself is not finite no bound exists: infinity.
    """
    bound = PAIRED_FACTOR * e_native.double() + PAIRED_RELATIVE * m64.double() + PAIRED_FLOOR
    usable = bound.isfinite()
    ratio = ratios(e_tree, torch.where(usable, bound, torch.ones_like(bound)))
    return torch.where(usable, ratio, torch.full_like(ratio, torch.inf))


def kl_rows(p: Tensor, q: Tensor, tolerance: float = 1e-5) -> Tensor:
    """Return `sum p ln(p / q)` over the last dimension, in nats, float64; infinity where q misses support of p.

    Raises ContractError, naming the row, for probabilities that are not finite, negative or do not sum to 1
    within `tolerance` (absolute; rows computed in fp32 over a large vocabulary are off by about 1e-6).
    """
    a, b = _probabilities("p", p, tolerance), _probabilities("q", q, tolerance)
    _same_kind(a, b)
    # p and q may each be off from sum 1 by rounding, which can push the sum a hair below zero.
    return torch.where(a > 0, a * (a.log() - b.log()), torch.zeros_like(a)).sum(-1).clamp_min(0.0)


def tv_rows(p: Tensor, q: Tensor, tolerance: float = 1e-5) -> Tensor:
    """Return the total variation distance, `sum |p - q| / 2`, of each row, float64. Raises as `kl_rows` does."""
    a, b = _probabilities("p", p, tolerance), _probabilities("q", q, tolerance)
    _same_kind(a, b)
    return (a - b).abs().sum(-1) / 2


def _same_kind(a: Tensor, b: Tensor) -> None:
    """Refuse a pair that broadcasting or promotion would silently bend into agreement."""
    if a.shape != b.shape:
        raise ContractError(f"distance: expected two tensors of one shape, got {list(a.shape)} and {list(b.shape)}")
    if a.dtype != b.dtype:
        raise ContractError(f"distance: expected two tensors of one dtype, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ContractError(f"distance: expected two tensors on one device, got {a.device} and {b.device}")


def _flat(x: Tensor, cells: int) -> Tensor:
    """Return `x` with everything after the first `cells` dimensions flattened into one."""
    if not 0 <= cells <= x.ndim:
        raise ContractError(f"distance: expected 0 <= cells <= {x.ndim} for shape {list(x.shape)}, got cells={cells}")
    inner = x.shape[cells:].numel()
    if inner == 0:
        raise ContractError(f"distance: a cell has no element: shape {list(x.shape)}, cells={cells}")
    return x.reshape(*x.shape[:cells], inner)


def _error(got: Tensor, reference: Tensor) -> Tensor:
    """Return `got - reference` in float64; the reference must be float64 already, or it would be no reference."""
    if reference.dtype != torch.float64:
        raise ContractError(f"error: expected a float64 reference, got dtype={reference.dtype}")
    widened = got.double()
    _same_kind(widened, reference)
    return widened - reference


def _ordinal(x: Tensor) -> Tensor:
    """Return the rank of each float among all floats of its dtype, int64; both zeros have rank 0."""
    bits = bit_pattern(x).long()
    magnitude = bits & (2 ** (8 * x.element_size() - 1) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def _probabilities(name: str, rows: Tensor, tolerance: float) -> Tensor:
    """Return `rows` in float64 after checking that each is a probability vector."""
    if not rows.dtype.is_floating_point or rows.ndim == 0 or rows.shape[-1] == 0:
        raise ContractError(f"{name}: expected floating rows [.., V], got {rows.dtype} of shape {list(rows.shape)}")
    flat = rows.detach().double().reshape(-1, rows.shape[-1])
    _refuse_rows(name, ~flat.isfinite().all(-1), flat.sum(-1), "every probability finite")
    _refuse_rows(name, (flat < 0).any(-1), flat.amin(-1), "every probability >= 0")
    total = flat.sum(-1)
    _refuse_rows(name, (total - 1).abs() > tolerance, total, f"a sum of 1 within {tolerance:g}")
    return flat.reshape(rows.shape)


def _refuse_rows(name: str, bad: Tensor, value: Tensor, wanted: str) -> None:
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise ContractError(f"{name}: expected {wanted}, got {float(value[row])!r} in row {row} of {bad.numel()}")
