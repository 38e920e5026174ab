"""The two token mixers of a hybrid model, GDN and output-gated attention, over any backend of the protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lumotree.backends.protocol import AttentionOps, Batch, ConvOps, GdnOps, StepOps, StepOut, Workspace
from lumotree.errors import ContractError
from lumotree.layers import GatedRmsNorm, Linear, Mlp, RmsNorm, gated, wide
from lumotree.model_config import LINEAR, ModelConfig
from lumotree.state import Pools

#: A surface's computation for one layer: operands, output written in place, layer number within its kind.
Attend = Callable[[AttentionOps, Tensor, int], None]


class Surfaces(Protocol):
    """How a forward reaches its backend: as a verification of trees, or as the backend's own one-token step."""

    def conv(self, ops: ConvOps, out: Tensor, layer: int) -> None:
        """`out [T, D]`."""
        ...

    def gdn(self, ops: GdnOps, out: Tensor, layer: int) -> None:
        """`out [T, HV, dv]`."""
        ...

    def attention(self, ops: AttentionOps, out: Tensor, layer: int) -> None:
        """`out [T, Hq, dh]`."""
        ...


@dataclass(frozen=True)
class VerifySurfaces:
    """Trees: the committed state is only read; candidate KV and the workspace are written."""

    backend: Any
    pools: Pools
    batch: Batch
    ws: Workspace

    def conv(self, ops: ConvOps, out: Tensor, layer: int) -> None:
        """See `Surfaces`."""
        self.backend.conv_verify(ops, self.pools.conv, self.batch, self.ws, out, layer)

    def gdn(self, ops: GdnOps, out: Tensor, layer: int) -> None:
        """See `Surfaces`."""
        self.backend.gdn_verify(ops, self.pools.recurrent, self.batch, self.ws, out, layer)

    def attention(self, ops: AttentionOps, out: Tensor, layer: int) -> None:
        """See `Surfaces`."""
        self.backend.attention_verify(ops, self.pools.cache, self.batch, self.ws, out, layer)


@dataclass(frozen=True)
class StepSurfaces:
    """One token a request, one surface a call, state and KV advanced in place."""

    backend: Any
    pools: Pools
    batch: Batch

    def conv(self, ops: ConvOps, out: Tensor, layer: int) -> None:
        """See `Surfaces`."""
        self.backend.native_step(StepOps(conv=ops), self.pools, self.batch, StepOut(conv=out), layer)

    def gdn(self, ops: GdnOps, out: Tensor, layer: int) -> None:
        """See `Surfaces`."""
        self.backend.native_step(StepOps(gdn=ops), self.pools, self.batch, StepOut(gdn=out), layer)

    def attention(self, ops: AttentionOps, out: Tensor, layer: int) -> None:
        """See `Surfaces`."""
        self.backend.native_step(StepOps(attention=ops), self.pools, self.batch, StepOut(attention=out), layer)


@dataclass(frozen=True)
class GdnMixer:
    """Gated DeltaNet: one projection to q, k, v (through the convolution), z, b, a; gated norm; output projection.

    conv_weight: `[D, W]`, oldest tap first. A_log, dt_bias: fp32 `[HV]` (float64 in a float64 model).
    """

    config: ModelConfig
    inward: Linear
    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: GatedRmsNorm
    outward: Linear
    layer: int

    @staticmethod
    def make(config: ModelConfig, weights: Mapping[str, Tensor], prefix: str, layer: int) -> GdnMixer:
        """From a checkpoint's tensors; prefix ends in "linear_attn."."""
        return GdnMixer(
            config,
            Linear.make([weights[f"{prefix}in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")]),
            weights[f"{prefix}conv1d.weight"].squeeze(1).contiguous(),
            wide(weights[f"{prefix}A_log"]),
            wide(weights[f"{prefix}dt_bias"]),
            GatedRmsNorm(weights[f"{prefix}norm.weight"], config.rms_eps),
            Linear.make([weights[f"{prefix}out_proj.weight"]]),
            layer,
        )

    def __call__(self, x: Tensor, surfaces: Surfaces) -> Tensor:
        """`[T, H]` in and out."""
        c, rows = self.config, x.shape[0]
        qkv, z, b, a = self.inward(x)
        mixed = torch.zeros_like(qkv)
        surfaces.conv(ConvOps(qkv, self.conv_weight), mixed, self.layer)
        q, k, v = (part.contiguous() for part in torch.split(mixed, [c.hk * c.dk, c.hk * c.dk, c.hv * c.dv], 1))
        q, k, v = q.view(rows, c.hk, c.dk), k.view(rows, c.hk, c.dk), v.view(rows, c.hv, c.dv)
        out = torch.zeros_like(v)
        surfaces.gdn(GdnOps(q, k, v, a, b, self.A_log, self.dt_bias), out, self.layer)
        return self.outward(self.norm(out, z.view_as(out)).flatten(1))[0]


@dataclass(frozen=True)
class AttentionMixer:
    """Grouped-query attention with q/k norm and partial RoPE; its output is multiplied by sigmoid(gate).

    cos, sin: wide `[positions, rotary_dim / 2]`.
    """

    config: ModelConfig
    inward: Linear
    q_norm: RmsNorm
    k_norm: RmsNorm
    outward: Linear
    cos: Tensor
    sin: Tensor
    layer: int

    @staticmethod
    def make(
        config: ModelConfig, weights: Mapping[str, Tensor], prefix: str, layer: int, rope: tuple[Tensor, Tensor]
    ) -> AttentionMixer:
        """From a checkpoint's tensors; prefix ends in "self_attn."."""
        return AttentionMixer(
            config,
            Linear.make([weights[f"{prefix}{name}_proj.weight"] for name in ("q", "k", "v")]),
            RmsNorm.make(weights[f"{prefix}q_norm.weight"], config.rms_eps),
            RmsNorm.make(weights[f"{prefix}k_norm.weight"], config.rms_eps),
            Linear.make([weights[f"{prefix}o_proj.weight"]]),
            *rope,
            layer,
        )

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """`[T, H]` in and out."""
        c, rows = self.config, x.shape[0]
        both, k, v = self.inward(x)
        # Each head's rows of the projection are its query, then its gate.
        query, gate = both.view(rows, c.q_heads, 2, c.head_dim).unbind(2)
        q = self.q_norm(query).contiguous()
        k = self.k_norm(k.view(rows, c.kv_heads, c.head_dim)).contiguous()
        out = torch.zeros_like(q)
        attend(AttentionOps(q, k, v.view_as(k), self.cos, self.sin), out, self.layer)
        return self.outward(gated(out, gate, "sigmoid").flatten(1))[0]


@dataclass(frozen=True)
class Block:
    """One decoder layer: mixer and MLP, each behind a norm and added to the residual stream."""

    before_mixer: RmsNorm
    mixer: GdnMixer | AttentionMixer
    before_mlp: RmsNorm
    mlp: Mlp

    @staticmethod
    def make(
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        prefix: str,
        kind: str,
        layer: int,
        rope: tuple[Tensor, Tensor],
    ) -> Block:
        """From a checkpoint's tensors; prefix ends in "layers.N."; layer: number within its kind."""
        mixer: GdnMixer | AttentionMixer
        if kind == LINEAR:
            mixer = GdnMixer.make(config, weights, f"{prefix}linear_attn.", layer)
        else:
            mixer = AttentionMixer.make(config, weights, f"{prefix}self_attn.", layer, rope)
        return Block(
            RmsNorm.make(weights[f"{prefix}input_layernorm.weight"], config.rms_eps),
            mixer,
            RmsNorm.make(weights[f"{prefix}post_attention_layernorm.weight"], config.rms_eps),
            Mlp.make(weights, f"{prefix}mlp."),
        )

    def __call__(self, h: Tensor, surfaces: Surfaces) -> Tensor:
        """Residual stream `[T, H]` behind the layer."""
        x = self.before_mixer(h)
        mixed = self.mixer(x, surfaces) if isinstance(self.mixer, GdnMixer) else self.mixer(x, surfaces.attention)
        h = h + mixed
        return h + self.mlp(self.before_mlp(h))


def rope_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin `[positions, rotary_dim / 2]` of `position * theta^(-2 i / rotary_dim)`.

    fp32 (float64 in a float64 model) in the family's own order of operations: at long positions the angle's rounding
    is larger than a bf16 step, and trained weights expect this one. Computed on the CPU for every device.
    """
    kind = torch.float64 if config.dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=kind) / config.rotary_dim
    angle = torch.arange(config.positions, dtype=kind)[:, None] * (1.0 / config.rope_theta**exponent)
    return angle.cos().to(device), angle.sin().to(device)


def check_rows(config: ModelConfig, tokens: Tensor, batch: Batch) -> None:
    """Raise ContractError, naming row and value, for tokens or positions of active rows that the model has not.

    Reads from the device, so it is left out while a CUDA graph is captured.
    """
    if tokens.dtype != torch.int64 or tokens.shape != (batch.rows,):
        raise ContractError(
            f"tokens: expected int64 [{batch.rows}], one a row, got {tokens.dtype} {list(tokens.shape)}"
        )
    if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    for name, values, limit in (("token", tokens, config.vocab), ("position", batch.position, config.positions)):
        wrong = (batch.active & ((values < 0) | (values >= limit))).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ContractError(f"row {row}: {name}={int(values[row])}; allowed: 0..{limit - 1}")
