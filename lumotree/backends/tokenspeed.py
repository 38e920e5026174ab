"""Adapter for tokenspeed-kernel's tree verification of GDN (read and tested: tokenspeed-kernel 0.1.4).

`triton_gdn_decode_mtp` with `parent_indices` runs the tree, `triton_gdn_decode_step` is the native step. The package
has two ways to keep what verification found, and so has this module:

* `TokenspeedBackend`: `output_state_indices` gives every row a pool row for its state; publication copies the last
  accepted row's state to the committed slot.
* `TokenspeedReplayBackend`: only branch points keep their states (`intermediate_states_buffer`); publication replays
  the accepted rows' recorded k, v, a, b from the committed state (`triton_gdn_replay_commit`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lumotree.backends import interpreter, peer_loading, peer_rows
from lumotree.backends.protocol import Accepted, BackendBase, Batch, GdnOps, Limits, StepOps, StepOut, Workspace
from lumotree.contract import Contract, Dims
from lumotree.state import Pools

_PEER = "tokenspeed"
_FILE = "ops/attention/gdn/triton.py"


@dataclass(frozen=True)
class TokenspeedWorkspace:
    """`states [L, requests + rows, HV, dv, dk]`: copies of the committed states, then the state behind every row.

    The kernel reads and writes one and the same pool; a pool of its own keeps the caller's read-only.
    """

    states: Tensor
    requests: int


class TokenspeedBackend(BackendBase):
    """tokenspeed-kernel's portable Triton GDN.

    Only fp32 pools: with a bf16 pool the kernel reloads a parent through bf16 at branches but keeps fp32 along
    consecutive rows, so that the carry is neither of the declared variants. Raises BackendError when
    tokenspeed-kernel or triton is missing.
    """

    name = _PEER
    contract = Contract(
        layout="VK",
        beta="fp32",
        norm="sqrt",
        softplus="log_exp",
        head_map="grouped",
        carry="fp32",
        zeros="unsigned",
        claims="bitwise",
    )

    def __init__(self) -> None:
        peer_loading.require(_PEER)
        self.interpreted = interpreter.prepare()
        module = peer_loading.load_kernel_module(_PEER, _FILE, peer_loading.tokenspeed_stand_ins())
        interpreter.wrap_builtin_aliases(module)
        self._tree = peer_loading.attribute(_PEER, module, "triton_gdn_decode_mtp")
        self._decode = peer_loading.attribute(_PEER, module, "triton_gdn_decode_step")
        self._commit = peer_loading.attribute(_PEER, module, "triton_gdn_replay_commit")

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Workspace:
        """One state a request, and one a row, for each layer."""
        rows = limits.requests + limits.rows
        states = peer_rows.row_states(dims, self.contract.layout, torch.float32, limits.layers, rows, device)
        return TokenspeedWorkspace(states, limits.requests)

    def _run_tree(self, ops: GdnOps, batch: Batch, width: int, states: Tensor, slots: Tensor, **mode: Any) -> Tensor:
        """`[T, HV, dv]`. Places behind a request's rows: operands 0, parent "committed state".

        Inactive rows run like any other: only rows below them, inactive themselves, read what they leave.
        """
        q, k, v, a, b = (peer_rows.to_table(x, batch, width) for x in (ops.q, ops.k, ops.v, ops.a, ops.b))
        outputs = self._tree(
            q, k, v, A_log=ops.A_log, a=a, dt_bias=ops.dt_bias, b=b, initial_state=states, initial_state_indices=slots,
            disable_state_update=True, parent_indices=peer_rows.to_table(batch.parent, batch, width, fill=-1), **mode,
        )  # fmt: skip
        return peer_rows.from_table(outputs, batch)

    def _verify(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: Workspace, out: Tensor, layer: int) -> None:
        if not batch.rows:
            return
        width = peer_rows.widest_request(batch)
        states = ws.states[layer]
        states[: batch.requests] = pool[layer].index_select(0, batch.state_slot.clamp(min=0).long())
        requests = torch.arange(batch.requests, dtype=torch.int32, device=states.device)
        targets = torch.arange(batch.rows, dtype=torch.int32, device=states.device) + ws.requests
        outputs = self._run_tree(
            ops, batch, width, states, torch.where(batch.state_slot >= 0, requests, -1),
            output_state_indices=peer_rows.to_table(targets, batch, width, fill=-1),  # -1 = not stored
        )  # fmt: skip
        out.copy_(outputs)

    def _publish(self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Workspace, layers: Iterable[int]) -> None:
        peer_rows.publish_by_copy(pool, ws.states[:, ws.requests :], batch, accepted, layers)

    def _step(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        if ops.gdn is None or out.gdn is None or not batch.rows:
            return
        gdn: Any = ops.gdn
        outputs = self._decode(
            gdn.q[:, None], gdn.k[:, None], gdn.v[:, None], A_log=gdn.A_log, a=gdn.a[:, None], dt_bias=gdn.dt_bias,
            b=gdn.b[:, None], initial_state=pools.recurrent[layer],
            initial_state_indices=batch.state_slot[batch.row_request.long()],
        )  # fmt: skip
        out.gdn.copy_(outputs[:, 0])

    gdn_verify = _verify
    gdn_publish = _publish
    native_step = _step


@dataclass(frozen=True)
class ReplayWorkspace:
    """What replay needs: `payload` bf16 `[L, rows, HK dk + HV dv + 2 HV]` (k, v, a, b of each row) and
    `parameters` fp32 `[L, 2, HV]` (A_log, dt_bias).
    """

    payload: Tensor
    parameters: Tensor
    dims: Dims


class TokenspeedReplayBackend(TokenspeedBackend):
    """The same tree kernel, published by tokenspeed-kernel's replay of the accepted rows."""

    name = "tokenspeed-replay"

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Workspace:
        """The operands of every row, for each layer."""
        width = dims.hk * dims.dk + dims.hv * (dims.dv + 2)
        payload = torch.zeros((limits.layers, limits.rows, width), dtype=torch.bfloat16, device=device)
        return ReplayWorkspace(payload, torch.zeros((limits.layers, 2, dims.hv), device=device), dims)

    def _verify_recording(
        self, ops: GdnOps, pool: Tensor, batch: Batch, ws: Workspace, out: Tensor, layer: int
    ) -> None:
        if not batch.rows:
            return
        width = peer_rows.widest_request(batch)
        branches = pool.new_empty((batch.requests, width, *pool.shape[2:]))
        outputs = self._run_tree(ops, batch, width, pool[layer], batch.state_slot, intermediate_states_buffer=branches)
        out.copy_(outputs)
        ws.payload[layer, : batch.rows] = torch.cat([x.flatten(1) for x in (ops.k, ops.v, ops.a, ops.b)], dim=1)
        ws.parameters[layer] = torch.stack([ops.A_log, ops.dt_bias])

    def _publish_by_replay(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Workspace, layers: Iterable[int]
    ) -> None:
        """The kernel takes dense paths `[L, B * Lmax, width]`; an empty path is made to write nowhere."""
        chosen = list(layers)
        if not chosen or not batch.rows:
            return
        rows = batch.cu_rows[:-1, None] + accepted.rows.clamp(min=0)
        payload = ws.payload[chosen][:, rows.flatten().clamp(max=batch.rows - 1).long()].contiguous()
        slots = torch.where(accepted.length > 0, batch.state_slot, -1).repeat(len(chosen), 1)
        dims, device = ws.dims, pool.device
        self._commit(
            payload, ws.parameters[chosen].contiguous(),
            state_addresses=torch.tensor([pool[i].data_ptr() for i in chosen], device=device),
            state_row_strides=torch.full((len(chosen),), pool.stride(1), dtype=torch.int64, device=device),
            read_indices=slots, write_indices=slots, accepted_length=accepted.length,
            draft_token_num=accepted.rows.shape[1], num_k_heads=dims.hk, num_v_heads=dims.hv,
            head_k_dim=dims.dk, head_v_dim=dims.dv, state_dtype=pool.dtype,
        )  # fmt: skip

    gdn_verify = _verify_recording
    gdn_publish = _publish_by_replay
