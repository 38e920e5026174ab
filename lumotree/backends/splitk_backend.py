"""`SplitKAttentionBackend`: `TritonBackend` whose attention reads a long prefix once for all rows of a request."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lumotree.backends.protocol import AttentionOps, Batch, Limits, StepOps, StepOut
from lumotree.backends.triton_backend import TritonBackend
from lumotree.contract import Contract, Dims
from lumotree.state import KVCache, Pools
from lumotree.verifier.kernels import launch, splitk_launch
from lumotree.verifier.kernels.splitk_launch import WORD, SplitScratch, SplitShape
from lumotree.verifier.kernels.workspace import TritonWorkspace


@dataclass(frozen=True)
class SplitKWorkspace(TritonWorkspace):
    """And what split-K attention needs."""

    split: SplitScratch


class SplitKAttentionBackend(TritonBackend):
    """Attention split over the keys, with matrix products of bf16; bit for bit its own one-token step.

    contract: `probs="fp32"` (the default) carries each attention weight in three bf16 numbers, exactly; `probs="bf16"`
    rounds it to one, as flash kernels do, for half the arithmetic. shape: see SplitShape. max_keys: committed and
    candidate positions of a request that the workspace has room for. Raises ContractError for sizes above the limits.
    """

    name = "triton_splitk"
    contract = Contract(claims="bitwise", graph_safe=True, max_rows=1024)

    def __init__(
        self,
        contract: Contract | None = None,
        shape: SplitShape = splitk_launch.DEFAULT,
        max_keys: int = splitk_launch.DEFAULT_MAX_KEYS,
    ) -> None:
        super().__init__()
        self.binaries["combine"] = set()
        self.contract = type(self).contract if contract is None else contract
        self.shape, self.max_keys = shape, max_keys

    def check_dims(self, dims: Dims, limits: Limits) -> None:
        """Raise ContractError or BackendError for a model that the kernels are not made for."""
        super().check_dims(dims, limits)
        splitk_launch.check_shape(self.shape, dims.head_dim)

    def allocate(self, dims: Dims, limits: Limits, device: torch.device) -> SplitKWorkspace:
        """All scratch of verification and publication; the one-token step allocates its own."""
        base = super().allocate(dims, limits, device)
        words = -(-min(limits.rows, self.contract.max_rows) // WORD)
        sizes = (limits.rows, dims.q_heads, dims.head_dim, words, self.shape.splits(self.max_keys + limits.rows))
        launch.check_memory("split-K attention workspace", SplitScratch.size(*sizes), device)
        return SplitKWorkspace(**vars(base), split=SplitScratch.make(limits.requests, *sizes, device))

    def attention_verify(
        self, ops: AttentionOps, cache: KVCache, batch: Batch, ws: TritonWorkspace, out: Tensor, layer: int
    ) -> None:
        """See `splitk_launch.forward`."""
        assert isinstance(ws, SplitKWorkspace)
        launch.check_batch(batch, ws.limits)
        self._attend(ops, cache, batch, ws.split, out, layer, tree=True)

    def native_step(self, ops: StepOps, pools: Pools, batch: Batch, out: StepOut, layer: int) -> None:
        """One token of each request on every surface that `ops` has; state and KV advance in place."""
        super().native_step(replace(ops, attention=None), pools, batch, out, layer)
        if ops.attention is not None and out.attention is not None:
            q_heads, head_dim = ops.attention.q.shape[1:]
            splits = self.shape.splits(batch.page_table.shape[1] * batch.page_size + batch.rows)
            sizes = (batch.requests, batch.rows, q_heads, head_dim, 1, splits)
            scratch = SplitScratch.make(*sizes, out.attention.device)
            self._attend(ops.attention, pools.cache, batch, scratch, out.attention, layer, tree=False)

    def _attend(
        self, ops: AttentionOps, cache: KVCache, batch: Batch, scratch: SplitScratch, out: Tensor, layer: int, *,
        tree: bool,
    ) -> None:  # fmt: skip
        split, combine = splitk_launch.forward(
            ops, cache, batch, scratch, out, layer, self.shape, self.contract.probs, tree=tree
        )
        self._note("attention", split)
        self._note("combine", combine)
