# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The convolution fused with its neighbours: with the split into GDN's operands, and with the move of accepted KV.

Bits are those of `conv` followed by the split, and of `conv.publish` followed by `kv.publish`. Gates and normalised
keys are not prepared here: the GDN kernels take raw a, b and keys, for these are what replay records (contract section
2), and a norm reduced in another kernel would have other bits than the native step's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import triton
import triton.language as tl
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, ConvOps
from lumotree.errors import ContractError
from lumotree.state import KVCache
from lumotree.verifier.kernels import launch
from lumotree.verifier.kernels.conv import check_pool, convolved, shift_history, tap_words

#: Channels of one program; elements of one program's share of an accepted path's K (and as many of V).
CHANNELS = 512
MOVED = 2048


@triton.jit(do_not_specialize=("layer", "slots", "rec_rows"))
def conv_operands(
    x, weight, pool, q, k, v, recorded, parent, active, row_request, cu_rows, state_slot,
    layer, slots, rec_rows,
    CQ: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (row, block of the CQ + CK + CV channels): `conv.conv_rows` with three outputs."""
    D: tl.constexpr = CQ + CK + CV
    row = tl.program_id(0)
    channel = tl.program_id(1) * BD + tl.arange(0, BD)
    ok = channel < D
    request = tl.load(row_request + row)
    slot = tl.load(state_slot + request)
    if (tl.load(active + row) == 0) | (slot < 0):
        return
    history = pool + (layer * slots + slot).to(tl.int64) * (D * (W - 1))
    activated, bits = convolved(
        x, weight, history, parent, row, tl.load(cu_rows + request), channel, ok, D, W, PACKED
    )  # fmt: skip
    at = row.to(tl.int64)
    tl.store(recorded + (layer.to(tl.int64) * rec_rows + row) * D + channel, bits, mask=ok)
    tl.store(q + at * CQ + channel, activated, mask=channel < CQ)
    tl.store(k + at * CK + channel - CQ, activated, mask=(channel >= CQ) & (channel < CQ + CK))
    tl.store(v + at * CV + channel - (CQ + CK), activated, mask=(channel >= CQ + CK) & ok)


@triton.jit
def move_path(
    cache_k, cache_v, row_slot, page_table, accepted_rows, base, prefix, count, page_size, offset, ok,
    SIZE: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Channels `offset` of K and V of one accepted path: all are read before any is written. The cache: one layer's."""
    step = tl.arange(0, BP)
    taken = step < count
    row = base + tl.load(accepted_rows + step, mask=taken, other=0)
    source = tl.load(row_slot + row, mask=taken, other=0).to(tl.int64)
    position = prefix + step
    page = tl.load(page_table + position // page_size, mask=taken, other=0)
    target = (page * page_size + position % page_size).to(tl.int64)
    moved = taken[:, None] & ok[None, :]
    key = tl.load(cache_k + source[:, None] * SIZE + offset[None, :], mask=moved, other=0)
    value = tl.load(cache_v + source[:, None] * SIZE + offset[None, :], mask=moved, other=0)
    tl.debug_barrier()
    tl.store(cache_k + target[:, None] * SIZE + offset[None, :], key, mask=moved)
    tl.store(cache_v + target[:, None] * SIZE + offset[None, :], value, mask=moved)


@triton.jit(
    do_not_specialize=(
        "conv_first", "conv_items", "kv_first", "requests", "slots", "rec_rows", "flat_slots", "width", "page_size",
        "max_pages",
    )
)  # fmt: skip
def publish_rows(
    pool, inputs, cache_k, cache_v, cu_rows, state_slot, accepted_rows, accepted_length, row_slot, prefix_len,
    page_table,
    conv_first, conv_items, kv_first, requests, slots, rec_rows, flat_slots, width, page_size, max_pages,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
    SIZE: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Program: first `conv_items` blocks of histories, then blocks of K and V; requests run fastest, layers slowest."""
    item = tl.program_id(0)
    is_history = item < conv_items
    item -= tl.where(is_history, 0, conv_items)
    request = item % requests
    rest = item // requests
    slot = tl.load(state_slot + request)
    base = tl.load(cu_rows + request)
    count = tl.load(accepted_length + request)
    chosen = accepted_rows + request * width
    if (slot < 0) | (count <= 0):
        return
    if is_history:
        blocks: tl.constexpr = (D + BD - 1) // BD
        channel = rest % blocks * BD + tl.arange(0, BD)
        layer = (conv_first + rest // blocks).to(tl.int64)
        home = pool + (layer * slots + slot) * (D * (W - 1))
        first = inputs + (layer * rec_rows + base) * D
        shift_history(home, first, chosen, count, channel, channel < D, 0, D, W, BW)
    else:
        parts: tl.constexpr = (SIZE + BS - 1) // BS
        offset = rest % parts * BS + tl.arange(0, BS)
        start = (kv_first + rest // parts).to(tl.int64) * flat_slots * SIZE
        move_path(
            cache_k + start, cache_v + start, row_slot, page_table + request * max_pages, chosen, base,
            tl.load(prefix_len + request), count, page_size, offset, offset < SIZE, SIZE, BP,
        )  # fmt: skip


@dataclass(frozen=True)
class Histories:
    """What publication of the convolution works on: pool bf16 `[L, S, D, W - 1]`, recorded bf16 `[L, rows, D]`."""

    pool: Tensor
    recorded: Tensor
    layers: Sequence[int]


@dataclass(frozen=True)
class Moves:
    """What publication of attention works on."""

    cache: KVCache
    layers: Sequence[int]


def verify(
    ops: ConvOps, pool: Tensor, batch: Batch, recorded: Tensor, parts: tuple[Tensor, Tensor, Tensor], layer: int
) -> None:
    """Activated q, k, v of all active tree rows, each contiguous, as GDN takes them. One launch.

    parts: bf16 q, k, v `[rows, ..]`, whose channels are x's in this order, `[rows, HK, dk]` and `[rows, HV, dv]` say;
    rows that are not active are left alone. Inputs are recorded in `recorded [L, rows, D]`; `pool` is only read.

    Raises ContractError for tensors that do not fit, BackendError for tensors that are not on the GPU.
    """
    check_pool(pool, [layer])
    channels, width = pool.shape[2], pool.shape[3] + 1
    named = list(zip(("q", "k", "v"), parts, strict=True))
    launch.check_tensors(
        "fused conv", torch.bfloat16, [("x", ops.x), ("weight", ops.weight), ("recorded", recorded), *named]
    )
    launch.check_layers("conv workspace", [layer], recorded.shape[0])
    launch.check_limit("conv workspace", "rows", batch.rows, recorded.shape[1])
    launch.check_shape("fused conv", "weight", ops.weight, (channels, width))
    launch.check_shape("fused conv", "x", ops.x, (batch.rows, channels))
    sizes = _sizes(named, batch.rows, channels)
    if not batch.rows:
        return
    bits = launch.as_bits
    words, packed = tap_words(ops.weight)
    block = min(CHANNELS, launch.next_power_of_2(channels))
    conv_operands[(batch.rows, -(-channels // block))](
        bits(ops.x), words, bits(pool), *(bits(x) for x in parts), bits(recorded), batch.parent, bits(batch.active),
        batch.row_request, batch.cu_rows, batch.state_slot,
        layer, pool.shape[1], recorded.shape[1],
        CQ=sizes[0], CK=sizes[1], CV=sizes[2], W=width, BD=block, PACKED=packed,
        num_warps=launch.ELEMENTWISE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _sizes(named: Sequence[tuple[str, Tensor]], rows: int, channels: int) -> list[int]:
    for name, x in named:
        if x.shape[0] != rows:
            raise ContractError(f"kernel fused conv: expected {name} with {rows} rows, got {list(x.shape)}")
    sizes = [x[0].numel() if rows else 0 for _, x in named]
    if rows and sum(sizes) != channels:
        raise ContractError(
            f"kernel fused conv: expected q, k and v of {channels} channels in all, got "
            f"{' + '.join(map(str, sizes))}; give them as the channels of x are laid out"
        )
    return sizes


def publish(batch: Batch, accepted: Accepted, histories: Histories | None = None, moves: Moves | None = None) -> None:
    """Shift accepted inputs into the histories and move accepted K and V, of all layers and requests, in place.

    One launch for both where the layers of each are contiguous; either may be None. A request's candidates may overlap
    its own target positions, not another request's: each program reads all of a path's rows before it writes any, and
    no program waits for another.

    Raises ContractError for tensors that do not fit, BackendError for tensors that are not on the GPU.
    """
    if histories is None and moves is None:
        raise ContractError("kernel publish: expected histories, moves or both, got neither")
    if histories is not None:
        check_pool(histories.pool, histories.layers)
        launch.check_tensors("publish", torch.bfloat16, [("recorded", histories.recorded)])
        launch.check_layers("conv workspace", histories.layers, histories.recorded.shape[0])
    if moves is not None:
        launch.check_device(moves.cache.k)
        launch.check_tensors("publish", torch.bfloat16, [("cache.k", moves.cache.k), ("cache.v", moves.cache.v)])
        launch.check_tensors("publish", torch.int32, [("page_table", batch.page_table)])
        launch.check_layers("kv", moves.layers, moves.cache.k.shape[0])
    if not (batch.requests and accepted.rows.shape[1]):
        return
    conv_runs = launch.runs(histories.layers) if histories is not None else []
    kv_runs = launch.runs(moves.layers) if moves is not None else []
    for conv_run, kv_run in zip_longest(conv_runs, kv_runs, fillvalue=(0, 0)):
        _publish(batch, accepted, histories, moves, conv_run, kv_run)


def _publish(
    batch: Batch, accepted: Accepted, histories: Histories | None, moves: Moves | None,
    conv_run: tuple[int, int], kv_run: tuple[int, int],
) -> None:  # fmt: skip
    """One launch over two runs of layers (first, count). Pointers of a surface that is left out are never read."""
    absent = batch.parent.view(torch.int16)
    pool, recorded, slots, rec_rows, channels, width = absent, absent, 0, 0, 1, 2
    if histories is not None:
        pool, recorded = launch.as_bits(histories.pool), launch.as_bits(histories.recorded)
        slots, rec_rows, channels, width = pool.shape[1], recorded.shape[1], pool.shape[2], pool.shape[3] + 1
    cache_k, cache_v, flat_slots, size = absent, absent, 0, 1
    if moves is not None:
        cache_k, cache_v = launch.as_bits(moves.cache.k), launch.as_bits(moves.cache.v)
        flat_slots, size = cache_k.shape[1], cache_k.shape[2] * cache_k.shape[3]
    longest = launch.next_power_of_2(accepted.rows.shape[1])
    block = min(CHANNELS, launch.next_power_of_2(channels))
    part = min(max(MOVED // longest, 1), launch.next_power_of_2(size))
    items = [batch.requests * -(-channels // block) * conv_run[1], batch.requests * -(-size // part) * kv_run[1]]
    publish_rows[(sum(items),)](
        pool, recorded, cache_k, cache_v, batch.cu_rows, batch.state_slot, accepted.rows, accepted.length,
        batch.row_slot, batch.prefix_len, batch.page_table,
        conv_run[0], items[0], kv_run[0], batch.requests, slots, rec_rows, flat_slots, accepted.rows.shape[1],
        batch.page_size, batch.page_table.shape[1],
        D=channels, W=width, BD=block, BW=launch.next_power_of_2(width - 1), SIZE=size, BS=part, BP=longest,
        num_warps=launch.ELEMENTWISE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
