"""Derived bounds of convolution and attention: correct fp32 implementations stay inside, real defects leave."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lumotree.backends.protocol import AttentionOps, ConvOps
from lumotree.contract import Contract
from lumotree.reference.attention import attend, attention_step, rotate
from lumotree.reference.conv import conv_step
from lumotree.reference.oracle_tokens import OracleOutputs, attention_oracle, conv_oracle
from lumotree.tree import Tree

PREFIX = 40
TREE = Tree.make([-1, 0, 0, 1, 1, 3, 4, 6], active=[True, True, False] + [True] * 5, prefix_len=PREFIX)


def _ratio(out: Tensor, truth: OracleOutputs, i: int) -> float:
    assert truth.bound.isfinite().all()
    return float(((out.double() - truth.out[i]).abs() / truth.bound[i]).nan_to_num(torch.inf).max())


# Convolution


def _conv_inputs(kind: str) -> tuple[Tensor, ConvOps]:
    g = torch.Generator().manual_seed(3)
    history, x, weight = (torch.randn(s, generator=g) for s in ((64, 3), (TREE.n, 64), (64, 4)))
    if kind == "large":
        x, history = x * 60, history * 60
    elif kind == "cancelling":
        weight, x = weight.abs() * 10, x.abs()
        history[:, :] = -history.abs()
    elif kind == "subnormal":
        x, history = x * 1e-38, history * 1e-38
    x[2] = torch.nan
    return history.bfloat16(), ConvOps(x.bfloat16(), weight.bfloat16())


def _walk_conv(kind: str, contract: Contract, step: Callable[..., tuple[Tensor, Tensor]]) -> float:
    history, ops = _conv_inputs(kind)
    truth = conv_oracle(TREE, history, ops, contract)
    histories, worst = {-1: history}, 0.0
    for i, row in enumerate(truth.rows):
        histories[row], out = step(histories[int(TREE.parents[row])], ops.x[row], ops.weight, contract)
        worst = max(worst, _ratio(out, truth, i))
    return worst


def _other_conv(taps: Callable[[Tensor], Tensor], order: int = 1) -> Callable[..., tuple[Tensor, Tensor]]:
    """conv_step with changed taps, summed oldest (1) or newest (-1) first, sigmoid by exp2."""

    def step(history: Tensor, x: Tensor, weight: Tensor, contract: Contract) -> tuple[Tensor, Tensor]:
        window = torch.cat([history, x[:, None]], 1)
        products = window.float() * taps(weight.float())
        total = torch.zeros(len(x))
        for tap in list(range(4))[::order]:
            total = total + products[:, tap]
        return window[:, 1:], (total * (1 / (1 + torch.exp2(-total * 1.4426950408889634)))).bfloat16()

    return step


@pytest.mark.parametrize("kind", ["random", "large", "cancelling", "subnormal"])
def test_correct_convolutions_stay_inside(kind: str) -> None:
    for contract in (Contract(), Contract(conv="bf16_product")):
        assert _walk_conv(kind, contract, conv_step) <= 1
    assert _walk_conv(kind, Contract(), _other_conv(lambda w: w, order=-1)) <= 1


def _without_last(weight: Tensor) -> Tensor:
    return torch.cat([weight[:, :3], torch.zeros_like(weight[:, 3:])], 1)


@pytest.mark.parametrize("taps", [_without_last, lambda w: w.flip(1), lambda w: w.roll(1, 1)])
def test_wrong_taps_leave_the_bound(taps: Callable[[Tensor], Tensor]) -> None:
    assert _walk_conv("random", Contract(), _other_conv(lambda w: w)) <= 1
    assert _walk_conv("random", Contract(), _other_conv(taps)) > 20


def test_undeclared_product_rounding_leaves_the_bound() -> None:
    def lies(history: Tensor, x: Tensor, weight: Tensor, contract: Contract) -> tuple[Tensor, Tensor]:
        return conv_step(history, x, weight, Contract(conv="bf16_product"))

    assert _walk_conv("cancelling", Contract(), lies) > 1.5


def test_a_siblings_input_leaves_the_bound() -> None:
    history, ops = _conv_inputs("random")
    truth = conv_oracle(TREE, history, ops, Contract())
    histories = {-1: history}
    for row in truth.rows:
        histories[row], _ = conv_step(histories[int(TREE.parents[row])], ops.x[row], ops.weight, Contract())
    _, out = conv_step(histories[3], ops.x[4], ops.weight, Contract())
    assert _ratio(out, truth, truth.rows.index(4)) > 20


# Attention


def _attention_inputs(kind: str = "random") -> tuple[AttentionOps, Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    angle = torch.arange(64)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    q, k, v = normal(TREE.n, 4, 24), normal(TREE.n, 2, 24), normal(TREE.n, 2, 24)
    K, V = normal(PREFIX, 2, 24), normal(PREFIX, 2, 24)
    if kind == "sharp":
        q, k, K = q * 8, k * 8, K * 8
    elif kind == "flat":
        q, V, v = q * 1e-3, V.abs() * 100, v.abs() * 100
    elif kind == "cancelling":
        V[::2] = -V[1::2] * 1e3
    for x in (q, k, v):
        x[2] = torch.nan
    ops = AttentionOps(q.bfloat16(), k.bfloat16(), v.bfloat16(), angle.cos(), angle.sin())
    return ops, K.bfloat16(), V.bfloat16()


def _walk_attention(
    kind: str,
    look: Callable[[Tensor, Tensor, Tensor], Tensor] = attend,
    shift: int = 0,
    extra: dict[int, list[int]] | None = None,
) -> tuple[float, float]:
    """Worst ratio of (outputs, rotated keys). shift: added to positions; extra: rows made visible to a row."""
    ops, K, V = _attention_inputs(kind)
    truth = attention_oracle(TREE, ops, K, V)
    keys: dict[int, Tensor] = {}
    worst_out = worst_key = 0.0
    for i, row in enumerate(truth.rows):
        position = int(TREE.position[row]) + shift
        keys[row] = rotate(ops.k[row], position, ops.cos, ops.sin)
        seen = [*TREE.path(row)[:-1], *(extra or {}).get(row, []), row]
        query = rotate(ops.q[row], position, ops.cos, ops.sin)
        out = look(query, torch.cat([K, torch.stack([keys[r] for r in seen])]), torch.cat([V, ops.v[seen]]))
        worst_out = max(worst_out, _ratio(out, truth, i))
        off = (keys[row].double() - truth.keys[i]).abs()
        worst_key = max(worst_key, float((off / truth.keys_bound[i]).nan_to_num(0.0, torch.inf).max()))
    return worst_out, worst_key


def _online(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Online softmax in blocks of 16 keys, newest block first, exp2."""
    keys, values = (x.float().repeat_interleave(2, 1) for x in (K, V))
    top, mass, total = torch.full((4, 1), -torch.inf), torch.zeros(4, 1), torch.zeros(4, 24)
    for lo in reversed(range(0, len(K), 16)):
        scores = torch.einsum("hd,thd->ht", q.float(), keys[lo : lo + 16]) * (24**-0.5 * 1.4426950408889634)
        new = torch.maximum(top, scores.amax(1, keepdim=True))
        weights, shrink = torch.exp2(scores - new), torch.exp2(top - new)
        mass = mass * shrink + weights.sum(1, keepdim=True)
        total = total * shrink + torch.einsum("ht,thd->hd", weights, values[lo : lo + 16])
        top = new
    return (total / mass).bfloat16()


@pytest.mark.parametrize("kind", ["random", "sharp", "flat", "cancelling"])
@pytest.mark.parametrize("look", [attend, _online])
def test_correct_attention_stays_inside(kind: str, look: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    out, key = _walk_attention(kind, look)
    assert out <= 1 and key <= 1, (out, key)


def test_attention_defects_leave_the_bound() -> None:
    assert _walk_attention("random")[0] <= 1
    out, key = _walk_attention("random", shift=1)
    assert key > 1 and out > 4
    out, key = _walk_attention("random", extra={4: [3]})
    assert key <= 1 and out > 4
    unscaled, _ = _walk_attention("random", lambda q, K, V: attend((q.float() * 24**0.5).bfloat16(), K, V))
    assert unscaled > 4


def test_attention_oracle_agrees_with_extended_precision() -> None:
    ops, K, V = _attention_inputs()
    truth = attention_oracle(TREE, ops, K, V)
    wide = np.longdouble
    for i, row in enumerate(truth.rows):
        path = TREE.path(row)
        step = [attention_step(ops.q[r], ops.k[r], ops.v[r], K, V, PREFIX + d, ops.cos, ops.sin)[1]
                for d, r in enumerate(path)]  # fmt: skip
        keys = torch.cat([K, torch.stack(step)]).float().numpy().astype(wide)
        values = torch.cat([V, ops.v[list(path)]]).float().numpy().astype(wide)
        query = rotate(ops.q[row], PREFIX + len(path) - 1, ops.cos, ops.sin).float().numpy().astype(wide)
        for h in range(4):
            weights = np.exp(keys[:, h // 2] @ query[h] / np.sqrt(wide(24)))
            want = (weights[:, None] * values[:, h // 2]).sum(0) / weights.sum()
            np.testing.assert_allclose(truth.out[i, h].numpy(), want.astype(float), rtol=1e-10, atol=1e-12)


def test_bounds_of_outputs_are_little_more_than_half_a_bf16_ulp() -> None:
    ops, K, V = _attention_inputs()
    truth = attention_oracle(TREE, ops, K, V)
    assert (truth.bound / truth.out.abs().amax(-1, keepdim=True)).median() < 2.0**-8
    history, conv = _conv_inputs("random")
    truth_conv = conv_oracle(TREE, history, conv, Contract())
    assert (truth_conv.bound / truth_conv.out.abs()).median() < 2.0**-8


def flash_with_bf16_weights(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """One row as flash kernels do it: unnormalised weights rounded to bf16 in front of the values, fp32 sums."""
    group = q.shape[0] // K.shape[1]
    keys, values = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (K, V))
    scores = (q.float()[:, None] * keys).sum(-1) * q.shape[-1] ** -0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = (weights.bfloat16().float()[..., None] * values).sum(1)
    return (total / weights.sum(-1, keepdim=True)).bfloat16()


def test_bf16_weights_need_to_be_declared() -> None:
    gen = torch.Generator().manual_seed(5)
    tree = Tree.make([-1], prefix_len=60)
    draw = lambda *shape: torch.randn(shape, generator=gen).bfloat16()  # noqa: E731
    ops = AttentionOps(draw(1, 8, 32), draw(1, 2, 32), draw(1, 2, 32), torch.ones(64, 4), torch.zeros(64, 4))
    K, V = draw(60, 2, 32), draw(60, 2, 32)
    got = flash_with_bf16_weights(ops.q[0], torch.cat([K, ops.k]), torch.cat([V, ops.v])).double()
    undeclared, declared = (attention_oracle(tree, ops, K, V, probs) for probs in ("fp32", "bf16"))
    assert ((got - undeclared.out[0]).abs() / undeclared.bound[0]).max() > 1
    assert ((got - declared.out[0]).abs() / declared.bound[0]).max() <= 1
