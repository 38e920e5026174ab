# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The serving engines' shape in Triton: one sequential walk over a tree's rows, every row's state kept in a bank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Before triton: on a machine without a GPU it chooses the interpreter.
from lumotree.verifier.kernels import INTERPRETED, launch

# isort: split
import torch
import triton
import triton.language as tl
from torch import Tensor

from lumotree.backends.protocol import Accepted, BackendBase, Batch, GdnOps, Limits, StepOps, StepOut
from lumotree.contract import Contract, Dims
from lumotree.errors import ContractError
from lumotree.state import Pools
from lumotree.verifier.kernels.bits import bf16_to_f32, f32_to_bf16
from lumotree.verifier.kernels.gdn import check_ops, gdn_read, gdn_update

_ANY_ALIGNMENT = ("q", "k", "v", "a", "b", "a_log", "dt_bias", "out", "cu_rows", "parent", "active", "state_slot")


@triton.jit(do_not_specialize=("commit", "layer", "slots", "rows"), do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def bank_rows(
    q, k, v, a, b, a_log, dt_bias, pool, bank, out, cu_rows, parent, active, state_slot,
    commit, layer, slots, rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Program (request, value head and value tile). commit: the request's one row goes to the pool, not to the bank."""
    request = tl.program_id(0)
    tiles: tl.constexpr = (DV + BV - 1) // BV
    head = tl.program_id(1) // tiles
    slot = tl.load(state_slot + request)
    if slot < 0:
        return
    kk = tl.arange(0, BK)
    vv = (tl.program_id(1) % tiles) * BV + tl.arange(0, BV)
    k_ok = kk < DK
    v_ok = vv < DV
    ok = v_ok[:, None] & k_ok[None, :]
    within = head * (DV * DK) + vv[:, None] * DK + kk[None, :]
    home = pool + (layer * slots + slot).to(tl.int64) * (HV * DV * DK)
    entries = bank + (layer * rows).to(tl.int64) * (HV * DV * DK)
    log_rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)
    base = tl.load(cu_rows + request)
    for step in range(tl.load(cu_rows + request + 1) - base):
        row = base + step
        if tl.load(active + row) != 0:
            above = tl.load(parent + row)
            from_bank = (above >= 0) & (commit == 0)
            # Loads of the same thread's earlier stores; the barrier orders them across the block.
            tl.debug_barrier()
            entry = entries + (base + tl.where(from_bank, above, 0)).to(tl.int64) * (HV * DV * DK)
            # One of the two is -0 everywhere, which changes no value and no sign.
            state = tl.load(home + within, mask=ok & ~from_bank, other=-0.0)
            state += tl.load(entry + within, mask=ok & from_bank, other=-0.0)
            at = row.to(tl.int64)
            key = bf16_to_f32(tl.load(k + (at * HK + head // (HV // HK)) * DK + kk, mask=k_ok, other=0))
            value = bf16_to_f32(tl.load(v + (at * HV + head) * DV + vv, mask=v_ok, other=0))
            write = bf16_to_f32(tl.load(b + at * HV + head))
            state = gdn_update(state, key, value, bf16_to_f32(tl.load(a + at * HV + head)), write, log_rate, bias)
            query = bf16_to_f32(tl.load(q + (at * HK + head // (HV // HK)) * DK + kk, mask=k_ok, other=0))
            o = gdn_read(state, query, DK**-0.5)
            tl.store(out + (at * HV + head) * DV + vv, f32_to_bf16(o), mask=v_ok)
            tl.store(home + within, state, mask=ok & (commit != 0))
            tl.store(entries + at * (HV * DV * DK) + within, state, mask=ok & (commit == 0))


@triton.jit(do_not_specialize=("first_layer", "slots", "rows", "width", "size"))
def bank_copy(
    pool, bank, cu_rows, state_slot, accepted_rows, accepted_length, first_layer, slots, rows, width, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, block of the state, layer): the last accepted row's state goes home."""
    request = tl.program_id(0)
    slot = tl.load(state_slot + request)
    count = tl.load(accepted_length + request)
    if (slot < 0) | (count <= 0):
        return
    layer = (first_layer + tl.program_id(2)).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(cu_rows + request) + tl.load(accepted_rows + request * width + count - 1)
    state = tl.load(bank + (layer * rows + row) * size + offset, mask=offset < size)
    tl.store(pool + (layer * slots + slot) * size + offset, state, mask=offset < size)


@dataclass(frozen=True)
class BankWorkspace:
    """bank: fp32 `[L, rows, HV, dv, dk]`, the state behind every row of the last verification."""

    bank: Tensor
    limits: Limits


class BankWalkBackend(BackendBase):
    """Per-row state bank with a sequential walk, as the tree kernels of serving engines do it; Gated DeltaNet alone.

    A common practice rather than one paper's. Our reading: a program keeps a tile of one head and walks all rows in
    physical order; each row reads its parent's entry and writes its own; acceptance copies one entry.
    """

    name = "bank_walk"
    interpreted = INTERPRETED
    contract = Contract(claims="bitwise", graph_safe=True)

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> BankWorkspace:
        """The bank: layers x rows x state. Raises ContractError for a key dimension above the limit, BackendError when
        the card has no room.
        """
        launch.check_limit("allocate", "dk", dims.dk, launch.MAX_KEY_DIM)
        shape = (limits.layers, limits.rows, dims.hv, dims.dv, dims.dk)
        launch.check_memory("bank", 4 * math.prod(shape), device)
        return BankWorkspace(torch.zeros(shape, device=device), limits)

    def gdn_verify(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: BankWorkspace, out: Tensor, layer: int) -> None:
        """Outputs and bank entries of all active rows. One launch."""
        launch.check_batch(batch, ws.limits)
        launch.check_layers("bank", [layer], ws.bank.shape[0])
        self._walk(ops, pool, batch, ws.bank, out, layer, commit=False)

    def gdn_publish(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: BankWorkspace, layers: Sequence[int]
    ) -> None:
        """Copy the last accepted row's entry into the pool. One launch a run of layers."""
        launch.check_accepted(batch, accepted, ws.limits)
        launch.check_layers("bank", layers, min(pool.shape[0], ws.bank.shape[0]))
        size = pool[0, 0].numel()
        block = launch.channel_block(size)
        for first, count in launch.runs(layers):
            if batch.requests:
                bank_copy[(batch.requests, -(-size // block), count)](
                    pool, ws.bank, batch.cu_rows, batch.state_slot, accepted.rows, accepted.length,
                    first, pool.shape[1], ws.bank.shape[1], accepted.rows.shape[1], size, BLOCK=block,
                )  # fmt: skip

    def native_step(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        """One token of each request, by the same kernel, its state stored in the pool."""
        if ops.gdn is not None and out.gdn is not None:
            self._walk(ops.gdn, pools.recurrent, batch, pools.recurrent, out.gdn, layer, commit=True)

    def _walk(
        self, ops: GdnOps, pool: Tensor, batch: Batch, bank: Tensor, out: Tensor, layer: int, *, commit: bool
    ) -> Any:
        check_ops(ops, pool, batch, out, layer)
        if not batch.requests:
            return
        slots, hv, dv, dk = pool.shape[1:]
        if bank.shape[2:] != pool.shape[2:]:
            raise ContractError(f"bank: expected states {list(pool.shape[2:])}, got {list(bank.shape[2:])}")
        tile = launch.gdn_tile(dk, dv)
        bits = launch.as_bits
        bank_rows[(batch.requests, hv * -(-dv // tile.rows))](
            *(bits(x) for x in (ops.q, ops.k, ops.v, ops.a, ops.b)), ops.A_log, ops.dt_bias, pool, bank, bits(out),
            batch.cu_rows, batch.parent, bits(batch.active), batch.state_slot,
            int(commit), layer, slots, bank.shape[1],
            HK=ops.k.shape[1], HV=hv, DK=dk, DV=dv, BK=tile.cols, BV=tile.rows,
            num_warps=tile.warps, enable_fp_fusion=False,
        )  # fmt: skip
