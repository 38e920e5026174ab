"""Scalar helpers of the Triton kernels against torch."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from lumotree.verifier.kernels.bits import bf16_to_f32, f32_to_bf16, row_sum, sigmoid, softplus

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _round_trip(x, rounded, back, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    bits = f32_to_bf16(tl.load(x + i))
    tl.store(rounded + i, bits)
    tl.store(back + i, bf16_to_f32(bits))


@triton.jit
def _gates(x, sig, soft, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(sig + i, sigmoid(value))
    tl.store(soft + i, softplus(value))


@triton.jit
def _sum(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(out, row_sum(tl.load(x + i), 0))


def _bit_patterns() -> torch.Tensor:
    rng = np.random.default_rng(0)
    ties = (rng.integers(0, 2**16, 2048).astype(np.uint32) << 16) | 0x8000
    near = np.concatenate([ties - 1, ties, ties + 1])
    special = np.array([0, 2**31, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 1, 0x807FFFFF], np.uint32)
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001], np.uint32)
    anything = rng.integers(0, 2**32, 8192 - len(near) - len(special) - len(nans), dtype=np.uint32)
    return torch.from_numpy(np.concatenate([near, special, nans, anything]).view(np.float32)).to(DEVICE)


def test_rounding_is_torchs_rounding() -> None:
    x = _bit_patterns()
    rounded, back = torch.empty_like(x, dtype=torch.int16), torch.empty_like(x)
    _round_trip[(1,)](x, rounded, back, N=x.numel())
    expected = x.to(torch.bfloat16)
    number = ~torch.isnan(x)
    assert torch.equal(rounded[number], expected[number].view(torch.int16))
    assert torch.isnan(rounded.view(torch.bfloat16)[~number]).all()
    assert torch.equal(back[number].view(torch.int32), expected[number].float().view(torch.int32))


def test_gates_against_float64() -> None:
    x = torch.cat([torch.linspace(-80, 80, 2000), torch.linspace(-1, 1, 48)]).to(DEVICE)
    sig, soft = torch.empty_like(x), torch.empty_like(x)
    _gates[(1,)](x, sig, soft, N=x.numel())
    exact = x.double()
    unit = 2.0**-24
    # exp of a rounded argument is relatively off by |x| units; ex2.approx and div.full of a GPU by some more.
    allowed = (12 + 2 * exact.abs()) * unit
    for got, want in ((sig, exact.sigmoid()), (soft, torch.logaddexp(exact, torch.zeros_like(exact)))):
        assert ((got.double() - want).abs() <= allowed * want).all()


def test_gates_are_exact_where_the_exact_grid_needs_it() -> None:
    x = torch.tensor([0.0, 200.0, -200.0, 30.0]).to(DEVICE)
    sig, soft = torch.empty_like(x), torch.empty_like(x)
    _gates[(1,)](x, sig, soft, N=4)
    assert sig[:3].tolist() == [0.5, 1.0, 0.0]
    assert soft.tolist() == [float(np.log(np.float32(2))), 200.0, 0.0, 30.0]


def test_nan_survives_the_gates() -> None:
    x = torch.full((4,), float("nan")).to(DEVICE)
    sig, soft = torch.zeros_like(x), torch.zeros_like(x)
    _gates[(1,)](x, sig, soft, N=4)
    assert torch.isnan(sig).all() and torch.isnan(soft).all()


@pytest.mark.parametrize("n", [16, 128])
def test_row_sum(n: int) -> None:
    x = torch.arange(n, dtype=torch.float32, device=DEVICE)
    out: Any = torch.zeros(1, device=DEVICE)
    _sum[(1,)](x, out, N=n)
    assert out.item() == n * (n - 1) / 2
