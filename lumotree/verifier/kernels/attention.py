# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Attention over the committed prefix and a row's ancestors, keys taken in position order."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lumotree.backends.protocol import AttentionOps, Batch
from lumotree.errors import ContractError
from lumotree.state import KVCache
from lumotree.verifier.kernels import launch
from lumotree.verifier.kernels.bits import bf16_to_f32, f32_to_bf16, row_sum
from lumotree.verifier.kernels.workspace import AttentionWorkspace


@triton.jit
def rotate(x, dim, cos, sin, position, ok, ROTARY: tl.constexpr):
    """Bits of one head (pointer x) after RoPE: half-split pairs in fp32, rounded to bf16; other channels unchanged."""
    half: tl.constexpr = ROTARY // 2
    rotary = ok & (dim < ROTARY)
    low = dim < half
    pair = tl.where(low, dim, dim - half)
    own = tl.load(x + dim, mask=ok, other=0)
    other = bf16_to_f32(tl.load(x + tl.where(low, dim + half, dim - half), mask=rotary, other=0))
    c = tl.load(cos + position * half + pair, mask=rotary, other=0.0)
    s = tl.load(sin + position * half + pair, mask=rotary, other=0.0)
    turned = bf16_to_f32(own) * c + tl.where(low, -(other * s), other * s)
    return tl.where(rotary, f32_to_bf16(turned), own)


@triton.jit(do_not_specialize=("layer", "flat_slots", "width", "tree"))
def place_rows(
    k, v, cos, sin, cache_k, cache_v, ancestors, depth,
    parent, active, position, row_request, cu_rows, state_slot, row_slot,
    layer, flat_slots, width, tree,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Program (row, key head): K rotated and V into the row's slot; head 0 also lists the row's ancestors."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.load(row_request + row)
    if (tl.load(active + row) == 0) | (tl.load(state_slot + request) < 0):
        return
    dim = tl.arange(0, BD)
    ok = dim < DIM
    source = (row.to(tl.int64) * HEADS + head) * DIM
    to = ((layer.to(tl.int64) * flat_slots + tl.load(row_slot + row)) * HEADS + head) * DIM + dim
    key = rotate(k + source, dim, cos, sin, tl.load(position + row).to(tl.int64), ok, ROTARY)
    tl.store(cache_k + to, key, mask=ok)
    tl.store(cache_v + to, tl.load(v + source + dim, mask=ok, other=0), mask=ok)
    if (tree != 0) & (head == 0):
        base = tl.load(cu_rows + request)
        # Depth is counted, not derived from the position, which may be anything.
        levels = 0
        above = tl.load(parent + row)
        while above >= 0:
            levels += 1
            above = tl.load(parent + base + above)
        tl.store(depth + row, levels)
        above = tl.load(parent + row)
        for up in range(levels):
            tl.store(ancestors + row.to(tl.int64) * width + levels - 1 - up, base + above)
            above = tl.load(parent + base + above)


@triton.jit(
    do_not_specialize=("layer", "flat_slots", "width", "tree", "page_size", "max_pages"),
    do_not_specialize_on_alignment=(
        "q", "cos", "sin", "ancestors", "depth", "active", "position", "row_request", "state_slot", "prefix_len",
        "page_table", "row_slot", "out",
    ),
)  # fmt: skip
def attend(
    q, cos, sin, cache_k, cache_v, ancestors, depth,
    active, position, row_request, state_slot, prefix_len, page_table, row_slot, out,
    layer, flat_slots, width, tree, page_size, max_pages,
    QH: tl.constexpr, KH: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Program (row, query head): online softmax over blocks of BN consecutive positions."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.load(row_request + row)
    if (tl.load(active + row) == 0) | (tl.load(state_slot + request) < 0):
        return
    dim = tl.arange(0, BD)
    ok = dim < DIM
    at = (row.to(tl.int64) * QH + head) * DIM
    query = bf16_to_f32(rotate(q + at, dim, cos, sin, tl.load(position + row).to(tl.int64), ok, ROTARY))
    prefix = tl.load(prefix_len + request)
    above = tl.load(depth + row, mask=tree != 0, other=0)
    keys = prefix + above + 1
    # Finite, so that no infinities are subtracted; every block holds a visible key.
    top = -3.0e38
    total = 0.0
    acc = tl.zeros([BD], tl.float32)
    for start in range(0, keys, BN):
        index = start + tl.arange(0, BN)
        seen = index < keys
        committed = seen & (index < prefix)
        page = tl.load(page_table + request * max_pages + index // page_size, mask=committed, other=0)
        strict = seen & (index >= prefix) & (index < prefix + above)
        relative = tl.load(ancestors + row.to(tl.int64) * width + index - prefix, mask=strict, other=0)
        key_row = tl.where(strict, relative, row)
        candidate = tl.load(row_slot + key_row, mask=seen & (index >= prefix), other=0)
        flat = tl.where(committed, page * page_size + index % page_size, candidate).to(tl.int64)
        from_ = ((layer.to(tl.int64) * flat_slots + flat) * KH + head // (QH // KH)) * DIM
        tile = from_[:, None] + dim[None, :]
        shown = seen[:, None] & ok[None, :]
        keys_tile = bf16_to_f32(tl.load(cache_k + tile, mask=shown, other=0))
        score = row_sum(keys_tile * query[None, :], 1) * (DIM**-0.5)
        score = tl.where(seen, score, -3.0e38)
        best = tl.maximum(top, tl.reduce(score, 0, tl.standard._elementwise_max))
        weight = tl.where(seen, tl.exp(score - best), 0.0)
        rescale = tl.exp(top - best)
        values = bf16_to_f32(tl.load(cache_v + tile, mask=shown, other=0))
        total = total * rescale + row_sum(weight, 0)
        acc = acc * rescale + row_sum(weight[:, None] * values, 0)
        top = best
    tl.store(out + at + dim, f32_to_bf16(acc / total), mask=ok)


def check_attention(ops: AttentionOps, cache: KVCache, batch: Batch, out: Tensor, layer: int) -> None:
    """Raise BackendError or ContractError for operands that the attention kernels do not take."""
    launch.check_device(cache.k)
    named = [("q", ops.q), ("k", ops.k), ("v", ops.v), ("cache.k", cache.k), ("cache.v", cache.v), ("out", out)]
    launch.check_tensors("attention", torch.bfloat16, named)
    launch.check_tensors("attention", torch.float32, [("cos", ops.cos), ("sin", ops.sin)])
    launch.check_tensors("attention", torch.int32, [("page_table", batch.page_table)])
    launch.check_layers("attention", [layer], cache.k.shape[0])
    heads, dim = cache.k.shape[2:]
    launch.check_limit("attention", "head_dim", dim, launch.MAX_HEAD_DIM)
    for name, x in named[1:3]:
        launch.check_shape("attention", name, x, (batch.rows, heads, dim))
    launch.check_shape("attention", "out", out, tuple(ops.q.shape))
    if ops.q.shape[1] % heads:
        raise ContractError(
            f"kernel attention: expected q_heads to be a multiple of kv_heads={heads}, got {ops.q.shape[1]}"
        )
    for name, x in (("cache.k", cache.k), ("cache.v", cache.v)):
        launch.check_aligned("attention", name, x)


def _forward(
    ops: AttentionOps, cache: KVCache, batch: Batch, ancestors: Tensor, depth: Tensor, out: Tensor, layer: int,
    *, tree: bool,
) -> Any:  # fmt: skip
    check_attention(ops, cache, batch, out, layer)
    if not batch.rows:
        return None
    bits = launch.as_bits
    flat_slots, heads, dim = cache.k.shape[1:]
    tile = launch.attention_tile(dim)
    shape = {"DIM": dim, "ROTARY": 2 * ops.cos.shape[1], "BD": tile.cols}
    pinned = {"num_warps": tile.warps, "enable_fp_fusion": False}
    cached = (bits(cache.k), bits(cache.v))
    active = bits(batch.active)
    place_rows[(batch.rows, heads)](
        bits(ops.k), bits(ops.v), ops.cos, ops.sin, *cached, ancestors, depth,
        batch.parent, active, batch.position, batch.row_request, batch.cu_rows, batch.state_slot, batch.row_slot,
        layer, flat_slots, ancestors.shape[-1], int(tree), HEADS=heads, **shape, **pinned,
    )  # fmt: skip
    return attend[(batch.rows, ops.q.shape[1])](
        bits(ops.q), ops.cos, ops.sin, *cached, ancestors, depth,
        active, batch.position, batch.row_request, batch.state_slot, batch.prefix_len, batch.page_table,
        batch.row_slot, bits(out),
        layer, flat_slots, ancestors.shape[-1], int(tree), batch.page_size, batch.page_table.shape[1],
        QH=ops.q.shape[1], KH=heads, **shape, BN=tile.rows, **pinned,
    )  # fmt: skip


def verify(ops: AttentionOps, cache: KVCache, batch: Batch, ws: AttentionWorkspace, out: Tensor, layer: int) -> Any:
    """Outputs of all active tree rows; of the cache, only these rows' own slots are written."""
    launch.check_limit("attention workspace", "rows", batch.rows, ws.depth.shape[0])
    return _forward(ops, cache, batch, ws.ancestors, ws.depth, out, layer, tree=True)


def native(ops: AttentionOps, cache: KVCache, batch: Batch, out: Tensor, layer: int) -> Any:
    """One token of each request, K and V written to the committed slot that `row_slot` names."""
    # Rows without ancestors never read the lists.
    return _forward(ops, cache, batch, batch.parent, batch.parent, out, layer, tree=False)
