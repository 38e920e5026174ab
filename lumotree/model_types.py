"""What a hybrid model offers to cycles, drafters and audits: one forward over the rows of trees, and its publication.

Everything a decoder does is a verification of trees followed by a publication: a plain decoding step is a tree of one
row, a prefill chunk is a chain of which every row is accepted. `step` is the other way to decode, the backend's own
one-token update, and what the trees are held against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, Limits, Workspace
from lumotree.contract import Contract, Dims
from lumotree.state import KVCache, Pools


@dataclass(frozen=True)
class Forward:
    """What a forward leaves for selection and for the drafter.

    logits: fp32 `[T, V]`. hidden: bf16 `[T, H]`, the rows behind the final norm, which are projected to logits and
    read by the MTP head of this family.
    """

    logits: Tensor
    hidden: Tensor


class LanguageModel(Protocol):
    """A hybrid model. `vocab` V, `hidden_size` H; `dims` describes its GDN, conv and attention layers.

    `pools` holds the GDN layers' recurrent and conv state `[gdn_layers, slots, ..]` and the attention layers' cache
    `[attention_layers, flat_slots, ..]`; layer numbers given to a backend count within each kind.
    `backend` is any object of `lumotree.backends.protocol`; rows get the same bits whatever else is in the batch.
    """

    vocab: int
    hidden_size: int
    dims: Dims
    device: torch.device

    def empty_pools(self, contract: Contract, slots: int, flat_slots: int) -> Pools:
        """Zeroed pools for `slots` requests and `flat_slots` cached tokens."""
        ...

    def allocate(self, backend: Any, limits: Limits) -> Workspace:
        """The workspace of `backend` for this model."""
        ...

    def verify(self, tokens: Tensor, batch: Batch, pools: Pools, ws: Workspace, backend: Any) -> Forward:
        """One forward over all rows, tokens int64 `[T]`. Writes only candidate KV slots and the workspace."""
        ...

    def publish(self, batch: Batch, accepted: Accepted, pools: Pools, ws: Workspace, backend: Any) -> None:
        """Advance every layer's state by the accepted paths of the verification that came before."""
        ...

    def step(self, tokens: Tensor, batch: Batch, pools: Pools, backend: Any) -> Forward:
        """One token a request through the backend's own `native_step`, tokens int64 `[B]`; state advances."""
        ...


class DraftHead(Protocol):
    """The model's multi-token-prediction head: one attention layer with its own cache, sharing embedding and output.

    The entry at position i of its cache comes from the target's hidden row at i and the token at i + 1.
    """

    def empty_cache(self, flat_slots: int) -> KVCache:
        """Zeroed cache of one layer."""
        ...

    def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, cache: KVCache) -> Forward:
        """Rows of trees: tokens int64 `[T]` (the token after each row), hidden bf16 `[T, H]` (the target's, or the
        head's own from the row before). Writes each row's KV at `batch.row_slot`. The logits of row i are those of
        position i + 2, `hidden` (behind the head's own norm) is what the head's next row reads."""
        ...
