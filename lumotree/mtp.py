"""The multi-token-prediction head of the family: one attention layer that reads the target's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.protocol import AttentionOps, Batch, ConvOps, GdnOps, Limits, Workspace
from lumotree.errors import ContractError
from lumotree.layers import Linear, RmsNorm
from lumotree.mixers import Block, check_rows
from lumotree.model_config import FULL, ModelConfig
from lumotree.model_types import Forward
from lumotree.state import KVCache


@dataclass(frozen=True)
class _AttentionOnly:
    """The surfaces of a forward that has attention alone."""

    backend: Any
    cache: KVCache
    batch: Batch
    ws: Workspace

    def attention(self, ops: AttentionOps, out: Tensor, layer: int) -> None:
        self.backend.attention_verify(ops, self.cache, self.batch, self.ws, out, layer)

    def conv(self, ops: ConvOps, out: Tensor, layer: int) -> None:
        raise AssertionError("the MTP head has no convolution")

    def gdn(self, ops: GdnOps, out: Tensor, layer: int) -> None:
        raise AssertionError("the MTP head has no recurrence")


class MtpHead:
    """Implements `lumotree.model_types.DraftHead`; see there for what a row reads and predicts.

    `fc` reads the normed embedding of the next token and the normed hidden row, in this order; a decoder layer and the
    head's own norm follow; the output projection is the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        head: Linear,
        rope: tuple[Tensor, Tensor],
        device: torch.device,
        backend: Any = None,
    ) -> None:
        self.config, self.device = config, device
        self.backend = default_backend(device) if backend is None else backend
        self._embedding, self._head = embedding, head
        self._norm_embedding, self._norm_hidden, self._norm = (
            RmsNorm.make(weights[f"mtp.{name}.weight"], config.rms_eps)
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        )
        self._fc = Linear.make([weights["mtp.fc.weight"]])
        self._block = Block.make(config, weights, "mtp.layers.0.", FULL, 0, rope)
        self._workspaces: dict[tuple[int, int], Workspace] = {}

    def empty_cache(self, flat_slots: int) -> KVCache:
        """See DraftHead."""
        shape = (1, flat_slots, self.config.kv_heads, self.config.head_dim)
        return KVCache(*(torch.zeros(shape, dtype=self.config.dtype, device=self.device) for _ in range(2)))

    def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, cache: KVCache) -> Forward:
        """See DraftHead. Rows that are inactive get unspecified logits.

        Raises ContractError for a token outside the vocabulary, a position beyond the model's, or hidden rows of
        another shape or dtype.
        """
        check_rows(self.config, tokens, batch)
        if hidden.shape != (batch.rows, self.config.hidden) or hidden.dtype != self.config.dtype:
            raise ContractError(
                f"draft head: expected hidden {self.config.dtype} [{batch.rows}, {self.config.hidden}], "
                f"got {hidden.dtype} {list(hidden.shape)}"
            )
        embedded = self._embedding[tokens.clamp(0, self.config.vocab - 1)]
        both = torch.cat([self._norm_embedding(embedded), self._norm_hidden(hidden)], 1)
        surfaces = _AttentionOnly(self.backend, cache, batch, self._workspace(batch))
        after = self._norm(self._block(self._fc(both)[0], surfaces))
        return Forward(self._head.raw(after), after)

    def _workspace(self, batch: Batch) -> Workspace:
        """One for each size class: attention keeps nothing in it between calls."""
        size = (_power_of_two(batch.requests), _power_of_two(batch.rows))
        if size not in self._workspaces:
            limits = Limits(requests=size[0], rows=size[1], path=1, slots=1, layers=1)
            self._workspaces[size] = self.backend.allocate(self.config.dims, limits, self.device)
        return self._workspaces[size]


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def default_backend(device: torch.device) -> Any:
    """The built-in verifier of a device: torch on a CPU, Triton on a GPU."""
    if device.type == "cpu":
        from lumotree.backends.torch_backend import TorchBackend

        return TorchBackend()
    from lumotree.backends.triton_backend import TritonBackend

    return TritonBackend()
