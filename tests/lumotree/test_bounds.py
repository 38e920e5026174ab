"""The derived bound of the recurrence: correct fp32 implementations stay inside it, real defects leave it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lumotree.backends.protocol import GdnOps
from lumotree.contract import Contract, Dims
from lumotree.reference.gdn import gdn_row, gdn_step
from lumotree.reference.oracle import OracleRow, gdn_oracle, published
from lumotree.tree import Tree

DIMS = Dims(2, 6, 128, 16, 36, 4, 2, 24, 8)
TREE = Tree.make([-1, 0, 0, 1, 1, 3, 4, 5, 7], active=[True, True, False] + [True] * 6)


@dataclass(frozen=True)
class Fp32:
    """Another fp32 implementation: how it reduces and normalises, what is wrong with it."""

    reduce: str = "sum"
    norm: str = "rsqrt"
    fast: bool = False
    late_decay: bool = False
    defect: str = ""

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        product = x * y
        if self.reduce == "reversed":
            total = torch.zeros_like(product[..., 0])
            for j in reversed(range(product.shape[-1])):
                total = total + product[..., j]
            return total
        if self.reduce == "split":
            return torch.stack([part.sum(-1) for part in product.split(48, -1)]).flip(0).cumsum(0)[-1]
        if self.reduce == "KV":
            return product.transpose(-1, -2).contiguous().sum(-2)
        return product.sum(-1)

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp2(x * 1.4426950408889634) if self.fast else torch.exp(x)

    def unit(self, x: Tensor) -> Tensor:
        if self.defect == "k not normalised":
            return x
        squares = self.dot(x, x)[..., None] + (0.0 if self.defect == "no epsilon" else 1e-6)
        if self.norm == "sqrt":
            return x / torch.sqrt(squares)
        root = torch.rsqrt(squares)
        return x * (root * (1 + 2.0**-22) if self.fast else root)

    def step(self, R: Tensor, row: GdnOps) -> tuple[Tensor, Tensor]:
        group = DIMS.hv // DIMS.hk
        heads = [h % DIMS.hk if self.defect == "wrong key head" else h // group for h in range(DIMS.hv)]
        k = self.unit(row.k.float())[heads][:, None]
        scale = 1.0 if self.defect == "no query scale" else DIMS.dk**-0.5
        q = (Fp32(self.reduce, self.norm, self.fast).unit(row.q.float()) * scale)[heads][:, None]
        c = row.a.float() + row.dt_bias
        g = -self.exp(row.A_log) * torch.where(c > 20, c, torch.log1p(self.exp(c)))
        d, beta = self.exp(g)[:, None], 1 / (1 + self.exp(-row.b.float()))[:, None]
        if self.defect == "gate twice":
            d = d * d
        decayed = d[..., None] * R
        inner = d * self.dot(R, k) if self.late_decay else self.dot(decayed, k)
        if self.defect == "error before decay":
            inner = self.dot(R, k)
        new = decayed + (beta * (row.v.float() - inner))[..., None] * k
        out = self.dot(new, q).bfloat16()
        return (new.bfloat16().float() if self.defect == "bf16 state" else new), out


CORRECT = {
    "sum": Fp32(),
    "reversed": Fp32("reversed"),
    "split": Fp32("split"),
    "KV": Fp32("KV"),
    "sqrt": Fp32(norm="sqrt"),
    "fast": Fp32("split", fast=True),
    "late decay": Fp32("reversed", "sqrt", late_decay=True),
}


def _inputs(kind: str, seed: int = 0) -> tuple[Tensor, GdnOps]:
    """R0 and operands; inactive rows hold NaN."""
    g = torch.Generator().manual_seed(seed)
    n = TREE.n

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    R0, A_log, dt = normal(DIMS.hv, DIMS.dv, DIMS.dk), normal(DIMS.hv), normal(DIMS.hv)
    q, k, v = normal(n, DIMS.hk, DIMS.dk), normal(n, DIMS.hk, DIMS.dk), normal(n, DIMS.hv, DIMS.dv)
    a, b = normal(n, DIMS.hv), normal(n, DIMS.hv)
    if kind == "no decay":
        A_log = torch.full_like(A_log, -20.0)
    elif kind == "full decay":
        A_log, a = torch.full_like(A_log, 4.0), torch.full_like(a, 80.0)
    elif kind == "gates":
        a, b = 80 * a.sign(), 80 * b.sign()
        A_log = torch.linspace(-20, 4, DIMS.hv)
    elif kind == "tiny keys":
        k[::2] *= 1e-8
        k[1::4] = 0
        q[1::2] *= 1e-8
    elif kind == "faint keys":
        k *= 1e-8
    elif kind == "large state":
        R0 *= 1e6
    elif kind == "positive":  # every partial sum grows: the worst case of a running sum
        R0, k, q, v, b = R0.abs(), k.abs(), q.abs(), -v.abs(), b.abs() + 6
    elif kind == "erased":  # R' k = v and beta near 1: cancellation in v - R' k
        k[:] = k[0]
        v[:], b[:], A_log[:] = v[0], 8.0, -20.0
    elif kind == "subnormal":
        R0, v, a = R0 * 1e-38, v * 1e-38, a - 90
    elif kind == "switch":  # softplus changes form at 20
        a, dt, A_log = torch.full_like(a, 20.0) + a.sign() * 2**-3, torch.zeros_like(dt), torch.full_like(A_log, -3.0)
    ops = [x.bfloat16() for x in (q, k, v, a, b)]
    for x in ops:
        x[2] = torch.nan
    return R0, GdnOps(*ops, A_log, dt)


KINDS = ["random", "no decay", "full decay", "gates", "tiny keys", "large state", "positive", "erased", "subnormal",
         "switch"]  # fmt: skip


def _ratios(state: Tensor, out: Tensor, truth: OracleRow) -> tuple[float, float]:
    """Largest error over bound of one row: (state, output); NaN counts as infinite."""
    off_state = torch.linalg.vector_norm(state.double() - truth.state, dim=-1) / truth.state_bound
    off_out = (out.double() - truth.out).abs() / truth.out_bound
    return float(off_state.nan_to_num(torch.inf).max()), float(off_out.nan_to_num(torch.inf).max())


def _worst(step, kind: str, contract: Contract, parents=TREE.parents, seed: int = 0) -> tuple[float, float]:
    """Largest error over bound: (states, outputs)."""
    R0, ops = _inputs(kind, seed)
    states, worst = {-1: R0}, [0.0, 0.0]
    for truth in gdn_oracle(TREE, R0, ops, contract, recycle=True):
        state, out = step(states[int(parents[truth.row])], gdn_row(ops, truth.row))
        states[truth.row] = state
        assert truth.state_bound.isfinite().all() and truth.out_bound.isfinite().all()
        worst = [max(pair) for pair in zip(worst, _ratios(state, out, truth), strict=True)]
    return worst[0], worst[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CORRECT)
def test_correct_fp32_implementations_stay_inside(name: str, kind: str) -> None:
    state, out = _worst(CORRECT[name].step, kind, Contract())
    assert state <= 1 and out <= 1, (state, out)


NATIVE = [
    Contract(),
    Contract(norm="sqrt", softplus="log_exp", head_map="tiled"),
    Contract(beta="bf16", norm="bf16"),
    Contract(carry="bf16"),
    Contract(carry="bf16", beta="bf16", norm="bf16", softplus="log_exp"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contract", NATIVE, ids=lambda c: f"{c.beta}-{c.norm}-{c.carry}-{c.head_map}")
def test_native_stays_inside_under_every_variant(contract: Contract, kind: str) -> None:
    state, out = _worst(lambda R, row: gdn_step(R, row, contract), kind, contract)
    assert state <= 1 and out <= 1, (state, out)


@pytest.mark.parametrize(
    ("defect", "kind", "surface"),
    [
        ("bf16 state", "random", "state"),
        ("error before decay", "random", "state"),
        ("gate twice", "random", "state"),
        ("no query scale", "random", "out"),
        ("no epsilon", "faint keys", "state"),
        ("wrong key head", "random", "state"),
        ("k not normalised", "random", "state"),
    ],
)
def test_arithmetic_defects_leave_the_bound(defect: str, kind: str, surface: str) -> None:
    R0, ops = _inputs(kind)
    states, ratio = {-1: R0}, 0.0
    for truth in gdn_oracle(TREE, R0, ops, Contract()):
        # Every row starts at a correct parent, so that the ratio is that of one defective step.
        parent, row = states[int(TREE.parents[truth.row])], gdn_row(ops, truth.row)
        states[truth.row], correct = Fp32().step(parent, row)
        state, out = Fp32(defect=defect).step(parent, row)
        state_ratio, out_ratio = _ratios(states[truth.row], correct, truth)
        assert max(state_ratio, out_ratio) <= 1
        state_ratio, out_ratio = _ratios(state, out, truth)
        assert surface == "state" or state_ratio <= 1
        ratio = max(ratio, state_ratio if surface == "state" else out_ratio)
    assert 4 < ratio < torch.inf, ratio


def test_inheriting_from_a_sibling_leaves_the_bound() -> None:
    parents = TREE.parents.copy()
    parents[4] = 3
    assert _worst(Fp32().step, "random", Contract(), parents)[0] > 100


def test_undeclared_roundings_leave_the_bound() -> None:
    for declared, used in (
        (Contract(), Contract(beta="bf16")),
        (Contract(), Contract(norm="bf16")),
        (Contract(beta="bf16"), Contract()),
        (Contract(norm="bf16"), Contract()),
        (Contract(), Contract(head_map="tiled")),
    ):
        assert _worst(lambda R, row, c=used: gdn_step(R, row, c), "random", declared)[0] > 4


def test_the_bound_is_tight_enough_to_matter() -> None:
    R0, ops = _inputs("random")
    for truth in gdn_oracle(TREE, R0, ops, Contract()):
        depth = len(TREE.path(truth.row))
        relative = truth.state_bound / torch.linalg.vector_norm(truth.state, dim=-1)
        assert relative.median() < 2e-5 * depth
        # Outputs are bf16: the bound is little more than half an ulp of it.
        assert (truth.out_bound / (truth.out.abs() + truth.out.abs().mean())).max() < 2.0**-7


def test_a_bf16_pool_is_followed_when_published() -> None:
    contract = Contract(state_dtype=torch.bfloat16, claims="algebra")
    R0, ops = _inputs("random")
    states = {-1: R0}
    for truth in gdn_oracle(TREE, R0, ops, contract):
        states[truth.row], _ = gdn_step(states[int(TREE.parents[truth.row])], gdn_row(ops, truth.row), contract)
        value, bound = published(truth, contract)
        error = torch.linalg.vector_norm(states[truth.row].bfloat16().double() - value, dim=-1)
        assert (error <= bound).all()
        assert (bound < 2.0**-8 * torch.linalg.vector_norm(value, dim=-1)).all()


def test_an_error_of_the_committed_state_is_carried_along() -> None:
    R0, ops = _inputs("no decay")
    shift = 1e-3 * torch.linalg.vector_norm(R0, dim=-1)
    moved = R0 * (1 + 1e-3)
    rows = gdn_oracle(TREE, R0, ops, Contract(), R0_bound=shift)
    states = {-1: moved}
    for truth in rows:
        states[truth.row], out = gdn_step(states[int(TREE.parents[truth.row])], gdn_row(ops, truth.row), Contract())
        assert (torch.linalg.vector_norm(states[truth.row].double() - truth.state, dim=-1) <= truth.state_bound).all()
        assert ((out.double() - truth.out).abs() <= truth.out_bound).all()
