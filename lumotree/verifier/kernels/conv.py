# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Causal convolution over a tree: taps gathered by walking parents, reaching into the committed history."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, ConvOps
from lumotree.verifier.kernels import launch
from lumotree.verifier.kernels.bits import bf16_to_f32, f32_to_bf16, sigmoid


@triton.jit
def convolved(
    x, weight, history, parent, row, base, channel, ok, D: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Bits of the activated sum over a row's taps, oldest first, and of its own input, for a block of channels.

    history: the request's `[D, W - 1]`; base: its first row. PACKED: one word of `weight` holds a channel's taps.
    """
    acc = tl.zeros(channel.shape, tl.float32)
    bits = tl.zeros(channel.shape, tl.int16)
    if PACKED:
        words = tl.load(weight + channel, mask=ok, other=0)
    for tap in tl.static_range(W):
        at = row
        beyond = 0  # steps past the root, into the history
        for _ in tl.static_range(W - 1 - tap):
            above = tl.load(parent + at)
            beyond += (above < 0).to(tl.int32)
            at = tl.where(above < 0, at, base + above)
        in_tree = beyond == 0
        bits = tl.load(x + at.to(tl.int64) * D + channel, mask=ok & in_tree, other=0)
        # In a branch that is not taken the offset could be negative, so it is masked twice.
        place = channel * (W - 1) + tl.where(in_tree, 0, W - 1 - beyond)
        old = tl.load(history + place, mask=ok & (beyond > 0), other=0)
        taken = bf16_to_f32(tl.where(in_tree, bits, old))
        loose = weight + channel * W + tap
        factor = (words >> (16 * tap)).to(tl.int16) if PACKED else tl.load(loose, mask=ok, other=0)
        term = bf16_to_f32(factor) * taken
        if tap == 0:
            acc = term  # 0 + (-0) would lose the sign
        else:
            acc += term
    return f32_to_bf16(acc * sigmoid(acc)), bits


@triton.jit
def shift_history(
    home, inputs, accepted_rows, count, channel, ok, native, D: tl.constexpr, W: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """The last W - 1 of a `[D, W - 1]` history followed by `count` inputs, in place, where `ok`.

    inputs: the request's first row; accepted_rows: numbers of the rows taken, or, when native, its row 0.
    """
    place = tl.arange(0, BW)
    within = ok[:, None] & (place < W - 1)[None, :]
    taken = place + count  # index into history followed by accepted inputs
    from_input = taken >= W - 1
    listed = from_input & (place < W - 1) & (native == 0)
    rows = tl.load(accepted_rows + taken - (W - 1), mask=listed, other=0).to(tl.int64)
    old = tl.load(home + channel[:, None] * (W - 1) + taken[None, :], mask=within & ~from_input[None, :], other=0)
    new = tl.load(inputs + rows[None, :] * D + channel[:, None], mask=within & from_input[None, :], other=0)
    # The history shifts within itself: every thread must have read before any writes.
    tl.debug_barrier()
    shifted = tl.where(from_input[None, :], new, old)
    tl.store(home + channel[:, None] * (W - 1) + place[None, :], shifted, mask=within)


@triton.jit(do_not_specialize=("layer", "slots", "rec_rows", "record"))
def conv_rows(
    x, weight, pool, out, recorded, parent, active, row_request, cu_rows, state_slot,
    layer, slots, rec_rows, record,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (row, channel block). The row's input is recorded for publication when `record` is set."""
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
    to = recorded + (layer.to(tl.int64) * rec_rows + row) * D + channel
    tl.store(to, bits, mask=ok & (record != 0))
    tl.store(out + row.to(tl.int64) * D + channel, activated, mask=ok)


@triton.jit(do_not_specialize=("first_layer", "slots", "rec_rows", "width", "native"))
def conv_history(
    pool, inputs, cu_rows, state_slot, active, accepted_rows, accepted_length,
    first_layer, slots, rec_rows, width, native,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Program (request, channel block, layer): the last W-1 of history and accepted inputs, in place.

    native: the request's first row is accepted and `inputs` is the step's own x.
    """
    request = tl.program_id(0)
    channel = tl.program_id(1) * BD + tl.arange(0, BD)
    layer = first_layer + tl.program_id(2)
    slot = tl.load(state_slot + request)
    base = tl.load(cu_rows + request)
    if native != 0:
        has_row = tl.load(cu_rows + request + 1) > base
        count = tl.load(active + base, mask=has_row, other=0).to(tl.int32)
    else:
        count = tl.load(accepted_length + request)
    if (slot < 0) | (count <= 0):
        return
    home = pool + (layer * slots + slot).to(tl.int64) * (D * (W - 1))
    first = inputs + ((layer * (1 - native)).to(tl.int64) * rec_rows + base) * D
    shift_history(home, first, accepted_rows + request * width, count, channel, channel < D, native, D, W, BW)


def tap_words(weight: Tensor) -> tuple[Tensor, bool]:
    """The taps as the kernels take them, no copy: one word a channel where a channel's taps make one, else int16.

    Taps of neighbouring channels lie W apart, so that loading one tap of many channels fetches all taps of each.
    """
    width = weight.shape[1]
    words = {2: torch.int32, 4: torch.int64}
    if width in words and weight.data_ptr() % (2 * width) == 0 and weight.storage_offset() % width == 0:
        return weight.view(words[width]), True
    return launch.as_bits(weight), False


def check_pool(pool: Tensor, layers: Sequence[int]) -> None:
    """Raise ContractError or BackendError when a pool of histories does not fit the kernels or lacks a layer."""
    launch.check_device(pool)
    launch.check_tensors("conv", torch.bfloat16, [("pool", pool)])
    launch.check_layers("conv", layers, pool.shape[0])
    launch.check_limit("conv", "width", pool.shape[3] + 1, launch.MAX_CONV_WIDTH)


def _rows(ops: ConvOps, pool: Tensor, batch: Batch, recorded: Tensor, out: Tensor, layer: int, record: bool) -> None:
    check_pool(pool, [layer])
    launch.check_tensors("conv", torch.bfloat16, [("x", ops.x), ("weight", ops.weight), ("out", out)])
    channels, width = pool.shape[2], pool.shape[3] + 1
    launch.check_shape("conv", "weight", ops.weight, (channels, width))
    for name, tensor in (("x", ops.x), ("out", out)):
        launch.check_shape("conv", name, tensor, (batch.rows, channels))
    if not batch.rows:
        return
    bits = launch.as_bits
    block = launch.channel_block(channels)
    words, packed = tap_words(ops.weight)
    conv_rows[(batch.rows, -(-channels // block))](
        bits(ops.x), words, bits(pool), bits(out), bits(recorded), batch.parent, bits(batch.active),
        batch.row_request, batch.cu_rows, batch.state_slot,
        layer, pool.shape[1], recorded.shape[-2], int(record),
        D=channels, W=width, BD=block, PACKED=packed, num_warps=launch.ELEMENTWISE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _history(
    pool: Tensor, inputs: Tensor, batch: Batch, rows: Tensor, length: Tensor, layers: Sequence[int], native: bool
) -> None:
    channels, width = pool.shape[2], pool.shape[3] + 1
    block = launch.channel_block(channels)
    bits = launch.as_bits
    if not batch.requests:
        return
    for first, count in launch.runs(layers):
        conv_history[(batch.requests, -(-channels // block), count)](
            bits(pool), bits(inputs), batch.cu_rows, batch.state_slot, bits(batch.active), rows, length,
            first, pool.shape[1], inputs.shape[-2], rows.shape[-1], int(native),
            D=channels, W=width, BD=block, BW=launch.next_power_of_2(width - 1),
            num_warps=launch.ELEMENTWISE_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def verify(ops: ConvOps, pool: Tensor, batch: Batch, recorded: Tensor, out: Tensor, layer: int) -> None:
    """Outputs of all active tree rows; inputs are recorded in `recorded [L, rows, D]`; `pool` is only read."""
    launch.check_layers("conv workspace", [layer], recorded.shape[0])
    launch.check_limit("conv workspace", "rows", batch.rows, recorded.shape[1])
    _rows(ops, pool, batch, recorded, out, layer, record=True)


def publish(pool: Tensor, batch: Batch, accepted: Accepted, recorded: Tensor, layers: Sequence[int]) -> None:
    """Shift the accepted inputs into the live slots' histories."""
    check_pool(pool, layers)
    launch.check_layers("conv workspace", layers, recorded.shape[0])
    _history(pool, recorded, batch, accepted.rows, accepted.length, layers, native=False)


def native(ops: ConvOps, pool: Tensor, batch: Batch, out: Tensor, layer: int) -> None:
    """One token of each request, history advanced in place."""
    _rows(ops, pool, batch, ops.x, out, layer, record=False)
    _history(pool, ops.x, batch, batch.state_slot, batch.state_slot, [layer], native=True)
