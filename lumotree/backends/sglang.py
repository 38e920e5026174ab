"""Adapter for sglang's tree verification of GDN and convolution (read and tested: sglang 0.5.23).

Kernels, called as sglang's own GDN backend calls them for an EAGLE tree (`gdn_backend.py`, `gdn_triton.py`):
`fused_sigmoid_gating_delta_rule_update` with `retrieve_parent_token` and `causal_conv1d_update` with
`retrieve_next_token / next_sibling`. Every row's state is stored; after acceptance sglang scatters the stored state
and conv window of the last accepted row into the pool (`update_mamba_state_after_mtp_verify`), a plain copy. The
native step is the same kernel at T = 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lumotree.backends import interpreter, peer_loading, peer_rows
from lumotree.backends.protocol import (
    Accepted,
    BackendBase,
    Batch,
    ConvOps,
    GdnOps,
    Limits,
    StepOps,
    StepOut,
    Workspace,
)
from lumotree.contract import Contract, Dims
from lumotree.errors import ContractError
from lumotree.state import Pools

_GDN_FILE = "kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py"
_CONV_FILE = "kernels/ops/mamba/causal_conv1d_triton.py"


@dataclass(frozen=True)
class SglangWorkspace:
    """What verification stores: `states [L, rows, HV, dv, dk]` (pool dtype), `windows` bf16 `[L, rows, D, W-1]`."""

    states: Tensor
    windows: Tensor


class SglangBackend(BackendBase):
    """sglang's Triton kernels.

    contract: the default, or the same with `state_dtype` and `carry` both bf16: sglang's stored states have the dtype
    of its pool, so that every parent's state then reaches its child through bf16, in the tree and in decode alike.

    Raises BackendError when sglang or triton is missing, ContractError for any other contract.
    """

    name = "sglang"
    contract = Contract(
        layout="VK",
        beta="fp32",
        norm="rsqrt",
        conv="bf16_product",
        softplus="log_exp",
        head_map="grouped",
        carry="fp32",
        zeros="unsigned",  # the committed state is added to 0 when loaded, a parent's is not
        claims="bitwise",
        # The tree sums a convolution's taps newest first, decode sums them oldest first: equal in exact arithmetic,
        # equal in bits for most inputs, but not by design. GDN runs one and the same recurrence in both.
        algebra=("conv",),
        max_rows=256,  # the convolution is unrolled over the rows of a request
    )

    def __init__(self, contract: Contract = contract) -> None:
        dtype = contract.state_dtype
        carry = "bf16" if dtype == torch.bfloat16 else "fp32"
        if contract != replace(type(self).contract, state_dtype=dtype, carry=carry):
            raise ContractError(
                "backend 'sglang': its arithmetic is fixed; only state_dtype and carry may change, both to bf16, got "
                f"{contract.as_dict()}"
            )
        self.contract = contract
        peer_loading.require(self.name)
        self.interpreted = interpreter.prepare()
        self._gdn = self._load(_GDN_FILE, "fused_sigmoid_gating_delta_rule_update")
        self._conv = self._load(_CONV_FILE, "causal_conv1d_update")

    def _load(self, file: str, function: str) -> Any:
        module = peer_loading.load_kernel_module(self.name, file, peer_loading.sglang_stand_ins())
        interpreter.wrap_builtin_aliases(module)
        return peer_loading.attribute(self.name, module, function)

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> Workspace:
        """One state and one conv window a row and layer."""
        contract = self.contract
        states = peer_rows.row_states(dims, contract.layout, contract.state_dtype, limits.layers, limits.rows, device)
        window = (limits.layers, limits.rows, dims.conv_channels, dims.conv_width - 1)
        return SglangWorkspace(states, torch.zeros(window, dtype=torch.bfloat16, device=device))

    def _run_gdn(self, ops: GdnOps, pool: Tensor, batch: Batch, **mode: Any) -> Tensor:
        """`[T, HV, dv]`. The kernel is ragged by itself: a request is a sequence of `cu_seqlens`."""
        o: Tensor = self._gdn(
            A_log=ops.A_log, a=ops.a.contiguous(), dt_bias=ops.dt_bias, softplus_beta=1.0, softplus_threshold=20.0,
            q=ops.q.contiguous()[None], k=ops.k.contiguous()[None], v=ops.v.contiguous()[None], b=ops.b.contiguous(),
            initial_state_source=pool, initial_state_indices=batch.state_slot, use_qk_l2norm_in_kernel=True,
            cu_seqlens=batch.cu_rows, **mode,
        )  # fmt: skip
        return o.view(ops.v.shape)

    def _verify_gdn(self, ops: GdnOps, pool: Tensor, batch: Batch, ws: Workspace, out: Tensor, layer: int) -> None:
        """Inactive rows run like any other: only rows below them, inactive themselves, read what they leave."""
        if not batch.rows:
            return
        # The kernel indexes the buffer as [slot, step]. With one step a slot and a request's first row as its slot,
        # slot + step is the physical row, so that ragged requests need no padding. The root's parent is never read;
        # -1 would be an address below the buffer for any other row.
        outputs = self._run_gdn(
            ops, pool[layer], batch, disable_state_update=True,
            intermediate_states_buffer=ws.states[layer].unsqueeze(1),
            intermediate_state_indices=batch.cu_rows[:-1].contiguous(), cache_steps=1,
            retrieve_parent_token=peer_rows.to_table(batch.parent.clamp(min=0), batch, batch.rows),
        )  # fmt: skip
        out.copy_(outputs)

    def _publish_gdn(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Workspace, layers: Iterable[int]
    ) -> None:
        peer_rows.publish_by_copy(pool, ws.states, batch, accepted, layers)

    def _verify_conv(self, ops: ConvOps, pool: Tensor, batch: Batch, ws: Workspace, out: Tensor, layer: int) -> None:
        if not batch.rows:
            return
        width = peer_rows.widest_request(batch)
        x = peer_rows.to_table(ops.x, batch, width)
        windows = x.new_zeros((*x.shape, ops.weight.shape[1] - 1))
        first_child, sibling = peer_rows.child_links(batch, width)
        requests = torch.arange(batch.requests, dtype=torch.int32, device=x.device)
        # The kernel overwrites the conv state it starts from, in the tree too (sglang restores it when it commits):
        # it gets a copy, because verification must leave the pool alone.
        history = pool[layer].index_select(0, batch.state_slot.clamp(min=0).long())
        outputs = self._conv(
            x.transpose(1, 2), history, ops.weight, None, "silu",
            conv_state_indices=torch.where(batch.state_slot >= 0, requests, -1),
            intermediate_conv_window=windows, intermediate_state_indices=requests,
            retrieve_next_token=first_child, retrieve_next_sibling=sibling,
            retrieve_parent_token=torch.zeros_like(first_child),
        )  # fmt: skip
        out.copy_(peer_rows.from_table(outputs.transpose(1, 2), batch))
        ws.windows[layer, : batch.rows] = peer_rows.from_table(windows, batch)

    def _publish_conv(
        self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Workspace, layers: Iterable[int]
    ) -> None:
        peer_rows.publish_by_copy(pool, ws.windows, batch, accepted, layers)

    def _step(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        if not batch.rows:
            return
        if ops.gdn is not None and out.gdn is not None:
            out.gdn.copy_(self._run_gdn(ops.gdn, pools.recurrent[layer], batch))
        if ops.conv is not None and out.conv is not None:
            slots = batch.state_slot[batch.row_request.long()]
            outputs = self._conv(
                ops.conv.x.contiguous(), pools.conv[layer], ops.conv.weight, None, "silu", conv_state_indices=slots
            )
            out.conv.copy_(outputs)

    gdn_verify = _verify_gdn
    gdn_publish = _publish_gdn
    conv_verify = _verify_conv
    conv_publish = _publish_conv
    native_step = _step
