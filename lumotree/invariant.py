"""Matrix products in which a row's bits do not depend on how many rows there are, where it stands, or its neighbours.

A library product picks its kernel by the number of rows, and with it the order of a row's sum. Here rows are always
multiplied in tiles of a few fixed sizes, filled up with zeros, and a size is only used once a probe of that very shape
has shown, on this machine and with this number of threads, that a row has the same bits alone, at every place of a tile
and beside any neighbours, and that all sizes in use agree. Where no size passes, rows are multiplied one at a time,
each in a call of its own: slow, and right by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lumotree.errors import ContractError

#: `product(x, weight, size)`: rows `x [n, K]`, n <= size, times `weight [N, K]` -> `[n, N]`, computed as a tile of
#: `size` rows. Sums at least in fp32; the result is not rounded to the dtype of x.
Product = Callable[[Tensor, Tensor, int], Tensor]

CPU_SIZES = (4, 8, 12, 16, 24, 32)
#: Multiples of the kernel's own row block: larger ones only save launches.
CUDA_SIZES = (16, 32, 64, 128)

#: Rows of a probe that are checked alone, and values that must stay with the neighbour that has them.
_ALONE = 4
_LOUD = (1e30, -3e38, float("inf"), float("nan"), 1e-40)


def padded_product(x: Tensor, weight: Tensor, size: int) -> Tensor:
    """The CPU's product: torch's own, over a fresh zero-filled tile (so that its alignment is always the same)."""
    tile = x.new_zeros((size, x.shape[1]))
    tile[: x.shape[0]] = x
    return F.linear(tile, weight)[: x.shape[0]]


def product_for(device: torch.device, dtype: torch.dtype) -> tuple[Product, tuple[int, ...]]:
    """The product of a device and the tile sizes to try. Raises ContractError for a dtype that it does not take."""
    if device.type == "cpu":
        return padded_product, CPU_SIZES
    if dtype != torch.bfloat16:
        raise ContractError(f"matrix product on {device.type}: expected bf16 weights, got dtype={dtype}")
    from lumotree.model_kernels import triton_product  # imports triton, which CPU models do without

    return triton_product, CUDA_SIZES


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """`x [T, K]` times `weight [N, K]` transposed, `[T, N]`, invariant as the module says.

    On a CPU both are fp32 or float64 and so is the result; on a GPU both are bf16 and the result is fp32. The first
    call of a shape probes it.
    """
    product, candidates = product_for(weight.device, weight.dtype)
    return in_tiles(product, x, weight, _probed(product, candidates, tuple(weight.shape), *_place(weight)))


def in_tiles(product: Product, x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Full tiles of the largest size, then the smallest one that holds what is left. sizes: ascending."""
    rows = x.shape[0]
    if rows == 0:
        return weight.new_zeros((0, weight.shape[0]), dtype=_result_dtype(weight))
    parts, at = [], 0
    while at < rows:
        size = next((s for s in sizes if s >= rows - at), sizes[-1])
        parts.append(product(x[at : at + size], weight, size))
        at += size
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def probe_sizes(
    product: Product, candidates: Sequence[int], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """The candidates that may be mixed: each invariant, all of the same bits as the largest of them; else `(1,)`.

    shape: `[N, K]` of the weight. Products of random values: which kernel a library picks does not depend on values.
    """
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=gen).to(dtype).to(device)
    x = torch.randn((max(candidates), shape[1]), generator=gen).to(dtype).to(device)
    passed: list[tuple[int, Tensor]] = []
    for size in sorted(candidates, reverse=True):
        alone = torch.cat([product(x[i : i + 1], weight, size) for i in range(_ALONE)])
        agrees = not passed or same_bits(alone, passed[0][1])
        if agrees and is_invariant(product, x[:size], weight, size, alone):
            passed.append((size, alone))
    return tuple(sorted(size for size, _ in passed)) or (1,)


def is_invariant(product: Product, x: Tensor, weight: Tensor, size: int, alone: Tensor) -> bool:
    """Whether the first rows of the full tile x have the bits of `alone [rows, N]` in every company and place."""
    few = min(len(alone), size)
    places = torch.arange(size, device=x.device)
    tiles = [(x, places[:few]), (x.flip(0), places.flip(0)[:few])]
    tiles += [(x.roll(shift, 0), (places + shift)[:few] % size) for shift in (1, size // 2, size - 1)]
    for i in range(few):  # every place at once
        if not same_bits(product(x[i].expand(size, -1).contiguous(), weight, size), alone[i].expand(size, -1)):
            return False
    for loud in _LOUD:
        noisy = torch.full_like(x, loud)
        noisy[1::2] = -noisy[1::2]
        at = places[:: max(2, size // few)][:few]  # with neighbours between them
        noisy[at] = x[: len(at)]
        tiles.append((noisy, at))
    return all(same_bits(product(tile, weight, size)[at], alone[: len(at)]) for tile, at in tiles)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality of two tensors of one shape and dtype, NaN payloads and signed zeros included."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _place(weight: Tensor) -> tuple[torch.dtype, torch.device, int]:
    return weight.dtype, weight.device, torch.get_num_threads()


def _result_dtype(weight: Tensor) -> torch.dtype:
    return torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype


@cache
def _probed(
    product: Product,
    candidates: tuple[int, ...],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
) -> tuple[int, ...]:
    """`probe_sizes` once per shape and place; the number of threads is part of the place (it may split a sum)."""
    return probe_sizes(product, candidates, shape, dtype, device)
