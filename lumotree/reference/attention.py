"""One row of grouped-query attention with RoPE in native precision (contract section 4, `AttentionOps`)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, position: int, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of one row: bf16 `[heads, head_dim]` -> bf16.

    The first `2 * cos.shape[1]` channels rotate in half-split pairs, fp32, then rounded; the rest pass unchanged.
    cos, sin fp32 `[positions, rotary_dim / 2]`.
    """
    half = cos.shape[1]
    c, s = cos[position], sin[position]
    x1, x2 = x[:, :half].to(torch.float32), x[:, half : 2 * half].to(torch.float32)
    turned = torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=1).to(torch.bfloat16)
    return torch.cat([turned, x[:, 2 * half :]], dim=1)


def attend(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Softmax attention of one query row over gathered keys in position order.

    bf16 `q [Hq, dh]` rotated, `K, V [T, Hkv, dh]`. Scores, softmax and sum in fp32; output bf16 `[Hq, dh]`.
    Multiply-and-sum rather than matmul: its bits do not depend on the other rows (contract section 7).
    """
    query_heads, head_dim = q.shape
    group = query_heads // K.shape[1]
    keys = K.to(torch.float32).transpose(0, 1).repeat_interleave(group, 0)
    values = V.to(torch.float32).transpose(0, 1).repeat_interleave(group, 0)
    scores = (q.to(torch.float32)[:, None, :] * keys).sum(-1) * head_dim**-0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    probs = weights / weights.sum(-1, keepdim=True)
    return (probs[:, :, None] * values).sum(1).to(torch.bfloat16)


def attention_step(
    q: Tensor, k: Tensor, v: Tensor, K_prefix: Tensor, V_prefix: Tensor, position: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """One row over what precedes it (committed prefix, then ancestors, in position order) and itself.

    bf16 `q [Hq, dh]`, `k, v [Hkv, dh]` before RoPE; `K_prefix, V_prefix [T, Hkv, dh]`, keys rotated. Returns
    (output bf16 `[Hq, dh]`, rotated key bf16 `[Hkv, dh]`), the latter as it goes to the cache.
    """
    rotated = rotate(k, position, cos, sin)
    keys, values = torch.cat([K_prefix, rotated[None]]), torch.cat([V_prefix, v[None]])
    return attend(rotate(q, position, cos, sin), keys, values), rotated
