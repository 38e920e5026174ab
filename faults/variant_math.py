"""The contract's formulas with one place wrong, spelled in the primitives of the kernel that they stand in for.

With the default variant the bits are those of the kernel itself (tested), so that a fault is nothing but its field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from faults.variant import AttentionVariant, ConvVariant, GdnVariant
from lumotree.backends.protocol import GdnOps
from lumotree.contract import Contract
from lumotree.verifier.step import Operands


@dataclass(frozen=True)
class Kit:
    """A kernel's own primitives.

    total: sum over the last dim. rows: sum over the second-last dim. rsqrt. each: apply a function to a tensor, in the
    kernel's way. from_zero: whether a sum of taps starts from zero.
    """

    total: Callable[[Tensor], Tensor]
    rows: Callable[[Tensor], Tensor]
    rsqrt: Callable[[Tensor], Tensor]
    each: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    from_zero: bool


def bf16(x: Tensor) -> Tensor:
    """fp32 values rounded to bf16."""
    return x.to(torch.bfloat16).to(torch.float32)


def cut(x: Tensor) -> Tensor:
    """fp32 values with the bits cut off that bf16 does not have."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def kept_bits(x: Tensor, bits: int) -> Tensor:
    """fp32 values rounded (half up in magnitude) to `bits` bits of mantissa."""
    drop = 23 - bits
    return x if not drop else ((x.view(torch.int32) + (1 << (drop - 1))) & -(1 << drop)).view(torch.float32)


def unit(x: Tensor, contract: Contract, v: GdnVariant, kit: Kit) -> Tensor:
    """L2-normalised fp32 `x [T, H, dk]`."""
    inside = v.eps if v.eps_at == "sum" else 0.0
    whole = x.shape[-1] // v.norm_tile * v.norm_tile if v.norm_tile else 0
    counted = x[..., :whole] if whole else x
    squares = kit.total(counted * counted) + inside
    if v.eps_at != "sum":
        root = torch.sqrt(squares)
        root = root + v.eps if v.eps_at == "root" else root.clamp_min(v.eps)
        return x / root.unsqueeze(-1)
    if contract.norm == "sqrt":
        return x / torch.sqrt(squares).unsqueeze(-1)
    found = x * kit.rsqrt(squares).unsqueeze(-1)
    return bf16(found) if contract.norm == "bf16" else found


def softplus(x: Tensor, contract: Contract, v: GdnVariant, kit: Kit) -> Tensor:
    """fp32 softplus of `x [T, HV]`."""
    if v.softplus in ("none", "relu"):
        return x if v.softplus == "none" else x.clamp_min(0)
    e = kit.each(torch.exp, x)
    curved = kit.each(torch.log1p, e) if contract.softplus == "log1p" else kit.each(torch.log, 1.0 + e)
    if v.softplus == "unbounded":
        return curved
    return torch.where(x > v.linear_above, x, curved)


def decay_of(g: Tensor, v: GdnVariant, kit: Kit) -> Tensor:
    """exp(g), or what stands in for it."""
    if v.decay == "none":
        return torch.ones_like(g)
    if v.decay == "linear":
        return 1.0 + g
    if v.decay == "factored":
        return 1.0 / kit.each(torch.exp, -g) * kit.each(torch.exp, -g) * kit.each(torch.exp, g)
    scaled = {"twice": 2.0 * g, "exp2": g * 0.6931471805599453, "clamped": g.clamp_min(-5.0)}.get(v.decay, g)
    found = kit.each(torch.exp, scaled)
    if v.decay == "flushed":
        return torch.where(found < 0.05, torch.zeros_like(found), found)
    if v.decay == "zero_corner":
        return torch.where(found == 1, torch.zeros_like(found), found)
    return bf16(found) if v.decay == "bf16" else found


def beta_of(b: Tensor, contract: Contract, v: GdnVariant, kit: Kit) -> Tensor:
    """sigmoid(b), or what stands in for it."""
    if v.beta in ("none", "raw"):
        return torch.ones_like(b) if v.beta == "none" else b
    beta = 1.0 / (1.0 + kit.each(torch.exp, -b))
    if contract.beta == "bf16" or v.beta == "bf16":
        beta = bf16(beta)
    return {"twice": beta * beta, "doubled": 2.0 * beta}.get(v.beta, beta)


def prepare(ops: GdnOps, contract: Contract, v: GdnVariant, kit: Kit, *, query: bool = True) -> Operands:
    """Norms and gates of T rows, key heads spread to value heads."""
    hk, hv, dk = ops.k.shape[1], ops.v.shape[1], ops.k.shape[2]
    grouped = (contract.head_map == "grouped") != v.other_map
    spread = torch.arange(hv, device=ops.k.device)
    spread = spread // (hv // hk) if grouped else spread % hk
    k = ops.k.to(torch.float32)
    k = (unit(k, contract, v, kit) if v.unit_k else k)[:, spread]
    q = k
    if query:
        q = ops.q.to(torch.float32)
        q = ((unit(q, contract, v, kit) if v.unit_q else q) * dk**v.scale)[:, spread]
    x = ops.a.to(torch.float32) + ops.dt_bias
    x = bf16(x) if v.gate_bf16 else x
    g = -torch.exp(ops.A_log.contiguous()) * softplus(x, contract, v, kit)
    beta = beta_of(ops.b.to(torch.float32), contract, v, kit)
    return Operands(q, bf16(k) if v.keys_bf16 else k, ops.v.to(torch.float32), decay_of(g, v, kit), beta)


def step(state: Tensor, x: Operands, v: GdnVariant, reduce: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """One token for each path: state after it and output before rounding. state fp32 `[P, h, dk, dv]`, not changed."""
    k, decay = x.k.unsqueeze(-1), x.decay[..., None, None]
    decayed = state * decay
    base = {"decayed": decayed, "before": state}.get(v.error)
    seen = torch.zeros_like(x.v) if base is None else reduce(base * k)
    beta = x.beta.unsqueeze(-1)
    u = x.v * beta - seen if v.beta_on == "value" else (x.v - seen) * beta
    if v.u_bf16:
        u = bf16(u)
    if v.tail:
        u = torch.cat([u[..., : -v.tail], torch.zeros_like(u[..., -v.tail :])], -1)
    write = k * u.unsqueeze(-2)
    after = (state + write) * decay if v.decay_at == "last" else decayed + write
    after = kept_bits(after, v.state_bits)
    if v.half:
        after = after.to(torch.float16).to(torch.float32)
    source = {"after": after, "before": state, "decayed": decayed}[v.read]
    out = reduce(source * x.q.unsqueeze(-1))
    return after, cut(out) if v.truncated else out


def activate(x: Tensor, v: ConvVariant, kit: Kit) -> Tensor:
    """The activation of fp32 `x [T, D]`."""
    if v.act in ("none", "inputs"):
        return x
    if v.act == "gelu":
        return torch.nn.functional.gelu(x)
    gate = 1.0 + kit.each(torch.exp, -x)
    if v.act == "sigmoid":
        return 1.0 / gate
    once = x / gate
    return once / (1.0 + kit.each(torch.exp, -once)) if v.act == "twice" else once


def convolve(window: Tensor, weight: Tensor, form: str, v: ConvVariant, kit: Kit) -> Tensor:
    """bf16 `[rows, D]` of `window [rows, W, D]` and `weight [D, W]`."""
    taps = weight.to(torch.float32).t().contiguous()
    wide = window.to(torch.float32)
    if v.act == "inputs":
        wide = activate(wide.flatten(0, 1), ConvVariant(), kit).view(wide.shape)
    count = len(taps) if v.last else len(taps) - 1
    products = [wide[:, j] * taps[j] for j in range(count)]
    if form == "bf16_product":
        products = [bf16(p) for p in products]
    total = torch.zeros_like(products[0]) + products[0] if kit.from_zero else products[0]
    for product in products[1:]:
        total = bf16(total + product) if v.sums == "bf16" else total + product
    return activate(total + v.bias if v.bias else total, v, kit).to(torch.bfloat16)


def attend(
    q: Tensor, rotary: int, kv_heads: int, v: AttentionVariant,
    dot: Callable[[Tensor], Tensor], mix: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """bf16 `[Hq, dh]` of one row: q rotated `[Hq, dh]`; `dot` gives scores fp32 `[Hkv, group, n]` of a query spread
    like them `[Hkv, group, dh]`, `mix` weighs the values, `total` sums over keys."""
    heads, dim = q.shape
    group = heads // kv_heads
    query = q.to(torch.float32)
    query = query.view(group, kv_heads, dim).transpose(0, 1) if v.other_map else query.view(kv_heads, group, dim)
    factor = {"head_dim": dim**-0.5, "none": 1.0, "rotary": rotary**-0.5, "twice": dim**-1.0}[v.scale]
    scores = dot(query.contiguous()) * factor
    if v.cap:
        scores = v.cap * torch.tanh(scores / v.cap)
    count = scores.shape[-1]
    visible = torch.ones(count, dtype=torch.bool, device=q.device)
    visible[-1] = v.own or count == 1
    if v.window:
        visible[: max(count - v.window, 0)] = False
    if not bool(visible.all()):
        scores = scores.masked_fill(~visible, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    shifted = scores - (top.clamp_min(0) if v.from_zero else top) if v.shift else scores
    weights = torch.exp2(shifted) if v.base2 else torch.exp(shifted)
    weights = averaged(weights, v.parts) if v.parts else weights / (total(weights) + float(v.sink)).unsqueeze(-1)
    out = mix(bf16(weights) if v.probs_bf16 else weights)
    out = cut(out) if v.truncated else out
    return (out.transpose(0, 1) if v.other_map else out).reshape(heads, dim).to(torch.bfloat16)


def averaged(weights: Tensor, size: int) -> Tensor:
    """Weights `[.., n]` normalised in parts of `size` keys, every part counting the same."""
    parts = torch.split(weights, size, -1)
    return torch.cat([p / p.sum(-1, keepdim=True) for p in parts], -1) / len(parts)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, v: AttentionVariant) -> Tensor:
    """Rotated bf16 `x [T, H, dh]`; cos, sin `[T, rotary / 2]`."""
    half = cos.shape[-1]
    if v.rotation == "none":
        return x
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    if v.rotation == "half":
        low, high = x[..., :half].to(torch.float32), x[..., half : 2 * half].to(torch.float32)
        turned = torch.cat([low * c - high * s, high * c + low * s], dim=-1)
    elif v.rotation == "head":
        return turned_across(x, c, s)
    else:
        low, high = x[..., 0 : 2 * half : 2].to(torch.float32), x[..., 1 : 2 * half : 2].to(torch.float32)
        turned = torch.stack([low * c - high * s, high * c + low * s], dim=-1).flatten(-2)
    return torch.cat([turned.to(torch.bfloat16), x[..., 2 * half :]], dim=-1)


def turned_across(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """`x [T, H, dh]` in which channel i rotates with channel i + dh / 2."""
    half, far = c.shape[-1], x.shape[-1] // 2
    found = x.clone()
    low, high = x[..., :half].to(torch.float32), x[..., far : far + half].to(torch.float32)
    found[..., :half] = (low * c - high * s).to(torch.bfloat16)
    found[..., far : far + half] = (high * c + low * s).to(torch.bfloat16)
    return found
