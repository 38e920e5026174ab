"""Split-K tree attention on the host: its shape, its scratch, what it refuses, and its three launches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.protocol import AttentionOps, Batch
from lumotree.errors import BackendError, ContractError
from lumotree.state import KVCache
from lumotree.verifier.kernels import INTERPRETED, launch
from lumotree.verifier.kernels.attention import check_attention
from lumotree.verifier.kernels.splitk import combine_splits, place_rows, split_keys

MAX_HEAD_DIM = 256
#: Shared memory that a block of a Hopper GPU may have (CUDA C++ Programming Guide, Technical Specifications).
SHARED_BYTES = 227 * 1024
WORD = 32
#: bf16 numbers that stand for one attention weight under each value of the contract's `probs`.
PARTS = {"fp32": 3, "bf16": 1}


@dataclass(frozen=True)
class SplitShape:
    """What fixes the bits, and how the kernel is compiled.

    split: keys of a split; keys: of a block; rows: (row, query head) pairs of a tile. All powers of two, the last two
    at least 16. warps, stages: of a program; programs: of one multiprocessor, which share the work; they fix no bits.
    Raises ContractError.
    """

    split: int = 1024
    keys: int = 64
    rows: int = 128
    warps: int = 8
    stages: int = 3
    programs: int = 1

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            least = 16 if f.name in ("keys", "rows") else 1
            power = f.name in ("stages", "programs") or value & (value - 1) == 0
            if value < least or not power:
                kind = "an integer" if f.name in ("stages", "programs") else "a power of two"
                raise ContractError(f"split-K attention: expected {f.name} to be {kind} >= {least}, got {value}")
        if self.split < self.keys:
            raise ContractError(f"split-K attention: expected split >= keys={self.keys}, got split={self.split}")

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of one tile of queries, keys and values, the least that a program needs."""
        return 2 * (self.rows + 2 * self.keys) * padded(head_dim)

    def splits(self, keys: int) -> int:
        """Splits that hold `keys` keys."""
        return -(-keys // self.split)


#: On a card; under the interpreter small enough that short prefixes have several splits.
DEFAULT = SplitShape(64, 16, 16) if INTERPRETED else SplitShape()
DEFAULT_MAX_KEYS = 2048 if INTERPRETED else 32768


def padded(head_dim: int) -> int:
    """Columns of a tile."""
    return max(16, launch.next_power_of_2(head_dim))


@dataclass(frozen=True)
class SplitScratch:
    """query: bf16 `[rows, Hq, dh]`, rotated; mask: int32 `[rows, words]`, bit c of a row: candidate c of its request is
    an ancestor; keys: int32 `[rows]`, prefix, ancestors and self; items: int32 `[requests]`, running totals of work.

    top, total: fp32 `[rows, Hq, splits]`, largest score and sum of weights of each split; acc: fp32
    `[rows, Hq, splits, dh]`, its weighted sum of values.
    """

    query: Tensor
    mask: Tensor
    keys: Tensor
    items: Tensor
    top: Tensor
    total: Tensor
    acc: Tensor

    @staticmethod
    def size(rows: int, q_heads: int, head_dim: int, words: int, splits: int) -> int:
        """Bytes of everything but the requests' totals."""
        return 4 * rows * q_heads * splits * (head_dim + 2) + 2 * rows * q_heads * head_dim + 4 * rows * (words + 1)

    @staticmethod
    def make(
        requests: int, rows: int, q_heads: int, head_dim: int, words: int, splits: int, device: torch.device
    ) -> SplitScratch:
        """Uninitialised."""

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        int32, fp32 = torch.int32, torch.float32
        return SplitScratch(
            empty(torch.bfloat16, rows, q_heads, head_dim),
            empty(int32, rows, words),
            empty(int32, rows),
            empty(int32, requests),
            empty(fp32, rows, q_heads, splits),
            empty(fp32, rows, q_heads, splits),
            empty(fp32, rows, q_heads, splits, head_dim),
        )


def check_shape(shape: SplitShape, head_dim: int) -> None:
    """Raise ContractError for a head that is too wide, BackendError for tiles that no card has room for."""
    launch.check_limit("split-K attention", "head_dim", head_dim, MAX_HEAD_DIM)
    need = shape.shared_bytes(head_dim)
    if need > SHARED_BYTES:
        raise BackendError(
            f"kernel split-K attention: tiles of rows={shape.rows}, keys={shape.keys} and head_dim={head_dim} need "
            f"{need // 1024} KiB of shared memory; allowed: at most {SHARED_BYTES // 1024} KiB; use fewer rows or keys"
        )


def _check(ops: AttentionOps, batch: Batch, scratch: SplitScratch, shape: SplitShape) -> None:
    what = "split-K attention workspace"
    launch.check_limit(what, "rows", batch.rows, scratch.keys.shape[0])
    launch.check_limit(what, "requests", batch.requests, scratch.items.shape[0])
    if batch.requests == 1:  # how rows are shared among several is known on the device alone
        launch.check_limit(what, "rows of a request", batch.rows, WORD * scratch.mask.shape[1])
    if batch.page_size < 1:
        raise ContractError(f"kernel split-K attention: expected page_size >= 1, got page_size={batch.page_size}")
    # Candidates follow the committed keys: a whole page table, and a path of all rows behind it.
    reach = batch.page_table.shape[1] * batch.page_size + batch.rows
    room = scratch.top.shape[2] * shape.split
    if reach > room:
        raise ContractError(
            f"kernel {what}: page_table and rows make room for keys={reach}, above the limit; allowed: at most {room}; "
            "make the backend with a larger max_keys"
        )
    launch.check_shape("split-K attention", "q", ops.q, (batch.rows, *scratch.query.shape[1:]))


def forward(
    ops: AttentionOps, cache: KVCache, batch: Batch, scratch: SplitScratch, out: Tensor, layer: int, shape: SplitShape,
    probs: str, *, tree: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Outputs bf16 `[T, Hq, dh]` of all active rows; of the cache, only these rows' own slots are written.

    tree False: one token of each request, its ancestors are committed. Returns the two kernels whose bits rest on there
    being one of each per model and page size (None under the interpreter). Raises ContractError or BackendError before
    it launches.
    """
    check_attention(ops, cache, batch, out, layer)
    flat_slots, heads, dim = cache.k.shape[1:]
    check_shape(shape, dim)
    _check(ops, batch, scratch, shape)
    if not batch.rows:
        return None, None
    bits = launch.as_bits
    q_heads, words, splits = ops.q.shape[1], scratch.mask.shape[1], scratch.top.shape[2]
    model = {"QH": q_heads, "KH": heads, "DIM": dim, "BD": padded(dim), "BM": shape.rows}
    active = bits(batch.active)
    place_rows[(batch.rows, heads)](
        bits(ops.q), bits(ops.k), bits(ops.v), ops.cos, ops.sin, bits(cache.k), bits(cache.v), bits(scratch.query),
        scratch.mask, scratch.keys, scratch.items,
        batch.parent, active, batch.position, batch.row_request, batch.cu_rows, batch.state_slot, batch.prefix_len,
        batch.row_slot, layer, flat_slots, words, int(tree), batch.requests, shape.split,
        ROTARY=2 * ops.cos.shape[1], BW=launch.next_power_of_2(words), **model, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    partial = (scratch.top, scratch.total, scratch.acc)
    split = split_keys[(_programs(shape, out.device),)](
        *(_operand(x) for x in (scratch.query, cache.k, cache.v)), scratch.mask, scratch.keys, scratch.items, *partial,
        active, batch.cu_rows, batch.prefix_len, batch.page_table, batch.row_slot,
        layer, flat_slots, words, batch.requests, batch.page_table.shape[1], shape.split, splits,
        BN=shape.keys, PARTS=PARTS[probs], PAGE=batch.page_size, **model,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
    model.pop("KH"), model.pop("BM")
    return split, combine_splits[(batch.rows, q_heads)](
        *partial, scratch.keys, active, batch.row_request, batch.state_slot, bits(out), shape.split, splits, **model,
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


def _operand(x: Tensor) -> Tensor:
    """What a matrix product reads: bf16, or under the interpreter, which has no bf16 product, its bits."""
    return launch.as_bits(x) if INTERPRETED else x


def _programs(shape: SplitShape, device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return shape.programs * torch.cuda.get_device_properties(device).multi_processor_count
