"""Operands and initial states of a case: random regimes, adversarial ones, and exact-grid ones.

Exact-grid operands make every operation of the contract exact in fp32, so that any right kernel, whatever its order of
reduction, must return the same bits (contract section 7 has the facts this rests on).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lumotree.backends.protocol import AttentionOps, ConvOps, GdnOps
from lumotree.contract import Dims
from lumotree.errors import ContractError
from lumotree.tree import Tree

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Drawn:
    """What one layer of one case is made of, on the CPU; rows of all requests concatenated.

    recurrent fp32 `[B, HV, dv, dk]`, conv bf16 `[B, D, W-1]`, prefix_k (rotated) and prefix_v: one bf16
    `[prefix, Hkv, dh]` a request.
    """

    gdn: GdnOps
    conv: ConvOps
    attention: AttentionOps
    recurrent: Tensor
    conv_history: Tensor
    prefix_k: list[Tensor]
    prefix_v: list[Tensor]


class Source:
    """Seeded draws; the same entropy gives the same numbers on every machine."""

    def __init__(self, entropy: tuple[int, ...]) -> None:
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal, fp32."""
        return torch.randn(shape, generator=self._generator)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Uniform in [low, high), fp32."""
        return torch.rand(shape, generator=self._generator) * (high - low) + low

    def choice(self, values: tuple[float, ...], *shape: int) -> Tensor:
        """Independent uniform picks from `values`, fp32."""
        picks = torch.randint(len(values), shape, generator=self._generator)
        return torch.tensor(values)[picks]

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Uniform integers in [low, high), int64."""
        return torch.randint(low, high, shape, generator=self._generator)


def rope_tables(dims: Dims, positions: int, theta: float = 1e4) -> tuple[Tensor, Tensor]:
    """cos and sin fp32 `[positions, rotary_dim / 2]`, computed in float64 and rounded once."""
    half = dims.rotary_dim // 2
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * theta ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    return angle.cos().float(), angle.sin().float()


def _gates(s: Source, dims: Dims, rows: int, regime: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, b `[T, HV]` and A_log, dt_bias `[HV]` of a regime."""
    hv = dims.hv
    A_log = s.uniform(1, 16, hv).log()
    dt = torch.exp(s.uniform(math.log(1e-3), math.log(1e-1), hv))
    dt_bias = dt + torch.log(-torch.expm1(-dt))  # softplus(dt_bias) = dt, the usual initialisation
    a, b = s.normal(rows, hv), s.normal(rows, hv)
    if regime == "near_one":
        a = a - 12
    elif regime == "mid_gates":  # where softplus bends, with decays from 0.9 to 0.001
        a, A_log = a + 8, torch.linspace(-4.0, 0.5, hv)
    elif regime == "near_zero":
        a, A_log = a + 8, torch.full((hv,), math.log(16.0))
    elif regime == "large_gates":
        a, b = s.choice((-80.0, 80.0, 0.0), rows, hv), s.choice((-80.0, 80.0, 0.0), rows, hv)
        A_log = s.choice((-20.0, -4.0, 1.0, 4.0), hv)
        # exp(100) overflows fp32 although softplus(100) and the decay, 0.988, do not.
        A_log[0], A_log[-1] = 4.0, -9.0
        a[1::2, -1] = 100.0
    return a, b, A_log, dt_bias


def _key_scale(s: Source, regime: str, rows: int) -> Tensor:
    """Scale of each row's keys and queries, `[T, 1, 1]`."""
    if regime == "zero_keys":
        return s.choice((0.0, 1.0), rows, 1, 1)
    if regime == "tiny_keys":
        return s.choice((1e-8, 1e-4, 1.0), rows, 1, 1)
    return torch.ones(rows, 1, 1)


def _cool(dims: Dims, query: Tensor, keys: list[Tensor]) -> None:
    """Give one channel that does not rotate to queries and keys of opposite sign; all scores fall far below zero."""
    if dims.rotary_dim == dims.head_dim:
        raise ContractError(f"regime cold: expected rotary_dim < head_dim={dims.head_dim}, got all channels rotary")
    query[..., dims.rotary_dim] = -30.0
    for key in keys:
        key[..., dims.rotary_dim] = 30.0


def draw_random(s: Source, dims: Dims, trees: list[Tree], regime: str, positions: int) -> Drawn:
    """Dense random operands; inactive rows hold large values that must not matter."""
    rows, requests = sum(t.n for t in trees), len(trees)
    loud = torch.cat([torch.where(torch.as_tensor(t.active.copy()), 1.0, 300.0) for t in trees])[:, None]
    a, b, A_log, dt_bias = _gates(s, dims, rows, regime)
    scale = _key_scale(s, regime, rows)
    gdn = GdnOps(
        (s.normal(rows, dims.hk, dims.dk) * scale * loud[..., None]).to(BF16),
        (s.normal(rows, dims.hk, dims.dk) * scale * loud[..., None]).to(BF16),
        (s.normal(rows, dims.hv, dims.dv) * loud[..., None]).to(BF16),
        a.to(BF16),
        b.to(BF16),
        A_log,
        dt_bias,
    )
    conv = ConvOps(
        (s.normal(rows, dims.conv_channels) * loud).to(BF16),
        s.uniform(-0.6, 0.6, dims.conv_channels, dims.conv_width).to(BF16),
    )
    kv = (dims.kv_heads, dims.head_dim)
    query, key = s.normal(rows, dims.q_heads, dims.head_dim), s.normal(rows, *kv)
    value = s.normal(rows, *kv) * loud[..., None]
    history = s.normal(requests, dims.conv_channels, dims.conv_width - 1).to(BF16)
    state = s.normal(requests, dims.hv, dims.dv, dims.dk) * (8.0 if regime == "near_one" else 0.5)
    for i, tree in enumerate(trees):
        unseen = max(dims.conv_width - 1 - tree.prefix_len, 0)
        history[i, :, :unseen] = 0  # zeros before the start
        if tree.prefix_len == 0:
            state[i] = 0
    keys = [s.normal(t.prefix_len, *kv) for t in trees]
    prefix_v = [s.normal(t.prefix_len, *kv).to(BF16) for t in trees]
    if regime == "cold":
        _cool(dims, query, [key, *keys])
    attention = AttentionOps(query.to(BF16), key.to(BF16), value.to(BF16), *rope_tables(dims, positions))
    prefix_k = [k.to(BF16) for k in keys]
    return Drawn(gdn, conv, attention, state, history, prefix_k, prefix_v)


#: Rows up to this depth mix key channels and halve decay and beta, which costs at most 4 bits a row of the 24 that fp32
#: has; deeper rows use one-hot keys, decay 0 or 1 and beta 0 or 1, which cost none.
_MIXING_DEPTH = 3

#: Unit of every state of an exact-grid case: operands start at 4 and each mixing row divides by at most 16.
EXACT_STATE_UNIT = 4.0 * 2.0 ** (-4 * _MIXING_DEPTH)


def on_grid(value: Tensor, unit: float) -> Tensor:
    """The exact-grid value, a multiple of `unit`, that float64 approximates (it keeps the epsilon of the norm, 5e-10).

    Raises AssertionError when the value is not close to the grid or too large for 24 bits: the case is not exact.
    """
    snapped = torch.round(value / unit) * unit
    near, fits = (value - snapped).abs() <= unit / 64, snapped.abs() < unit * 2.0**24
    if not bool((near & fits).all()):  # a NaN is neither
        raise AssertionError("an exact-grid case left its grid")
    return snapped


def _sparse_unit(s: Source, rows: int, heads: int, width: int, nonzeros: int) -> Tensor:
    """Keys whose L2 norm is exactly a power of two: `nonzeros` (1, 4 or 16) equal magnitudes, norm 32.

    32^2 + 1e-6 rounds to 1024 in fp32, its root is exact, and the normalised entries are 1, 1/2 or 1/4.
    """
    picks = torch.stack([torch.randperm(width, generator=s._generator)[:nonzeros] for _ in range(rows * heads)])
    signs = s.choice((-1.0, 1.0), rows * heads, nonzeros)
    out = torch.zeros(rows * heads, width).scatter_(1, picks, signs * (32.0 / math.sqrt(nonzeros)))
    return out.view(rows, heads, width).to(BF16)


def draw_exact(s: Source, dims: Dims, trees: list[Tree], regime: str, positions: int) -> Drawn:
    """Operands whose every operation is exact in fp32 (outputs too, where dk and head_dim are powers of four).

    Decay is 0, 1/2 or 1 and beta 0, 1/2 or 1 by saturation or exact values; states are small dyadic numbers; SiLU is
    fed 0 or at least 256 in magnitude; one visible key beats all others by more than exp can represent.
    """
    if positions > 2 * (dims.head_dim - dims.rotary_dim):
        raise ContractError(
            f"exact-grid attention: expected at most {2 * (dims.head_dim - dims.rotary_dim)} positions for "
            f"head_dim={dims.head_dim}, rotary_dim={dims.rotary_dim}, got {positions}"
        )
    rows, hv = sum(t.n for t in trees), dims.hv
    early = torch.cat([torch.as_tensor(t.depth < _MIXING_DEPTH) for t in trees])[:, None]
    decay = torch.where(
        early, s.choice((-200.0, -200.0, 0.0, 200.0), rows, hv), s.choice((-200.0, -200.0, -200.0, 200.0), rows, hv)
    )
    beta = torch.where(early, s.choice((200.0, 200.0, 0.0, -200.0), rows, hv), s.choice((200.0, -200.0), rows, hv))
    mixing = _sparse_unit(s, rows, dims.hk, dims.dk, 4 if dims.dk >= 4 else 1)
    single = _sparse_unit(s, rows, dims.hk, dims.dk, 1)
    gdn = GdnOps(
        mixing if _power_of_four(dims.dk) else single,
        torch.where(early[..., None], mixing, single),
        (s.integers(-8, 9, rows, hv, dims.dv) * 4.0).to(BF16),
        decay.to(BF16),
        beta.to(BF16),
        torch.zeros(hv),
        torch.zeros(hv),
    )
    conv = ConvOps(
        (s.integers(-3, 4, rows, dims.conv_channels) * 256.0).to(BF16),
        s.choice((1.0, 2.0, -1.0, 4.0), dims.conv_channels, dims.conv_width).to(BF16),
    )
    history = (s.integers(-3, 4, len(trees), dims.conv_channels, dims.conv_width - 1) * 256.0).to(BF16)
    for i, tree in enumerate(trees):
        history[i, :, : max(dims.conv_width - 1 - tree.prefix_len, 0)] = 0
    state = s.integers(-8, 9, len(trees), hv, dims.dv, dims.dk) * 4.0
    attention, prefix_k, prefix_v = _exact_attention(s, dims, trees, positions)
    return Drawn(gdn, conv, attention, state, history, prefix_k, prefix_v)


def _power_of_four(n: int) -> bool:
    return n & (n - 1) == 0 and n.bit_length() % 2 == 1


def _quarter_turns(dims: Dims, positions: int) -> tuple[Tensor, Tensor]:
    """Rotation by a quarter turn a position: cos and sin are exactly 0, 1 or -1."""
    turn = torch.arange(positions) % 4
    cos, sin = torch.tensor([1.0, 0.0, -1.0, 0.0])[turn], torch.tensor([0.0, 1.0, 0.0, -1.0])[turn]
    half = dims.rotary_dim // 2
    return cos[:, None].repeat(1, half), sin[:, None].repeat(1, half)


def _exact_keys(dims: Dims, position: Tensor) -> Tensor:
    """Unrotated keys `[n, dh]` by position: positions 2i and 2i+1 share a one-hot, RoPE alone tells them apart."""
    free = dims.head_dim - dims.rotary_dim
    key = torch.zeros(len(position), dims.head_dim)
    key[:, 0] = 1.0
    key[torch.arange(len(position)), dims.rotary_dim + (position // 2) % free] = 1.0
    return key * _exact_scale(dims)


def _exact_scale(dims: Dims) -> float:
    """Power of two c with c^2 * head_dim^-1/2 >= 512, so that a score gap of one unit saturates exp."""
    return float(2 ** math.ceil(math.log2(math.sqrt(512.0 * math.sqrt(dims.head_dim)))))


def _exact_attention(
    s: Source, dims: Dims, trees: list[Tree], positions: int
) -> tuple[AttentionOps, list[Tensor], list[Tensor]]:
    """Each row looks for one visible position; siblings carry the same key and other values.

    The score is one unit for the shared one-hot plus cos(quarter turns between query and key), doubled: among the two
    positions that share a one-hot these differ by at least one unit, so a wrong position picks the wrong value and a
    visible sibling mixes two.
    """
    cos, sin = _quarter_turns(dims, positions)
    kv = (dims.kv_heads, dims.head_dim)
    position = torch.cat([torch.as_tensor(t.position.copy()) for t in trees]).long()
    free = dims.head_dim - dims.rotary_dim
    rows = len(position)
    target = torch.minimum((s.uniform(0, 1, rows) * (position + 1)).long(), position)
    query = torch.zeros(rows, dims.head_dim)
    query[torch.arange(rows), dims.rotary_dim + (target // 2) % free] = 4.0
    query[:, 0] = 1.0
    query = (query * _exact_scale(dims))[:, None].repeat(1, dims.q_heads, 1)
    key = _exact_keys(dims, position)[:, None].repeat(1, dims.kv_heads, 1)
    value = (s.integers(-64, 65, rows, *kv) * 2.0).to(BF16)
    prefix_k, prefix_v = [], []
    for t in trees:
        p = torch.arange(t.prefix_len)
        prefix_k.append(
            _rotate_exact(_exact_keys(dims, p), cos[p], sin[p])[:, None].repeat(1, dims.kv_heads, 1).to(BF16)
        )
        prefix_v.append((s.integers(-64, 65, t.prefix_len, *kv) * 2.0).to(BF16))
    return AttentionOps(query.to(BF16), key.to(BF16), value, cos, sin), prefix_k, prefix_v


def _rotate_exact(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of `[n, dh]`; exact for quarter turns."""
    half = cos.shape[-1]
    x1, x2, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], -1)


Draw = Callable[[Source, Dims, list[Tree], str, int], Drawn]

#: Regime -> how its operands are drawn.
REGIMES: dict[str, Draw] = {
    **dict.fromkeys(
        ("random", "near_one", "near_zero", "zero_keys", "tiny_keys", "large_gates", "mid_gates", "cold"), draw_random
    ),
    "exact": draw_exact,
}
