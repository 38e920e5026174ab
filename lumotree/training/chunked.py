"""The gated delta rule over whole sequences, chunk by chunk, so that it can be differentiated in reasonable time.

Same recurrence as contract section 2, re-associated: with G the cumulated log decay within a chunk and R the state
before it, the updates u of a chunk solve the unit lower triangular system

    u_t + beta_t sum_{s<t} exp(G_t - G_s) (k_s . k_t) u_s = beta_t (v_t - exp(G_t) R k_t)

(the WY form of Yang et al., "Gated Delta Networks", arXiv 2412.06464). Only the states at chunk borders are sequential.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64


def chunked_gdn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Outputs `[B, H, T, dv]` of the recurrence from a zero state, in the dtype of the operands (fp32 or wider).

    q, k: `[B, H, T, dk]`, normalised (q scaled), key heads already repeated; v: `[B, H, T, dv]`; g (log decay, <= 0),
    beta: `[B, H, T]`. chunk: a power of two. T need not be a multiple of it.
    """
    length = q.shape[2]
    q, k, v, g, beta = (_split(x, chunk) for x in (q, k, v, g, beta))
    total = g.cumsum(-1)  # [B, H, C, chunk]
    inside = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~inside, -torch.inf).exp()
    lower = (beta[..., None] * decay * (k @ k.mT)).tril(-1)
    inverse = unit_lower_inverse(lower)
    u_free = inverse @ (beta[..., None] * v)
    w = inverse @ ((beta * total.exp())[..., None] * k)
    u, states = _border_states(u_free, w, k * (total[..., -1:] - total).exp()[..., None], total[..., -1].exp())
    out = (q * total.exp()[..., None]) @ states + (decay * (q @ k.mT)) @ u
    return out.flatten(2, 3)[:, :, :length]


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Inverse of I + `lower`, strictly lower triangular `[.., n, n]`, n a power of two.

    By halves: [[A, 0], [L, D]] has the inverse [[A', 0], [-D' L A', D']]. A sum of powers of `lower` would be cheaper
    and useless: its terms grow like binomials before they cancel.
    """
    n = lower.shape[-1]
    blocks = lower.new_ones(*lower.shape[:-2], n, 1, 1)
    size = 1
    while size < n:
        count = n // (2 * size)
        pairs = lower.reshape(*lower.shape[:-2], count, 2 * size, count, 2 * size)
        off = pairs.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., size:, :size]
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        corner = -(second @ off @ first)
        top = torch.cat([first, torch.zeros_like(first)], -1)
        blocks = torch.cat([top, torch.cat([corner, second], -1)], -2)
        size *= 2
    return blocks[..., 0, :, :]


def _split(x: Tensor, chunk: int) -> Tensor:
    """`[B, H, T, ..]` -> `[B, H, C, chunk, ..]`, zeros behind the end: they change no state (beta 0, decay 1)."""
    missing = -x.shape[2] % chunk
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])], 2)
    return x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])


def _border_states(u_free: Tensor, w: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Updates `[B, H, C, chunk, dv]` and the state before each chunk `[B, H, C, dk, dv]`.

    u_free: updates from a zero state; w `[.., chunk, dk]`: what the state takes off them; k: keys decayed to the end of
    their chunk; decay `[B, H, C]`: of whole chunks.
    """
    batch, heads, chunks, _, dv = u_free.shape
    state = u_free.new_zeros(batch * heads, w.shape[-1], dv)
    free, taken, keys = (x.transpose(1, 2).transpose(0, 1).flatten(1, 2) for x in (u_free, w, k.mT))
    fade = decay.permute(2, 0, 1).flatten(1)[..., None, None]
    updates, states = [], []
    for c in range(chunks):
        states.append(state)
        updates.append(torch.baddbmm(free[c], taken[c], state, alpha=-1))
        state = torch.baddbmm(state * fade[c], keys[c], updates[-1])
    u, before = (torch.stack(x, 1).view(batch, heads, chunks, *x[0].shape[1:]) for x in (updates, states))
    return u, before
