"""The model's arithmetic over whole sequences, differentiable, on the parameters of `ModelConfig.parameters`.

Same formulas as `lumotree.model`, other summation orders (chunks, flash attention), so the two agree to rounding and
not in bits. Everything is a function of a mapping from names to tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lumotree.model_config import LINEAR, ModelConfig
from lumotree.training.chunked import chunked_gdn

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trunk:
    """hidden `[B, T, H]` behind the final norm; logits `[B, T, V]`: row i is the law of token i + 1."""

    hidden: Tensor
    logits: Tensor


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """fp32 weights from a seed: norms neutral, projections of standard deviation fan_in^-1/2, those that write to the
    residual stream scaled down by the number of writes, decays spread over 1..1000 tokens."""
    generator = torch.Generator().manual_seed(seed)
    writes = math.sqrt(2 * len(config.layer_kinds))
    weights = {}
    for name, parameter in config.parameters().items():
        noise = torch.randn(parameter.shape, generator=generator)
        uniform = torch.rand(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            value = uniform * math.log(16)
        elif name.endswith("dt_bias"):
            value = torch.exp(math.log(1e-3) + uniform * math.log(1e2)).expm1().log()
        elif name.endswith("linear_attn.norm.weight"):
            value = torch.ones(parameter.shape)
        elif len(parameter.shape) == 1:
            value = torch.zeros(parameter.shape)
        elif name.endswith("embed_tokens.weight"):
            value = 0.05 * noise
        else:
            value = noise * parameter.shape[-1] ** -0.5
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            value = value / writes
        weights[name] = value
    return weights


def trunk(config: ModelConfig, w: Weights, tokens: Tensor, dropout: float = 0.0) -> Trunk:
    """The target over tokens int64 `[B, T]`; activations in the dtype of the embedding."""
    x = F.embedding(tokens, w["model.embed_tokens.weight"])
    for i, kind in enumerate(config.layer_kinds):
        x = _layer(config, w, f"model.layers.{i}.", kind, x, dropout)
    hidden = norm(x, w["model.norm.weight"], config.rms_eps)
    return Trunk(hidden, _head(config, w, hidden))


def draft_steps(
    config: ModelConfig, w: Weights, tokens: Tensor, hidden: Tensor, steps: int, dropout: float = 0.0
) -> list[Tensor]:
    """Logits `[B, T', V]` of the MTP head run as a drafter runs it, T' = T - 1; row i: law of token i + 2.

    tokens `[B, T]`, hidden `[B, T, H]` of the trunk. In step s (from 0), row i reads the output of step s - 1 at
    row i - 1, and attends to the rows of step 0 up to i - s and then to one row each of steps 1..s, as they stand in
    the cache of a drafter that has gone s rows beyond the last verified one. Rows i < s have no such past.
    """
    embedded = F.embedding(tokens[:, 1:], w["model.embed_tokens.weight"])
    carried = hidden[:, :-1]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits = []
    for _ in range(steps):
        carried = _draft_step(config, w, embedded, carried, keys, values, dropout)
        logits.append(_head(config, w, carried))
        carried = F.pad(carried, (0, 0, 1, 0))[:, :-1]
    return logits


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with a zero-centred weight, in fp32, rounded to the dtype of x."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + _wide(weight))).to(x.dtype)


def rotated(x: Tensor, config: ModelConfig) -> Tensor:
    """RoPE at positions 0..T-1 of x `[B, heads, T, head_dim]`: half-split pairs of `rotary_dim` channels."""
    half = config.rotary_dim // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * config.rope_theta**-steps
    cos, sin = angles.cos(), angles.sin()
    first, second = _wide(x[..., :half]), _wide(x[..., half : 2 * half])
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., 2 * half :]], -1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _head(config: ModelConfig, w: Weights, x: Tensor) -> Tensor:
    return F.linear(x, w["model.embed_tokens.weight" if config.tied else "lm_head.weight"])


def _layer(config: ModelConfig, w: Weights, prefix: str, kind: str, x: Tensor, dropout: float) -> Tensor:
    normed = norm(x, w[f"{prefix}input_layernorm.weight"], config.rms_eps)
    if kind == LINEAR:
        mixed = _gdn(config, w, f"{prefix}linear_attn.", normed)
    else:
        q, k, v, gate = _heads(config, w, f"{prefix}self_attn.", normed)
        mixed = F.scaled_dot_product_attention(q, _per_query(config, k), _per_query(config, v), is_causal=True)
        mixed = _gated_out(w, f"{prefix}self_attn.", mixed, gate)
    x = x + F.dropout(mixed, dropout, dropout > 0)
    return x + F.dropout(_mlp(config, w, prefix, x), dropout, dropout > 0)


def _mlp(config: ModelConfig, w: Weights, prefix: str, x: Tensor) -> Tensor:
    normed = norm(x, w[f"{prefix}post_attention_layernorm.weight"], config.rms_eps)
    gate = F.silu(F.linear(normed, w[f"{prefix}mlp.gate_proj.weight"]))
    return F.linear(gate * F.linear(normed, w[f"{prefix}mlp.up_proj.weight"]), w[f"{prefix}mlp.down_proj.weight"])


def _gdn(config: ModelConfig, w: Weights, prefix: str, x: Tensor) -> Tensor:
    mixed = _conv(F.linear(x, w[f"{prefix}in_proj_qkv.weight"]), w[f"{prefix}conv1d.weight"])
    keys = config.hk * config.dk
    parts = torch.split(mixed, [keys, keys, config.hv * config.dv], -1)
    q, k, v = (_split(part, heads) for part, heads in zip(parts, (config.hk, config.hk, config.hv), strict=True))
    q, k = (_unit(part).repeat_interleave(config.hv // config.hk, 1) for part in (q, k))
    a, b = (_wide(F.linear(x, w[f"{prefix}in_proj_{name}.weight"])).transpose(1, 2) for name in "ab")
    rate, bias = w[f"{prefix}A_log"].exp()[:, None], w[f"{prefix}dt_bias"][:, None]
    out = chunked_gdn(q * config.dk**-0.5, k, _wide(v), -rate * F.softplus(a + bias), torch.sigmoid(b))
    out = out.transpose(1, 2).to(x.dtype)
    z = F.linear(x, w[f"{prefix}in_proj_z.weight"]).view(out.shape)
    gated = _gated_norm(out, z, w[f"{prefix}norm.weight"], config.rms_eps)
    return F.linear(gated.flatten(2), w[f"{prefix}out_proj.weight"])


def _conv(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU of x `[B, T, D]`, oldest tap first."""
    width = weight.shape[-1]
    padded, taps = F.pad(_wide(x), (0, 0, width - 1, 0)), _wide(weight[:, 0])
    total = padded[:, : x.shape[1]] * taps[:, 0]
    for tap in range(1, width):
        total = total + padded[:, tap : tap + x.shape[1]] * taps[:, tap]
    return F.silu(total).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return (_wide(normed) * F.silu(_wide(gate))).to(x.dtype)


def _split(x: Tensor, heads: int) -> Tensor:
    """`[B, T, heads * dim]` -> `[B, heads, T, dim]`."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _heads(config: ModelConfig, w: Weights, prefix: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotated queries and keys, values, and the output gate `[B, T, q_heads * head_dim]`."""
    q, gate = _split(F.linear(x, w[f"{prefix}q_proj.weight"]), config.q_heads).chunk(2, -1)
    k = _split(F.linear(x, w[f"{prefix}k_proj.weight"]), config.kv_heads)
    v = _split(F.linear(x, w[f"{prefix}v_proj.weight"]), config.kv_heads)
    q = rotated(norm(q, w[f"{prefix}q_norm.weight"], config.rms_eps), config)
    k = rotated(norm(k, w[f"{prefix}k_norm.weight"], config.rms_eps), config)
    return q, k, v, gate.transpose(1, 2).flatten(2)


def _per_query(config: ModelConfig, x: Tensor) -> Tensor:
    return x.repeat_interleave(config.q_heads // config.kv_heads, 1)


def _gated_out(w: Weights, prefix: str, mixed: Tensor, gate: Tensor) -> Tensor:
    return F.linear(mixed.transpose(1, 2).flatten(2) * torch.sigmoid(gate), w[f"{prefix}o_proj.weight"])


def _draft_step(
    config: ModelConfig,
    w: Weights,
    embedded: Tensor,
    carried: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    dropout: float,
) -> Tensor:
    """One step of `draft_steps`; appends its keys and values to those of the earlier ones."""
    prefix, eps = "mtp.layers.0.", config.rms_eps
    both = torch.cat([
        norm(embedded, w["mtp.pre_fc_norm_embedding.weight"], eps),
        norm(carried, w["mtp.pre_fc_norm_hidden.weight"], eps),
    ], -1)  # fmt: skip
    x = F.linear(both, w["mtp.fc.weight"])
    attention = f"{prefix}self_attn."
    q, k, v, gate = _heads(config, w, attention, norm(x, w[f"{prefix}input_layernorm.weight"], eps))
    keys.append(_per_query(config, k))
    values.append(_per_query(config, v))
    if len(keys) == 1:
        mixed = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    else:
        seen = draft_mask(q.shape[2], len(keys) - 1, q.device)
        mixed = F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=seen)
    x = x + F.dropout(_gated_out(w, attention, mixed, gate), dropout, dropout > 0)
    x = x + F.dropout(_mlp(config, w, prefix, x), dropout, dropout > 0)
    return norm(x, w["mtp.norm.weight"], eps)


def draft_mask(length: int, step: int, device: torch.device) -> Tensor:
    """bool `[T, (step + 1) T]`: what row i of draft step `step` attends to among the rows of steps 0..step.

    Rows i < step, which have no drafted past of full length, see what there is of it and always themselves.
    """
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None]
    parts = [column <= row - step, *(column == row - step + s for s in range(1, step + 1))]
    return torch.cat(parts, 1)
