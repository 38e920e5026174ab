# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Gated DeltaNet: one kernel that walks a list of rows with the state in registers.

Launched over the paths of a level (verification), over accepted paths (publication) and over one-row paths (the native
step). See the package docstring for why the bits of the three agree.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, GdnOps
from lumotree.errors import ContractError
from lumotree.verifier.kernels import launch
from lumotree.verifier.kernels.bits import bf16_to_f32, f32_to_bf16, row_sum, sigmoid, softplus
from lumotree.verifier.kernels.workspace import GdnWorkspace

#: Kept out of specialisation: tensors that start anywhere (row slices, layer slices) and every run-time integer.
_ANY_ALIGNMENT = (
    "q", "k", "v", "a", "b", "a_log", "dt_bias", "out", "rec_k", "rec_v", "rec_a", "rec_b", "rec_a_log",
    "rec_dt_bias", "state_slot", "level_ptr", "path_ptr", "path_rows", "path_source", "path_request", "cut_index",
    "cu_rows", "accepted_rows", "accepted_length",
)  # fmt: skip
_RUNTIME = ("publish", "commit", "level", "accepted_width", "first_layer", "slots", "rec_rows")


@triton.jit
def gdn_update(state, k, v, a, b, a_log, dt_bias):
    """One native update of a `[BV, BK]` tile of a head's state; k is raw, all fp32."""
    k = k * tl.rsqrt(row_sum(k * k, 0) + 1e-6)
    decay = tl.exp(-tl.exp(a_log) * softplus(a + dt_bias))
    state = decay * state
    u = sigmoid(b) * (v - row_sum(state * k[None, :], 1))
    return state + u[:, None] * k[None, :]


@triton.jit
def gdn_read(state, q, scale):
    """Output of a tile of the state for the raw query q."""
    q = q * tl.rsqrt(row_sum(q * q, 0) + 1e-6) * scale
    return row_sum(state * q[None, :], 1)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def gdn_walk(
    q, k, v, a, b, a_log, dt_bias,
    pool, cut, out,
    rec_k, rec_v, rec_a, rec_b, rec_a_log, rec_dt_bias,
    state_slot,
    level_ptr, path_ptr, path_rows, path_source, path_request, cut_index,
    cu_rows, accepted_rows, accepted_length,
    publish, commit, level, accepted_width, first_layer, slots, rec_rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Program (list of rows, value head and value tile, layer).

    publish: rows come from `accepted_*`, operands and gate parameters from the record, no outputs.
    commit: the final state goes to the pool (publication, native step) and nothing is recorded or exported.
    """
    item = tl.program_id(0)
    tiles: tl.constexpr = (DV + BV - 1) // BV
    head = tl.program_id(1) // tiles
    tile = tl.program_id(1) % tiles
    layer = first_layer + tl.program_id(2)
    key_head = head // (HV // HK)
    if publish != 0:
        request = item
        begin = item * accepted_width
        count = tl.load(accepted_length + item)
        base = tl.load(cu_rows + item)
        source = -1
    else:
        path = tl.load(level_ptr + level) + item
        live = path < tl.load(level_ptr + level + 1)
        request = tl.load(path_request + path, mask=live, other=0)
        begin = tl.load(path_ptr + path, mask=live, other=0)
        count = tl.load(path_ptr + path + 1, mask=live, other=0) - begin
        base = 0
        source = tl.load(path_source + path, mask=live, other=-1)
    slot = tl.load(state_slot + request, mask=count > 0, other=-1)
    if slot < 0:
        return

    kk = tl.arange(0, BK)
    vv = tile * BV + tl.arange(0, BV)
    k_ok = kk < DK
    v_ok = vv < DV
    ok = v_ok[:, None] & k_ok[None, :]
    within = head * (DV * DK) + vv[:, None] * DK + kk[None, :]
    home = (layer * slots + slot).to(tl.int64) * (HV * DV * DK)
    if source < 0:
        state = tl.load(pool + home + within, mask=ok, other=0.0)
    else:
        start = tl.load(cut_index + source).to(tl.int64) * (HV * DV * DK)
        state = tl.load(cut + start + within, mask=ok, other=0.0)

    parameters = (publish * layer) * HV + head
    log_rate = tl.load(a_log + parameters)
    bias = tl.load(dt_bias + parameters)
    record = commit == 0
    # Tile 0 of a head owns what the tiles share; the first head of a group owns the key.
    lead = record & (tile == 0)
    key_lead = lead & (head % (HV // HK) == 0)
    tl.store(rec_a_log + layer * HV + head, log_rate, mask=lead)
    tl.store(rec_dt_bias + layer * HV + head, bias, mask=lead)
    first = (publish * layer).to(tl.int64) * rec_rows
    rec_first = layer.to(tl.int64) * rec_rows
    for step in range(count):
        local = tl.load(path_rows + begin + step, mask=publish == 0, other=0)
        local += tl.load(accepted_rows + begin + step, mask=publish != 0, other=0)
        row = base + local
        at = first + row
        key_bits = tl.load(k + (at * HK + key_head) * DK + kk, mask=k_ok, other=0)
        value_bits = tl.load(v + (at * HV + head) * DV + vv, mask=v_ok, other=0)
        a_bits = tl.load(a + at * HV + head)
        b_bits = tl.load(b + at * HV + head)
        state = gdn_update(
            state, bf16_to_f32(key_bits), bf16_to_f32(value_bits), bf16_to_f32(a_bits), bf16_to_f32(b_bits),
            log_rate, bias,
        )  # fmt: skip
        if publish == 0:
            query = bf16_to_f32(tl.load(q + (at * HK + key_head) * DK + kk, mask=k_ok, other=0))
            o = gdn_read(state, query, DK**-0.5)
            tl.store(out + (at * HV + head) * DV + vv, f32_to_bf16(o), mask=v_ok)
        if record:
            to = rec_first + row
            tl.store(rec_k + (to * HK + key_head) * DK + kk, key_bits, mask=k_ok & key_lead)
            tl.store(rec_v + (to * HV + head) * DV + vv, value_bits, mask=v_ok)
            tl.store(rec_a + to * HV + head, a_bits, mask=lead)
            tl.store(rec_b + to * HV + head, b_bits, mask=lead)
            index = tl.load(cut_index + row)
            tl.store(cut + index.to(tl.int64) * (HV * DV * DK) + within, state, mask=ok & (index >= 0))
    if commit != 0:
        tl.store(pool + home + within, state, mask=ok)


def check_ops(ops: GdnOps, pool: Tensor, batch: Batch, out: Tensor, layer: int) -> None:
    """Raise ContractError or BackendError when operands, pool and output do not fit each other and the limits."""
    named = [(n, getattr(ops, n)) for n in ("q", "k", "v", "a", "b")]
    launch.check_device(pool)
    launch.check_tensors("gdn", torch.bfloat16, [*named, ("out", out)])
    launch.check_tensors("gdn", torch.float32, [("A_log", ops.A_log), ("dt_bias", ops.dt_bias), ("pool", pool)])
    launch.check_aligned("gdn", "pool", pool)
    launch.check_layers("gdn", [layer], pool.shape[0])
    hv, dv, dk = pool.shape[2:]
    rows, hk = batch.rows, ops.k.shape[1]
    launch.check_limit("gdn", "dk", dk, launch.MAX_KEY_DIM)
    if hv % hk:
        raise ContractError(f"kernel gdn: expected hv to be a multiple of hk, got hv={hv}, hk={hk}")
    for name, x in named:
        tail = {"q": (hk, dk), "k": (hk, dk), "v": (hv, dv)}.get(name, (hv,))
        launch.check_shape("gdn", name, x, (rows, *tail))
    launch.check_shape("gdn", "out", out, (rows, hv, dv))


def _launch(
    grid: tuple[int, int], pool: Tensor, batch: Batch, operands: Sequence[Tensor], cut: Tensor, out: Tensor,
    record: Sequence[Tensor], accepted: tuple[Tensor, Tensor, int], hk: int,
    *, publish: bool, commit: bool, level: int, first_layer: int,
) -> Any:  # fmt: skip
    """Launch `gdn_walk` over `grid[0]` lists of rows and `grid[1]` layers. Returns the compiled kernel, if any."""
    slots, hv, dv, dk = pool.shape[1:]
    tile = launch.gdn_tile(dk, dv)
    plan = batch.plan
    if not (grid[0] and grid[1]):
        return None
    return gdn_walk[(grid[0], hv * -(-dv // tile.rows), grid[1])](
        *operands, pool, cut, out, *record, batch.state_slot,
        plan.level_ptr, plan.path_ptr, plan.path_rows, plan.path_source, plan.path_request, plan.cut_index,
        batch.cu_rows, accepted[0], accepted[1],
        int(publish), int(commit), level, accepted[2], first_layer, slots, record[0].shape[-3],
        HK=hk, HV=hv, DK=dk, DV=dv, BK=tile.cols, BV=tile.rows,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip


def _operands(ops: GdnOps) -> list[Tensor]:
    return [*(launch.as_bits(x) for x in (ops.q, ops.k, ops.v, ops.a, ops.b)), ops.A_log, ops.dt_bias]


def verify(ops: GdnOps, pool: Tensor, batch: Batch, ws: GdnWorkspace, out: Tensor, layer: int) -> Any:
    """Outputs of all tree rows from the committed states; `pool` is only read. One launch a level."""
    check_ops(ops, pool, batch, out, layer)
    launch.check_layers("gdn workspace", [layer], ws.k.shape[0])
    launch.check_limit("gdn workspace", "rows", batch.rows, ws.k.shape[1])
    unused = (batch.plan.path_rows, batch.plan.path_ptr, 0)
    compiled = None
    for level in range(batch.plan.level_ptr.shape[0] - 1):
        compiled = _launch(
            (batch.rows, 1), pool, batch, _operands(ops), ws.cut, launch.as_bits(out), ws.record(), unused,
            ops.k.shape[1], publish=False, commit=False, level=level, first_layer=layer,
        )  # fmt: skip
    return compiled


def publish(pool: Tensor, batch: Batch, accepted: Accepted, ws: GdnWorkspace, layers: Sequence[int]) -> Any:
    """Replay the accepted rows from the recorded operands, in place in the pool."""
    launch.check_device(pool)
    launch.check_tensors("gdn", torch.float32, [("pool", pool)])
    launch.check_aligned("gdn", "pool", pool)
    launch.check_layers("gdn", layers, min(pool.shape[0], ws.k.shape[0]))
    key, value, *rest = ws.record()
    operands = [key, key, value, *rest]
    chosen = (accepted.rows, accepted.length, accepted.rows.shape[1])
    compiled = None
    for first, count in launch.runs(layers):
        compiled = _launch(
            (batch.requests, count), pool, batch, operands, ws.cut, value, ws.record(), chosen, ws.k.shape[2],
            publish=True, commit=True, level=0, first_layer=first,
        )  # fmt: skip
    return compiled


def native(ops: GdnOps, pool: Tensor, batch: Batch, out: Tensor, layer: int) -> Any:
    """One token of each request, state advanced in place: level 0 of a batch of one-row trees."""
    check_ops(ops, pool, batch, out, layer)
    operands = _operands(ops)
    unused = (batch.plan.path_rows, batch.plan.path_ptr, 0)
    return _launch(
        (batch.rows, 1), pool, batch, operands, pool, launch.as_bits(out), operands[1:], unused, ops.k.shape[1],
        publish=False, commit=True, level=0, first_layer=layer,
    )  # fmt: skip
