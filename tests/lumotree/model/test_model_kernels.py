"""The GPU's kernels, on a GPU or under Triton's interpreter: against float64, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lumotree.errors import ContractError
from lumotree.invariant import CUDA_SIZES, in_tiles, probe_sizes, same_bits
from lumotree.model_kernels import triton_gate, triton_norm, triton_product

# The interpreter's numpy warns of the infinities and NaNs that the probe puts beside a row.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Sizes around the tile's edges; larger ones on a GPU only, where they cost nothing.
SHAPES = [(70, 60), (16, 129)] + ([(1000, 256), (5120, 704)] if DEVICE.type == "cuda" else [])


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).to(DEVICE)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_product_against_float64(n: int, k: int) -> None:
    x, weight = bf16(21, k), bf16(n, k, seed=1)
    exact = x.double() @ weight.double().t()
    # k - 1 additions of exact products, each rounding the partial sum.
    bound = (k - 1) * 2.0**-24 * (x.double().abs() @ weight.double().abs().t())
    got = triton_product(x, weight, 32)
    assert got.dtype == torch.float32
    assert bool(((got.double() - exact).abs() <= 1.01 * bound).all())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="under the interpreter a tile's product is numpy's")
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_tile_size_passes_the_probe(n: int, k: int) -> None:
    assert probe_sizes(triton_product, CUDA_SIZES, (n, k), torch.bfloat16, DEVICE) == CUDA_SIZES


def test_product_of_any_number_of_rows() -> None:
    # Under the interpreter bits may depend on the tile's size, on some processors: the probe finds that out.
    sizes = probe_sizes(triton_product, CUDA_SIZES[:2], (70, 60), torch.bfloat16, DEVICE)
    x, weight = bf16(37, 60), bf16(70, 60, seed=1)
    alone = torch.cat([triton_product(row[None], weight, sizes[0]) for row in x])
    assert same_bits(in_tiles(triton_product, x, weight, sizes), alone)
    assert same_bits(in_tiles(triton_product, x.flip(0), weight, sizes), alone.flip(0))
    assert in_tiles(triton_product, x[:0], weight, sizes).shape == (0, 70)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dim", [12, 40, 256])
def test_norm(dim: int, gated: bool) -> None:
    x, gate, scale = bf16(9, 4, dim), bf16(9, 4, dim, seed=1), bf16(dim, seed=2).float()
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double()
    if gated:
        wanted = wanted * F.silu(gate.double())
    got = triton_norm(x, scale, 1e-6, gate if gated else None)
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=2**-30)
    for i in (0, 5, 8):
        one = triton_norm(x[i : i + 1], scale, 1e-6, gate[i : i + 1] if gated else None)
        assert same_bits(one[0], got[i])
    noisy = x.clone()
    noisy[::2] = float("nan")
    assert same_bits(triton_norm(noisy, scale, 1e-6, gate if gated else None)[1::2], got[1::2])


@pytest.mark.parametrize("silu", [False, True])
def test_gate(silu: bool) -> None:
    x, gate = bf16(13, 130), bf16(13, 130, seed=1)
    factor = F.silu(gate.double()) if silu else torch.sigmoid(gate.double())
    got = triton_gate(x, gate, silu=silu)
    torch.testing.assert_close(got.double(), x.double() * factor, rtol=2**-8, atol=2**-30)
    for i in (0, 7, 12):
        assert same_bits(triton_gate(x[i : i + 1], gate[i : i + 1], silu=silu)[0], got[i])


def test_refusals() -> None:
    x, weight = bf16(5, 8), bf16(3, 8)
    with pytest.raises(ContractError, match="expected contiguous bf16 weight"):
        triton_product(x, weight.float(), 16)
    with pytest.raises(ContractError, match="expected contiguous bf16 x"):
        triton_product(bf16(8, 5).t(), weight, 16)
    with pytest.raises(ContractError, match=r"expected at most 4 rows of 8, got x \[5, 8\]"):
        triton_product(x, weight, 4)
    with pytest.raises(ContractError, match="expected contiguous bf16 gate"):
        triton_norm(x, torch.ones(8), 1e-6, x.float())
