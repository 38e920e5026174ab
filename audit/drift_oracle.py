"""A whole hybrid model in float64, layer by layer over a known sequence: what rounding is measured against.

Same weights and tokens, the family's formulas, no arithmetic shared with model, kernels or reference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lumotree.contract import Contract
from lumotree.model_config import LINEAR, ModelConfig

_L2_EPS = 1e-6


@dataclass(frozen=True)
class Float64Run:
    """states: committed tokens -> recurrent states `[Lg, HV, dv, dk]`; logits `[n, V]` behind each token; float64."""

    states: dict[int, Tensor]
    logits: Tensor


def float64_run(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokens: Sequence[int],
    marks: Collection[int],
    contract: Contract,
) -> Float64Run:
    """Run the model over `tokens`. marks: numbers of committed tokens (1..n) at which states are kept.

    Of the contract the head map is followed; roundings are not, since this is the exact value.
    """
    w = _Weights(weights)
    h = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    kept: dict[int, list[Tensor]] = {m: [] for m in sorted(marks)}
    for i, kind in enumerate(config.layer_kinds):
        at = f"model.layers.{i}."
        x = _norm(h, w[f"{at}input_layernorm.weight"], config)
        if kind == LINEAR:
            mixed = _gdn(config, w, f"{at}linear_attn.", x, kept, contract)
        else:
            mixed = _attention(config, w, f"{at}self_attn.", x)
        h = h + mixed
        x = _norm(h, w[f"{at}post_attention_layernorm.weight"], config)
        gate, up = x @ w[f"{at}mlp.gate_proj.weight"].T, x @ w[f"{at}mlp.up_proj.weight"].T
        h = h + (functional.silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T
    out = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    logits = _norm(h, w["model.norm.weight"], config) @ w[out].T
    return Float64Run({m: torch.stack(states) for m, states in kept.items()}, logits)


class _Weights:
    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].to("cpu", torch.float64)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def _norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return _rms(x, config.rms_eps) * (1 + weight)


def _gdn(
    c: ModelConfig, w: _Weights, at: str, x: Tensor, kept: dict[int, list[Tensor]], contract: Contract
) -> Tensor:  # fmt: skip
    n = len(x)
    qkv, z, b, a = (x @ w[f"{at}in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
    padded = functional.pad(qkv.T[None], (c.conv_width - 1, 0))
    mixed = functional.silu(functional.conv1d(padded, w[f"{at}conv1d.weight"], groups=qkv.shape[1]))[0].T
    q, k, v = torch.split(mixed, [c.hk * c.dk, c.hk * c.dk, c.hv * c.dv], 1)
    heads = c.dims.key_head(contract.head_map)
    q, k = (_unit(y.reshape(n, c.hk, c.dk))[:, heads] for y in (q, k))
    q, v = q * c.dk**-0.5, v.reshape(n, c.hv, c.dv)
    gate = -torch.exp(w[f"{at}A_log"]) * functional.softplus(a + w[f"{at}dt_bias"])
    decay, beta = torch.exp(gate), torch.sigmoid(b)
    state = torch.zeros(c.hv, c.dv, c.dk, dtype=torch.float64)
    rows = []
    for t in range(n):
        state = decay[t, :, None, None] * state
        u = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + u[:, :, None] * k[t, :, None]
        rows.append(torch.einsum("hvk,hk->hv", state, q[t]))
        if t + 1 in kept:
            kept[t + 1].append(state)
    normed = _rms(torch.stack(rows), c.rms_eps) * w[f"{at}norm.weight"] * functional.silu(z.reshape(n, c.hv, c.dv))
    return normed.flatten(1) @ w[f"{at}out_proj.weight"].T


def _unit(x: Tensor) -> Tensor:
    """`x / sqrt(|x|^2 + eps)` over the last dimension (contract section 2)."""
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def _rotate(x: Tensor, c: ModelConfig) -> Tensor:
    """Half-split RoPE of `[n, heads, dh]` at positions 0..n-1."""
    half = c.rotary_dim // 2
    exponent = torch.arange(half, dtype=torch.float64) * 2 / c.rotary_dim
    angle = torch.arange(len(x), dtype=torch.float64)[:, None] / c.rope_theta**exponent
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _attention(c: ModelConfig, w: _Weights, at: str, x: Tensor) -> Tensor:
    n = len(x)
    both = (x @ w[f"{at}q_proj.weight"].T).reshape(n, c.q_heads, 2, c.head_dim)
    q, gate = both[:, :, 0], both[:, :, 1]
    k = (x @ w[f"{at}k_proj.weight"].T).reshape(n, c.kv_heads, c.head_dim)
    v = (x @ w[f"{at}v_proj.weight"].T).reshape(n, c.kv_heads, c.head_dim)
    q = _rotate(_norm(q, w[f"{at}q_norm.weight"], c), c)
    k = _rotate(_norm(k, w[f"{at}k_norm.weight"], c), c)
    group = c.q_heads // c.kv_heads
    out = torch.empty_like(q)
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    for head in range(c.q_heads):  # one at a time: n x n scores of 2,000 tokens take 32 MB
        scores = (q[:, head] @ k[:, head // group].T) * c.head_dim**-0.5
        out[:, head] = torch.softmax(scores.masked_fill(future, -torch.inf), -1) @ v[:, head // group]
    return (out * torch.sigmoid(gate)).flatten(1) @ w[f"{at}o_proj.weight"].T
