"""Faults of operands and parameters that a kernel makes alike in verification and in its one-token step.

The tree agrees with the chain in every bit, so that only the float64 oracle, or exact-grid inputs, can see them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from faults.catalogue import Fault, Knob, Wrap
from faults.wrap import everywhere
from lumotree.backends.protocol import Batch

Change = Callable[[Any, Batch], Any]


def field(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Change one operand."""
    return lambda ops, batch: replace(ops, **{name: change(getattr(ops, name)).contiguous()})


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _exchanged(one: str, two: str) -> Change:
    return lambda ops, batch: replace(ops, **{one: getattr(ops, two), two: getattr(ops, one)})


def _rolled(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.roll(1, dim)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _last_key_dim_zero(x: Tensor) -> Tensor:
    found = x.clone()
    found[..., -1] = 0
    return found


def _flat_heads(ops: Any, batch: Batch) -> Any:
    """Value heads in the order of a weight layout that interleaves key heads."""
    hv, hk = ops.v.shape[1], ops.k.shape[1]
    order = torch.arange(hv).view(hk, hv // hk).t().reshape(-1)
    return replace(ops, v=ops.v[:, order].contiguous())


def _every_second(x: Tensor) -> Tensor:
    """The tables of doubled positions: another base of the rotation."""
    count = len(x)
    return x[(2 * torch.arange(count, device=x.device)).clamp(max=count - 1)]


def _one_tap(x: Tensor) -> Tensor:
    found = x.clone()
    found[:, 0] = 0
    return found


_GDN: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Change]] = {
    "a_log_bf16": ("A_log is kept in bf16", ("N16",), ("prefix",), field("A_log", _bf16)),
    "dt_bias_bf16": ("dt_bias is kept in bf16", ("N16",), ("prefix",), field("dt_bias", _bf16)),
    "double_exp_a": ("A, already exp(A_log), is exponentiated again", ("N10",), ("prefix",),
                     field("A_log", torch.exp)),
    "a_missing": ("the decay of a head is not scaled by exp(A_log)", ("N10",), ("prefix",), field("A_log", _zeros)),
    "dt_bias_missing": ("dt_bias is not added", ("N5",), ("prefix",), field("dt_bias", _zeros)),
    "gates_exchanged": ("a and b are exchanged", ("N8",), (), _exchanged("a", "b")),
    "query_is_key": ("queries and keys are exchanged", ("DF32",), (), _exchanged("q", "k")),
    "key_heads_rolled": ("a value head reads the next key head", ("X5", "O3"), ("hk>=2",), field("k", _rolled(1))),
    "query_heads_rolled": ("a value head reads the next query head", ("X5", "O3"), ("hk>=2",), field("q", _rolled(1))),
    "value_heads_tiled": ("value heads come in the order of the other weight layout", ("X5",), ("hk>=2, hv>hk",),
                          _flat_heads),
    "gate_heads_rolled": ("a head decays by its neighbour's gate", ("O3", "N7"), ("hv>hk", "prefix"),
                          field("a", _rolled(1))),
    "key_tail_dropped": ("the last dim of every key is left out", ("B12", "O6"), (), field("k", _last_key_dim_zero)),
}  # fmt: skip
_CONV: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Change]] = {
    "taps_reversed": ("taps are applied newest first", ("B8",), (), field("weight", lambda w: w.flip(1))),
    "taps_shifted": ("each tap meets the neighbour's input", ("B13", "DF9"), (), field("weight", _rolled(1))),
    "oldest_tap_dropped": ("the oldest tap is left out", ("B4", "DF27"), (), field("weight", _one_tap)),
    "channels_shifted": ("a channel is convolved with its neighbour's taps", ("B5",), (), field("weight", _rolled(0))),
}  # fmt: skip
_ATTENTION: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Change]] = {
    "rotation_reversed": ("positions rotate the other way", ("DF13",), (), field("sin", torch.neg)),
    "rotation_exchanged": ("cos and sin are exchanged", ("DF13",), (), _exchanged("cos", "sin")),
    "rotation_base": ("positions rotate with another base", ("I2", "DF13"), (),
                      lambda ops, batch: replace(ops, cos=_every_second(ops.cos), sin=_every_second(ops.sin))),
    "rotation_bf16": ("the tables of the rotation are kept in bf16", ("N16", "DF14"), (),
                      lambda ops, batch: replace(ops, cos=_bf16(ops.cos), sin=_bf16(ops.sin))),
    "kv_heads_rolled": ("a query head reads the next KV head", ("O3", "X5"), ("kv heads>=2", "prefix"),
                        lambda ops, batch: replace(ops, q=ops.q.roll(1, 1).contiguous())),
}  # fmt: skip


def _fault(kind: str, surface: str, entry: tuple[str, tuple[str, ...], tuple[str, ...], Change]) -> Fault:
    statement, classes, needs, change = entry
    return Fault(f"{kind}.{surface}", statement, surface, "verify", classes, needs, everywhere(surface, change))


def _sized(kind: str, surface: str, what: str, classes: tuple[str, ...], unit: str, sizes: tuple[float, ...],
           change: Callable[[float], Change]) -> Fault:  # fmt: skip
    def at(size: float) -> Wrap:
        return everywhere(surface, change(size))

    return Fault(f"{kind}.{surface}", what, surface, "verify", classes, ("prefix",), at(sizes[0]),
                 knob=Knob(sizes, unit, at))  # fmt: skip


_SMALL = (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)

FAULTS = [
    *(_fault(kind, "gdn", entry) for kind, entry in _GDN.items()),
    *(_fault(kind, "conv", entry) for kind, entry in _CONV.items()),
    *(_fault(kind, "attention", entry) for kind, entry in _ATTENTION.items()),
    _sized("gate_shifted", "gdn", "dt_bias is too large by a constant", ("N16", "N5"), "added to dt_bias", _SMALL,
           lambda x: field("dt_bias", lambda t: t + x)),
    _sized("a_log_shifted", "gdn", "A_log is too large by a constant", ("N16", "N10"), "added to A_log", _SMALL,
           lambda x: field("A_log", lambda t: t + x)),
    _sized("angle_shifted", "attention", "every rotation is a small angle too far", ("DF13",), "radians", _SMALL,
           lambda x: lambda ops, batch: turned(ops, x)),
]  # fmt: skip


def turned(ops: Any, angle: float) -> Any:
    """The tables with a constant added to every angle."""
    c, s = torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))
    return replace(ops, cos=ops.cos * c - ops.sin * s, sin=ops.sin * c + ops.cos * s)
