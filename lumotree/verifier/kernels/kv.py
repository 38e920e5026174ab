# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Publication of attention KV: accepted rows move from candidate slots to committed positions."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lumotree.backends.protocol import Accepted, Batch
from lumotree.state import KVCache
from lumotree.verifier.kernels import launch
from lumotree.verifier.kernels.workspace import AttentionWorkspace


@triton.jit(
    do_not_specialize=(
        "first_layer", "flat_slots", "width", "requests", "longest", "page_size", "max_pages", "scatter",
    )
)  # fmt: skip
def move_rows(
    cache_k, cache_v, moved_k, moved_v, accepted_rows, accepted_length, cu_rows, state_slot, row_slot, prefix_len,
    page_table,
    first_layer, flat_slots, width, requests, longest, page_size, max_pages, scatter,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (accepted row, block of the row's K and V, layer): candidate slot -> scratch, or scratch -> position."""
    request = tl.program_id(0) // width
    step = tl.program_id(0) % width
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = offset < SIZE
    layer = first_layer + tl.program_id(2)
    if (step >= tl.load(accepted_length + request)) | (tl.load(state_slot + request) < 0):
        return
    scratch = ((layer * requests + request).to(tl.int64) * longest + step) * SIZE + offset
    if scatter != 0:
        position = tl.load(prefix_len + request) + step
        page = tl.load(page_table + request * max_pages + position // page_size)
        flat = page * page_size + position % page_size
    else:
        row = tl.load(cu_rows + request) + tl.load(accepted_rows + request * width + step)
        flat = tl.load(row_slot + row)
    place = (layer.to(tl.int64) * flat_slots + flat) * SIZE + offset
    if scatter != 0:
        tl.store(cache_k + place, tl.load(moved_k + scratch, mask=ok, other=0), mask=ok)
        tl.store(cache_v + place, tl.load(moved_v + scratch, mask=ok, other=0), mask=ok)
    else:
        tl.store(moved_k + scratch, tl.load(cache_k + place, mask=ok, other=0), mask=ok)
        tl.store(moved_v + scratch, tl.load(cache_v + place, mask=ok, other=0), mask=ok)


def publish(cache: KVCache, batch: Batch, accepted: Accepted, ws: AttentionWorkspace, layers: Sequence[int]) -> None:
    """Move K and V of the accepted rows; all are read before any is written, for sources and targets may overlap."""
    launch.check_device(cache.k)
    launch.check_tensors("kv", torch.bfloat16, [("cache.k", cache.k), ("cache.v", cache.v)])
    launch.check_tensors("kv", torch.int32, [("page_table", batch.page_table)])
    launch.check_layers("kv", layers, min(cache.k.shape[0], ws.k.shape[0]))
    flat_slots, heads, dim = cache.k.shape[1:]
    size, width = heads * dim, accepted.rows.shape[1]
    block = launch.channel_block(size)
    if not (batch.requests and width):
        return
    bits = launch.as_bits
    for scatter in (0, 1):
        for first, count in launch.runs(layers):
            move_rows[(batch.requests * width, -(-size // block), count)](
                bits(cache.k), bits(cache.v), bits(ws.k), bits(ws.v), accepted.rows, accepted.length, batch.cu_rows,
                batch.state_slot, batch.row_slot, batch.prefix_len, batch.page_table,
                first, flat_slots, width, ws.k.shape[1], ws.k.shape[2], batch.page_size, batch.page_table.shape[1],
                scatter, SIZE=size, BLOCK=block, num_warps=launch.ELEMENTWISE_WARPS,
            )  # fmt: skip
