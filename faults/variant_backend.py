"""Puts a variant's formulas in place of a built-in kernel's own, for the calls of chosen methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from faults import variant_math as formulas
from faults.catalogue import Wrap
from faults.variant import AttentionVariant, ConvVariant, GdnVariant, Variant
from faults.variant_math import Kit
from faults.wrap import Faulty
from lumotree.backends import torch_backend
from lumotree.backends.protocol import SURFACES, GdnOps
from lumotree.backends.reference import ReferenceBackend, RowMath
from lumotree.backends.torch_backend import TorchSteps
from lumotree.contract import Contract
from lumotree.reference import attention as reference_attention
from lumotree.reference import conv as reference_conv
from lumotree.reference import gdn as reference_gdn
from lumotree.verifier import attention, conv, gdn, workspace
from lumotree.verifier import step as steps
from lumotree.verifier.attend import Keys
from lumotree.verifier.step import Operands, halve, rowwise

TORCH = Kit(
    lambda x: halve(x.clone(), -1), lambda x: halve(x.clone(), -2), lambda x: 1.0 / torch.sqrt(x), rowwise, False
)
REFERENCE = Kit(
    lambda x: x.sum(-1),
    lambda x: x.transpose(-1, -2).contiguous().sum(-1),
    torch.rsqrt,
    lambda f, x: f(x),
    True,
)

#: Methods of a surface in which a kernel uses its formulas, by arm.
ARMS = {"verify": 0, "publish": 1}


def fits(backend: Any) -> bool:
    """Whether a backend's formulas are in reach: ours in torch, and the reference."""
    return isinstance(backend, TorchSteps | ReferenceBackend)


def variant(surface: str, change: Variant, arms: Sequence[str] = ("verify", "publish", "native")) -> Wrap:
    """A wrapper under which a built-in backend computes a surface by the variant's formulas in the given arms."""

    def wrap(inner: Any) -> Faulty:
        faulty = Faulty(inner)
        names = [SURFACES[surface][ARMS[a]] if a in ARMS else "native_step" for a in arms]
        for name in names:
            setattr(faulty, name, _under(faulty, name, surface, change))
        return faulty

    return wrap


def _under(faulty: Faulty, name: str, surface: str, change: Variant) -> Callable[..., Any]:
    inner = faulty.inner
    if isinstance(inner, ReferenceBackend):
        math = _reference_math(change, faulty)
        return getattr(ReferenceBackend(inner.contract, math), name)  # type: ignore[no-any-return]

    def method(*args: Any) -> None:
        with _swapped(_torch_places(change, faulty)):
            getattr(inner, name)(*args)

    return method


@contextmanager
def _swapped(places: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Other objects under the names of modules, for the time of one call."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, new in places:
            setattr(module, name, new)
        yield
    finally:
        for module, name, old in kept:
            setattr(module, name, old)


def _torch_places(change: Variant, faulty: Faulty) -> list[tuple[Any, str, Any]]:
    if isinstance(change, GdnVariant):
        prepare = _torch_prepare(change, faulty)
        return [
            (torch_backend, "prepare", prepare),
            (workspace, "prepare", prepare),
            (gdn, "step", _torch_step(change, faulty)),
        ]
    if isinstance(change, ConvVariant):
        return [(conv, "convolve", _torch_convolve(change, faulty))]
    return [(attention, "attend", _torch_attend(change, faulty)), (attention, "rope", _torch_rope(change, faulty))]


def _torch_prepare(v: GdnVariant, faulty: Faulty) -> Callable[..., Operands]:
    own = steps.prepare

    def prepare(ops: GdnOps, contract: Contract, *, query: bool = True) -> Operands:
        found = formulas.prepare(ops, contract, v, TORCH, query=query)
        faulty.note("gdn.operands", own(ops, contract, query=query), found)
        return found

    return prepare


def _torch_step(v: GdnVariant, faulty: Faulty) -> Callable[..., Tensor | None]:
    own = steps.step

    def step(state: Tensor, scratch: Tensor, x: Operands, reduce: Any, *, output: bool) -> Tensor | None:
        clean = state.clone()
        right = own(clean, scratch, x, reduce, output=output)
        right = None if right is None else right.clone()
        after, o = formulas.step(state, x, v, lambda tile: reduce(tile.clone()))
        state.copy_(after)
        faulty.note("gdn.step", (clean, right), (state, o if output else None))
        return o if output else None

    return step


def _torch_convolve(v: ConvVariant, faulty: Faulty) -> Callable[..., Tensor]:
    own = conv.convolve

    def convolve(window: Tensor, weight: Tensor, form: str) -> Tensor:
        found = formulas.convolve(window, weight, form, v, TORCH)
        faulty.note("conv.convolve", own(window, weight, form), found)
        return found

    return convolve


def _torch_attend(v: AttentionVariant, faulty: Faulty) -> Callable[..., Tensor]:
    own = attention.attend

    def one(q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        def dot(query: Tensor) -> Tensor:
            return torch.stack([halve(query[h].unsqueeze(-1) * k[h], 1).clone() for h in range(len(k))])

        def mix(weights: Tensor) -> Tensor:
            return torch.stack([halve(weights[h].unsqueeze(-1) * values[h], 1).clone() for h in range(len(values))])

        return formulas.attend(q, q.shape[1] // 2, len(k), v, dot, mix, lambda w: halve(w.clone(), -1))

    def attend(q: Tensor, keys: Keys) -> Tensor:
        found = torch.stack([one(query, *keys.of(row)) for row, query in enumerate(q)])
        faulty.note("attention.attend", own(q, keys), found)
        return found

    return attend


def _torch_rope(v: AttentionVariant, faulty: Faulty) -> Callable[..., Tensor]:
    own = attention.rope

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        found = formulas.rotated(x, cos, sin, v)
        faulty.note("attention.rotation", own(x, cos, sin), found)
        return found

    return rope


def _reference_math(change: Variant, faulty: Faulty) -> RowMath:
    if isinstance(change, GdnVariant):
        return RowMath(gdn_step=_reference_step(change, faulty))
    if isinstance(change, ConvVariant):
        return RowMath(conv_step=_reference_conv(change, faulty))
    return RowMath(attention_step=_reference_attention(change, faulty))


def _reference_step(v: GdnVariant, faulty: Faulty) -> Callable[[Tensor, GdnOps, Contract], tuple[Tensor, Tensor]]:
    def step(R: Tensor, row: GdnOps, contract: Contract) -> tuple[Tensor, Tensor]:
        one = GdnOps(row.q[None], row.k[None], row.v[None], row.a[None], row.b[None], row.A_log, row.dt_bias)
        x = formulas.prepare(one, contract, v, REFERENCE)
        after, o = formulas.step(R.transpose(-1, -2)[None], x, v, REFERENCE.rows)
        state = after[0].transpose(-1, -2).contiguous()
        found = reference_gdn.carried(state, contract), o[0].to(torch.bfloat16)
        faulty.note("gdn.step", reference_gdn.gdn_step(R, row, contract), found)
        return found

    return step


def _reference_conv(v: ConvVariant, faulty: Faulty) -> Callable[..., tuple[Tensor, Tensor]]:
    def step(history: Tensor, x: Tensor, weight: Tensor, contract: Contract) -> tuple[Tensor, Tensor]:
        window = torch.cat([history, x[:, None]], dim=1)
        out = formulas.convolve(window.t()[None], weight, contract.conv, v, REFERENCE)[0]
        faulty.note("conv.convolve", reference_conv.conv_step(history, x, weight, contract)[1], out)
        return window[:, 1:].contiguous(), out

    return step


def _reference_attention(v: AttentionVariant, faulty: Faulty) -> Callable[..., tuple[Tensor, Tensor]]:
    def step(
        q: Tensor, k: Tensor, v_: Tensor, K_prefix: Tensor, V_prefix: Tensor, position: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        c, s = cos[position][None], sin[position][None]
        key, query = formulas.rotated(k[None], c, s, v)[0], formulas.rotated(q[None], c, s, v)[0]
        K = torch.cat([K_prefix, key[None]]).to(torch.float32).transpose(0, 1)
        V = torch.cat([V_prefix, v_[None]]).to(torch.float32).transpose(0, 1)

        def dot(wide: Tensor) -> Tensor:
            return (
                (wide.flatten(0, 1)[:, None, :] * K.repeat_interleave(wide.shape[1], 0))
                .sum(-1)
                .view(*wide.shape[:2], -1)
            )

        def mix(weights: Tensor) -> Tensor:
            spread = V.repeat_interleave(weights.shape[1], 0)
            return (weights.flatten(0, 1)[:, :, None] * spread).sum(1).view(*weights.shape[:2], -1)

        found = formulas.attend(query, 2 * cos.shape[1], len(K), v, dot, mix, lambda w: w.sum(-1)), key
        right = reference_attention.attention_step(q, k, v_, K_prefix, V_prefix, position, cos, sin)
        faulty.note("attention.step", right, found)
        return found

    return step
