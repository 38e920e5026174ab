"""What all launches share: pinned tiles, limits, and checks that raise before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, Limits
from lumotree.errors import BackendError, ContractError
from lumotree.verifier.kernels import INTERPRETED

MAX_KEY_DIM = 256
MAX_HEAD_DIM = 512
MAX_CONV_WIDTH = 16

#: Channels of one program of the convolution and of the KV move.
CHANNELS = 1024
ELEMENTWISE_WARPS = 4


@dataclass(frozen=True)
class Tile:
    """Block shape `[rows, cols]` of one program and its warps; together with the source they fix the bits."""

    rows: int
    cols: int
    warps: int


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


def _warps(elements: int) -> int:
    return max(1, min(4, elements // 1024))


def gdn_tile(dk: int, dv: int) -> Tile:
    """[value tile, padded dk]: the one place that pins the shape of the GDN step."""
    cols = next_power_of_2(dk)
    rows = min(32, next_power_of_2(dv))
    return Tile(rows, cols, _warps(rows * cols))


def attention_tile(head_dim: int) -> Tile:
    """[keys a block, padded head_dim]: the one place that pins the order of the online softmax."""
    cols = max(16, next_power_of_2(head_dim))
    return Tile(16, cols, _warps(16 * cols))


def channel_block(channels: int) -> int:
    """Channels that one program handles."""
    return min(CHANNELS, next_power_of_2(channels))


def as_bits(x: Tensor) -> Tensor:
    """A bf16 or bool tensor as the integers that the kernels read; no copy."""
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int8)


def runs(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Layers as (first, count) of ascending contiguous runs, in the given order: one launch each."""
    out: list[tuple[int, int]] = []
    for layer in layers:
        if out and layer == sum(out[-1]):
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((layer, 1))
    return out


def check_tensors(what: str, dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ContractError unless every tensor is contiguous and of the dtype."""
    for name, x in tensors:
        if x.dtype != dtype or not x.is_contiguous():
            raise ContractError(
                f"kernel {what}: expected contiguous {dtype}, got {name} {x.dtype} with shape {tuple(x.shape)} and "
                f"strides {x.stride()}"
            )


def check_shape(what: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ContractError unless x has exactly this shape."""
    if tuple(x.shape) != shape:
        raise ContractError(f"kernel {what}: expected {name} {list(shape)}, got {list(x.shape)}")


def check_limit(what: str, name: str, value: int, limit: int) -> None:
    """Raise ContractError when a size is above its limit."""
    if value > limit:
        raise ContractError(f"kernel {what}: {name}={value} is above the limit; allowed: at most {limit}")


def check_layers(what: str, layers: Sequence[int], limit: int) -> None:
    """Raise ContractError unless every layer is in 0..limit-1."""
    for layer in layers:
        if not 0 <= layer < limit:
            raise ContractError(f"kernel {what}: layer={layer} does not exist; allowed: 0..{limit - 1}")


def check_aligned(what: str, name: str, x: Tensor) -> None:
    """Raise ContractError unless the tensor starts at a multiple of 16 bytes.

    Alignment is part of what Triton specialises the state pointers on: with another one another binary would run.
    """
    if x.data_ptr() % 16:
        raise ContractError(f"kernel {what}: expected {name} aligned to 16 bytes, got address {x.data_ptr():#x}")


def check_batch(batch: Batch, limits: Limits) -> None:
    """Raise ContractError when the batch is larger than the workspace."""
    check_limit("batch", "rows", batch.rows, limits.rows)
    check_limit("batch", "requests", batch.requests, limits.requests)


def check_accepted(batch: Batch, accepted: Accepted, limits: Limits) -> None:
    """Raise ContractError when accepted paths do not fit the batch or the workspace."""
    check_batch(batch, limits)
    check_tensors("publish", torch.int32, [("accepted.rows", accepted.rows), ("accepted.length", accepted.length)])
    check_shape("publish", "accepted.length", accepted.length, (batch.requests,))
    check_shape("publish", "accepted.rows", accepted.rows, (batch.requests, accepted.rows.shape[-1]))
    check_limit("publish", "longest accepted path", accepted.rows.shape[1], limits.path)


def check_device(x: Tensor) -> None:
    """Raise BackendError when compiled kernels are given tensors that are not on the GPU."""
    if not INTERPRETED and x.device.type != "cuda":
        raise BackendError(
            f"triton: compiled kernels need tensors on a cuda device, got {x.device}; set TRITON_INTERPRET=1 to run "
            "on the CPU"
        )


def check_memory(what: str, size: int, device: torch.device) -> None:
    """Raise BackendError when a GPU has fewer than `size` bytes free; says nothing about other devices."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if size > free:
            raise BackendError(
                f"kernel {what}: expected {size / 2**20:,.0f} MiB of free memory on {device}, got "
                f"{free / 2**20:,.0f} MiB; use fewer layers, rows or requests"
            )
