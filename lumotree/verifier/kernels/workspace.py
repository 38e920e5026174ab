"""Everything that verify and publish need besides their arguments, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.backends.protocol import Limits
from lumotree.contract import Dims
from lumotree.verifier.kernels.launch import as_bits, check_memory


@dataclass(frozen=True)
class GdnWorkspace:
    """cut: fp32 `[rows / 2 + 1, HV, dv, dk]`, states of the rows that start other paths, reused by every layer.

    In the CUDA kernel, states beyond shared memory. The rest is the record for replay, by layer: bf16
    `k [L, rows, HK, dk]`, `v [L, rows, HV, dv]`, `a, b [L, rows, HV]`, fp32 `a_log, dt_bias [L, HV]`.
    """

    cut: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor

    def record(self) -> list[Tensor]:
        """The record as the kernel takes it."""
        return [*(as_bits(x) for x in (self.k, self.v, self.a, self.b)), self.a_log, self.dt_bias]


@dataclass(frozen=True)
class AttentionWorkspace:
    """ancestors: int32 `[rows, rows of one request]`, global rows from root to parent; depth: int32 `[rows]`.

    k, v: bf16 `[L, requests, path, kv_heads, head_dim]`, accepted rows on their way to committed slots.
    """

    ancestors: Tensor
    depth: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class TritonWorkspace:
    """Scratch of `TritonBackend`. conv: bf16 `[L, rows, D]`, the recorded inputs."""

    gdn: GdnWorkspace
    conv: Tensor
    attention: AttentionWorkspace
    limits: Limits


def allocate(
    dims: Dims, limits: Limits, max_rows: int, device: torch.device, cut: Tensor | None = None
) -> TritonWorkspace:
    """Allocate for the limits; a request has at most `max_rows` rows. cut: a kernel's own buffer for pending states.

    Raises BackendError when the card has no room.
    """

    def bf16(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    def fp32(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def int32(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    layers, rows = limits.layers, limits.rows
    record = 2 * layers * rows * (dims.hk * dims.dk + dims.hv * dims.dv + 2 * dims.hv + dims.conv_channels)
    cuts = 4 * (rows // 2 + 1) * dims.hv * dims.dv * dims.dk if cut is None else 0
    check_memory("workspace", record + cuts, device)
    gdn = GdnWorkspace(
        # A row is cut because it has at least two children, so at most every other row is.
        fp32(rows // 2 + 1, dims.hv, dims.dv, dims.dk) if cut is None else cut,
        bf16(layers, rows, dims.hk, dims.dk),
        bf16(layers, rows, dims.hv, dims.dv),
        bf16(layers, rows, dims.hv),
        bf16(layers, rows, dims.hv),
        fp32(layers, dims.hv),
        fp32(layers, dims.hv),
    )
    moved = (layers, limits.requests, limits.path, dims.kv_heads, dims.head_dim)
    attention = AttentionWorkspace(int32(rows, min(rows, max_rows)), int32(rows), bf16(*moved), bf16(*moved))
    return TritonWorkspace(gdn, bf16(layers, rows, dims.conv_channels), attention, limits)
