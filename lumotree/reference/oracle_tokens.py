"""Float64 oracles of the convolution and of attention over a tree, with derived bounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lumotree.backends.protocol import AttentionOps, ConvOps
from lumotree.contract import Contract
from lumotree.reference import bounds
from lumotree.reference.rounding import to_bf16, to_bf16_uncertain
from lumotree.tree import Tree


@dataclass(frozen=True)
class OracleOutputs:
    """Active rows `rows` of a tree (A of them), their float64 outputs `[A, ..]` and the bound of bf16 outputs."""

    rows: list[int]
    out: Tensor
    bound: Tensor


@dataclass(frozen=True)
class OracleAttention(OracleOutputs):
    """And the rotated keys that go to the cache: bf16 values in float64 `[A, Hkv, dh]`, and by how much a bf16 key may
    differ (zero where no rounding tie is in reach).
    """

    keys: Tensor
    keys_bound: Tensor


def _topology(tree: Tree) -> tuple[list[int], list[int]]:
    """Parents, and active rows."""
    return tree.parents.tolist(), np.flatnonzero(tree.active).tolist()


def _ancestry(parents: list[int], row: int) -> list[int]:
    """Rows from `row` up to the root."""
    chain = []
    while row >= 0:
        chain.append(row)
        row = parents[row]
    return chain


def conv_oracle(tree: Tree, history: Tensor, ops: ConvOps, contract: Contract) -> OracleOutputs:
    """Convolution and SiLU of the active rows, `[A, D]`. history: committed bf16 `[D, W-1]`, oldest first."""
    parents, rows = _topology(tree)
    width = ops.weight.shape[1]
    past = history.to(torch.float64).flip(1)
    x = {row: ops.x[row].to(torch.float64) for row in rows}
    newest_first = []
    for row in rows:
        line = [x[r] for r in _ancestry(parents, row)] + list(past.unbind(1))
        newest_first.append(torch.stack(line[:width], -1))
    products = torch.stack(newest_first) * ops.weight.to(torch.float64).flip(1)
    if contract.conv == "bf16_product":
        products = to_bf16(products)
    total, magnitude = products.sum(-1), products.abs().sum(-1)
    out = total * torch.sigmoid(total)
    return OracleOutputs(rows, out, bounds.conv_error(total, magnitude, width, out))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE of `[A, heads, dh]` rounded to bf16, and what a bf16 value may differ by. cos, sin `[A, rotary_dim / 2]`."""
    half = cos.shape[-1]
    turn = torch.complex(cos.to(torch.float64), sin.to(torch.float64))[:, None]
    x = x.to(torch.float64)
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.complex(first, second) * turn
    re, im = turn.real.abs(), turn.imag.abs()
    error = torch.cat(
        [
            bounds.rope_error(first.abs() * re, second.abs() * im),
            bounds.rope_error(second.abs() * re, first.abs() * im),
        ],
        -1,
    )
    rounded, spread = to_bf16_uncertain(torch.cat([turned.real, turned.imag], -1), error)
    rest = x[..., 2 * half :]
    return torch.cat([rounded, rest], -1), torch.cat([spread, torch.zeros_like(rest)], -1)


def _visible(parents: list[int], rows: list[int], prefix: int, device: torch.device) -> Tensor:
    """bool `[A, prefix + A]`: committed prefix, ancestors, self."""
    column = {row: prefix + i for i, row in enumerate(rows)}
    mask = torch.zeros((len(rows), prefix + len(rows)), dtype=torch.bool)
    mask[:, :prefix] = True
    for i, row in enumerate(rows):
        mask[i, [column[r] for r in _ancestry(parents, row)]] = True
    return mask.to(device)


def _per_query(x: Tensor, query_heads: int) -> Tensor:
    """`[T, Hkv, dh]` -> `[Hq, T, dh]`."""
    return x.transpose(0, 1).repeat_interleave(query_heads // x.shape[1], 0)


def attention_oracle(
    tree: Tree, ops: AttentionOps, K_prefix: Tensor, V_prefix: Tensor, probs: str = "fp32"
) -> OracleAttention:
    """Attention outputs of the active rows, `[A, Hq, dh]`, and their rotated keys.

    Positions are the tree's. K_prefix, V_prefix: committed bf16 `[P, Hkv, dh]` in position order, keys rotated.
    probs: as the contract declares; weights rounded to bf16 widen the bound by their half ulp.
    """
    parents, rows = _topology(tree)
    at = torch.as_tensor(tree.position[rows], device=ops.q.device)
    q, q_err = _rotated(ops.q[rows], ops.cos[at], ops.sin[at])
    k, k_err = _rotated(ops.k[rows], ops.cos[at], ops.sin[at])
    heads, scale = q.shape[1], q.shape[2] ** -0.5
    prefix = K_prefix.to(torch.float64)
    K = _per_query(torch.cat([prefix, k]), heads)
    K_err = _per_query(torch.cat([torch.zeros_like(prefix), k_err]), heads)
    V = _per_query(torch.cat([V_prefix.to(torch.float64), ops.v[rows].to(torch.float64)]), heads)
    hidden = ~_visible(parents, rows, len(prefix), q.device)[None]
    out, bound = _attend(q.transpose(0, 1), q_err.transpose(0, 1), K, K_err, V, hidden, scale, probs)
    return OracleAttention(rows, out.transpose(0, 1), bound.transpose(0, 1), k, k_err)


def _attend(
    q: Tensor, q_err: Tensor, K: Tensor, K_err: Tensor, V: Tensor, hidden: Tensor, scale: float, form: str
) -> tuple[Tensor, Tensor]:
    """Outputs and bounds, `[Hq, A, dh]`."""
    keys = int((~hidden).sum(-1).max())
    scores = (q @ K.mT * scale).masked_fill(hidden, -torch.inf)
    below = (scores.amax(-1, keepdim=True) - scores).masked_fill(hidden, 0.0)
    probs = torch.softmax(scores, -1)
    magnitude = (q.abs() + q_err) @ (K.abs() + K_err).mT
    moved = q.abs() @ K_err.mT + q_err @ (K.abs() + K_err).mT
    rho = bounds.softmax_error(bounds.score_error(magnitude, moved, scale, q.shape[-1]), below, keys)
    if form == "bf16":
        rho = rho + bounds.U_BF16 * (1 + rho)
    weighted_rho = probs * rho
    out = probs @ V
    error = bounds.attention_error(
        out, probs @ V.abs(), weighted_rho @ V.abs(), weighted_rho.sum(-1), keys, V.abs().max()
    )
    return out, error
