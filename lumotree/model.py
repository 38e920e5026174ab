"""`HybridModel`: a language model of the Qwen3-Next / Qwen3.5 family over any backend of the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lumotree.backends.protocol import Accepted, Batch, Limits, Workspace
from lumotree.checkpoint import check_tensors, read_checkpoint, specs_of
from lumotree.contract import Contract
from lumotree.errors import ContractError
from lumotree.layers import Linear, RmsNorm
from lumotree.mixers import Block, StepSurfaces, Surfaces, VerifySurfaces, check_rows, rope_tables
from lumotree.model_config import ModelConfig
from lumotree.model_types import Forward
from lumotree.mtp import MtpHead
from lumotree.state import KVCache, Pools


class _Placed(Mapping[str, Tensor]):
    """Tensors moved to a device one by one as they are asked for: a large checkpoint is never in memory twice."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self._weights, self._device = weights, device

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class HybridModel:
    """Implements `lumotree.model_types.LanguageModel`; see there for shapes.

    weights: every tensor of `config.parameters()`. On a CPU products are computed in fp32 from widened weights, so a
    bf16 model takes twice its file's size in memory. `blocks` are the decoder layers. Every row has the same bits
    whatever the number, order, padding and content of the other rows, as far as the backend's rows have (its contract
    says which surfaces claim it).

    Raises CheckpointError when a tensor is missing, left over, misshapen or of another dtype.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        check_tensors(config, specs_of(weights), "model")
        self.config = config
        self.device = torch.device(device)
        self.vocab, self.hidden_size, self.dims = config.vocab, config.hidden, config.dims
        placed = _Placed(weights, self.device)
        self._rope = rope_tables(config, self.device)
        self._embedding = placed["model.embed_tokens.weight"]
        self.blocks = [
            Block.make(config, placed, f"model.layers.{i}.", kind, config.layer_kinds[:i].count(kind), self._rope)
            for i, kind in enumerate(config.layer_kinds)
        ]
        self._norm = RmsNorm.make(placed["model.norm.weight"], config.rms_eps)
        self._head = Linear.make([self._embedding if config.tied else placed["lm_head.weight"]])
        self._mtp_weights = {name: placed[name] for name in config.parameters() if name.startswith("mtp.")}

    def draft_head(self, backend: Any = None) -> MtpHead:
        """The model's MTP head, sharing embedding and output projection.

        backend: what computes its attention; by default the built-in one of the device. Raises ContractError for a
        model without one.
        """
        if not self.config.mtp_layers:
            raise ContractError("draft head: this model has none (mtp_layers=0); use a drafter that needs no head")
        return MtpHead(self.config, self._mtp_weights, self._embedding, self._head, self._rope, self.device, backend)

    def empty_pools(self, contract: Contract, slots: int, flat_slots: int) -> Pools:
        """See LanguageModel."""
        c, d = self.config, self.dims
        kv = (c.attention_layers, flat_slots, c.kv_heads, c.head_dim)
        state = (c.gdn_layers, slots, *d.recurrent_shape(contract.layout))
        return Pools(
            torch.zeros(state, dtype=contract.state_dtype, device=self.device),
            torch.zeros((c.gdn_layers, slots, d.conv_channels, d.conv_width - 1), dtype=c.dtype, device=self.device),
            KVCache(*(torch.zeros(kv, dtype=c.dtype, device=self.device) for _ in range(2))),
        )

    def allocate(self, backend: Any, limits: Limits) -> Workspace:
        """See LanguageModel; `limits.layers` is set here."""
        return backend.allocate(self.dims, replace(limits, layers=self.dims.layers), self.device)

    def verify(self, tokens: Tensor, batch: Batch, pools: Pools, ws: Workspace, backend: Any) -> Forward:
        """See LanguageModel. Rows that are inactive get unspecified logits.

        Raises ContractError for a token outside the vocabulary or a position beyond the model's.
        """
        return self._forward(tokens, batch, VerifySurfaces(backend, pools, batch, ws))

    def publish(self, batch: Batch, accepted: Accepted, pools: Pools, ws: Workspace, backend: Any) -> None:
        """See LanguageModel. Raises PathError for a path that cannot have been accepted."""
        gdn, attention = range(self.config.gdn_layers), range(self.config.attention_layers)
        backend.gdn_publish(pools.recurrent, batch, accepted, ws, gdn)
        backend.conv_publish(pools.conv, batch, accepted, ws, gdn)
        backend.kv_publish(pools.cache, batch, accepted, ws, attention)

    def step(self, tokens: Tensor, batch: Batch, pools: Pools, backend: Any) -> Forward:
        """See LanguageModel. Raises ContractError as `verify`, and for a batch of more than one row a request."""
        if batch.rows > batch.requests:
            raise ContractError(f"step: expected one row a request, got {batch.rows} rows of {batch.requests} requests")
        return self._forward(tokens, batch, StepSurfaces(backend, pools, batch))

    def _forward(self, tokens: Tensor, batch: Batch, surfaces: Surfaces) -> Forward:
        check_rows(self.config, tokens, batch)
        h = self._embedding[tokens.clamp(0, self.vocab - 1)]  # inactive rows may hold anything
        for block in self.blocks:
            h = block(h, surfaces)
        hidden = self._norm(h)
        return Forward(self._head.raw(hidden), hidden)


def load_model(folder: Path | str, device: torch.device | str = "cpu") -> HybridModel:
    """The model in a local folder of a published layout: config.json and safetensors files.

    Raises ConfigError or CheckpointError.
    """
    config, weights = read_checkpoint(folder)
    return HybridModel(config, weights, device)
