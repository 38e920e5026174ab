"""A small serving engine's memory: pools, pages, operands and metadata at fixed addresses, drawn from one seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.operands import Source, rope_tables
from lumotree.backends.protocol import SHARED_OPERANDS, AttentionOps, ConvOps, GdnOps, StepOps
from lumotree.contract import Dims

BF16 = torch.bfloat16

#: The smallest shape on which every dimension differs from its neighbour: K != V, HV = 2 HK, three taps.
DIMS_NANO = Dims(2, 4, 4, 3, 6, 2, 1, 4, 2, conv_width=3, name="nano")


@dataclass(frozen=True)
class World:
    """How much an engine has of everything; plain data that prints as the code that makes it.

    slots: state slots. requests: places of a batch, padding included. rows: candidate rows of one verification.
    tokens: most positions of a request, candidates included. seed: of parameters, states and operands; layout: of slots
    and pages. fresh: metadata and operands lie in new tensors at each step, not at the same addresses.
    """

    dims: Dims = DIMS_NANO
    seed: int = 0
    slots: int = 5
    requests: int = 4
    rows: int = 16
    tokens: int = 24
    page_size: int = 2
    layout: int = 0
    fresh: bool = False

    @property
    def pages(self) -> int:
        """Pages of one request."""
        return -(-self.tokens // self.page_size)

    @property
    def spare_pages(self) -> int:
        """Pages that no request owns, for candidates; one more than needed, so that one is never used."""
        return -(-self.rows // self.page_size) + 1

    @property
    def flat_slots(self) -> int:
        """Flat KV slots in all."""
        return (self.slots * self.pages + self.spare_pages) * self.page_size


@dataclass(frozen=True)
class Past:
    """What a prefix of P tokens left behind, all layers.

    recurrent fp32 `[L, HV, dv, dk]`, conv bf16 `[L, D, W-1]`, k (rotated) and v bf16 `[L, P, Hkv, dh]`.
    """

    recurrent: Tensor
    conv: Tensor
    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return int(self.k.shape[1])


class Draws:
    """Everything random of a world; equal streams give equal numbers, whatever else was drawn before."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.params = [self._parameters(layer) for layer in range(world.dims.layers)]

    def _source(self, *stream: int) -> Source:
        return Source((self.world.seed, 77, *stream))

    def pages(self) -> list[int]:
        """All pages, shuffled."""
        w = self.world
        count = w.slots * w.pages + w.spare_pages
        order: list[int] = np.random.default_rng([w.seed, 78, w.layout]).permutation(count).tolist()
        return order

    def _parameters(self, layer: int) -> StepOps:
        """Parameters and tables of a layer, per-row tensors left empty."""
        d, s = self.world.dims, self._source(0, layer)
        dt = torch.exp(s.uniform(-7.0, -2.3, d.hv))
        bias, A_log = dt + torch.log(-torch.expm1(-dt)), s.uniform(1, 16, d.hv).log()
        none = torch.zeros(0, dtype=BF16)
        weight = s.uniform(-0.6, 0.6, d.conv_channels, d.conv_width).to(BF16)
        cos, sin = rope_tables(d, self.world.tokens + 2, theta=100.0)
        return StepOps(
            GdnOps(none, none, none, none, none, A_log, bias),
            ConvOps(none, weight),
            AttentionOps(none, none, none, cos, sin),
        )

    def rows(self, count: int, *stream: int) -> list[StepOps]:
        """Operands of `count` rows, one StepOps a layer. A few gates are exactly shut or open, a few keys are zero."""
        return [self._rows(count, layer, stream) for layer in range(self.world.dims.layers)]

    def _rows(self, count: int, layer: int, stream: tuple[int, ...]) -> StepOps:
        d, s, shared = self.world.dims, self._source(1, layer, *stream), self.params[layer]
        assert shared.gdn is not None and shared.conv is not None and shared.attention is not None
        take = _Carver(s, count, d)
        a, b, k = take(d.hv), take(d.hv), take(d.hk, d.dk)
        for row, (x, y, z) in enumerate(s.uniform(0, 1, count, 3).tolist()):
            if x < 0.06 or x > 0.97:
                a[row] = -200.0 if x < 0.06 else 80.0
            if y < 0.04 or y > 0.92:
                b[row] = -200.0 if y < 0.04 else 200.0
            if z < 0.05:
                k[row] = 0.0
        gdn = replace(shared.gdn, q=take(d.hk, d.dk), k=k, v=take(d.hv, d.dv), a=a, b=b)
        conv = replace(shared.conv, x=take(d.conv_channels))
        q, key, value = take(d.q_heads, d.head_dim), take(d.kv_heads, d.head_dim), take(d.kv_heads, d.head_dim)
        attention = replace(shared.attention, q=q, k=key, v=value)
        return StepOps(gdn, conv, attention)

    def past(self, length: int, *stream: int) -> Past:
        """A random past of `length` tokens; of none, the zeros of a fresh request."""
        d, s = self.world.dims, self._source(2, *stream)
        recurrent = s.normal(d.layers, d.hv, d.dv, d.dk)
        conv = s.normal(d.layers, d.conv_channels, d.conv_width - 1).to(BF16)
        conv[..., : max(d.conv_width - 1 - length, 0)] = 0
        kv = (d.layers, length, d.kv_heads, d.head_dim)
        k, v = s.normal(*kv).to(BF16), s.normal(*kv).to(BF16)
        return Past(recurrent if length else torch.zeros_like(recurrent), conv, k, v)


class _Carver:
    """Normal numbers, bf16, out of one draw: a call of the generator costs more than what it draws here."""

    def __init__(self, source: Source, count: int, d: Dims) -> None:
        width = 2 * d.hv + 2 * d.hk * d.dk + d.hv * d.dv + d.conv_channels + (d.q_heads + 2 * d.kv_heads) * d.head_dim
        self._values, self._at = source.normal(count, width).to(BF16), 0

    def __call__(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        self._at += size
        return self._values[:, self._at - size : self._at].reshape(-1, *shape)


def with_rows(ops: Any, index: Any) -> Any:
    """Operands of some rows; parameters and tables stay. `ops`: a StepOps or one surface's operands."""
    if isinstance(ops, StepOps):
        return StepOps(*(None if part is None else with_rows(part, index) for part in vars(ops).values()))
    return replace(ops, **{k: v if k in SHARED_OPERANDS else v[index] for k, v in vars(ops).items()})


def joined(parts: list[Any]) -> Any:
    """Operands one behind the other; parameters and tables are the first one's."""
    first = parts[0]
    if isinstance(first, StepOps):
        return StepOps(*(joined([getattr(p, name) for p in parts]) for name in vars(first)))
    rows = {k: torch.cat([getattr(p, k) for p in parts]) for k in vars(first) if k not in SHARED_OPERANDS}
    return replace(first, **rows)


def operand_shape(world: World, surface: str, name: str, value: Tensor) -> tuple[int, ...]:
    """Shape of an operand of as many rows as the world has room for; that of `value` where all rows share it."""
    d = world.dims
    if name in SHARED_OPERANDS:
        return tuple(value.shape)
    if surface == "conv":
        return (world.rows, d.conv_channels)
    if surface == "attention":
        return (world.rows, d.q_heads if name == "q" else d.kv_heads, d.head_dim)
    return (world.rows, *{"q": (d.hk, d.dk), "k": (d.hk, d.dk), "v": (d.hv, d.dv)}.get(name, (d.hv,)))


def is_row(name: str) -> bool:
    """Whether a part of an engine's memory, such as "gdn[0].q", holds operands that differ by row."""
    return "]." in name and name.split(".")[-1] not in SHARED_OPERANDS
