"""Row functions and oracle, each against a derivation that shares nothing with either."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from lumotree.backends.protocol import GdnOps
from lumotree.contract import Contract
from lumotree.reference.attention import attend, rotate
from lumotree.reference.conv import conv_step
from lumotree.reference.elementwise import sigmoid, silu, softplus
from lumotree.reference.gdn import gdn_row, gdn_step, load_state, store_state
from lumotree.reference.oracle import gdn_oracle
from lumotree.reference.rounding import bf16_ulp, to_bf16, to_bf16_rows, to_bf16_uncertain
from lumotree.tree import Tree


def _f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _nearest_even(x: float) -> float:
    """bf16 by exact rational arithmetic."""
    if x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 1, -126)
    ulp = Fraction(2) ** (exponent - 7)
    return float(round(Fraction(x) / ulp) * ulp)  # Fraction rounds half to even


# Rounding


def test_to_bf16_does_not_round_twice() -> None:
    x = 1 + 2.0**-8 + 2.0**-40
    assert float(to_bf16(_f64(x))) == 1 + 2.0**-7
    assert float(torch.tensor(x, dtype=torch.float64).float().bfloat16()) == 1.0  # what passing through fp32 gives


def test_to_bf16_is_nearest_even_everywhere() -> None:
    g = torch.Generator().manual_seed(1)
    mantissa = 1 + torch.randint(0, 1 << 10, (400,), generator=g).double() * 2.0**-10  # many ties
    nudge = torch.tensor([0.0, 2.0**-45, -(2.0**-45)], dtype=torch.float64).repeat(134)[:400]
    exponent = torch.randint(-140, 126, (400,), generator=g)
    x = (mantissa + nudge) * torch.exp2(exponent.double()) * torch.where(torch.rand(400, generator=g) < 0.5, -1.0, 1.0)
    assert to_bf16(x).tolist() == [_nearest_even(v) for v in x.tolist()]


def test_to_bf16_ends_of_the_range() -> None:
    largest = float(torch.finfo(torch.bfloat16).max)
    x = _f64(largest, largest * (1 + 2.0**-10), largest * (1 + 2.0**-8), -math.inf, 2.0**-134, 2.0**-134 * 1.01, 0.0)
    assert to_bf16(x).tolist() == [largest, largest, math.inf, -math.inf, 0.0, 2.0**-133, 0.0]
    assert to_bf16(_f64(math.nan)).isnan().all()
    assert bf16_ulp(_f64(1.0, 1.99, 2.0, 0.0)).tolist() == [2.0**-7, 2.0**-7, 2.0**-6, 2.0**-133]


def test_uncertain_rounding_flips_only_beside_a_tie() -> None:
    tie = 1 + 2.0**-8
    x, error = _f64(tie, tie, 1.0, 1.0), _f64(0.0, 1e-9, 1e-3, 2.0**-9 * 1.1)
    rounded, spread = to_bf16_uncertain(x, error)
    assert rounded.tolist() == [1.0, 1.0, 1.0, 1.0]
    # Below 1 the spacing is half of what it is above.
    assert spread.tolist() == [0.0, 2.0**-7, 0.0, 2.0**-8]


def test_uncertain_rows_bound_every_perturbation() -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(3, 40, 16, generator=g, dtype=torch.float64)
    x[0, :, ::3] = to_bf16(x[0, :, ::3]).abs().log2().round().exp2()  # powers of two
    for size in (1e-5, 1e-3, 2.0**-9, 1e-2):
        error = torch.full((3, 40), size, dtype=torch.float64)
        rounded, bound = to_bf16_rows(x, error)
        assert torch.equal(rounded, to_bf16(x))
        for _ in range(20):
            noise = torch.randn(x.shape, generator=g, dtype=torch.float64)
            noise *= torch.rand(x.shape, generator=g) < 0.3
            noise *= size / torch.linalg.vector_norm(noise, dim=-1, keepdim=True).clamp(min=1e-9)
            moved = torch.linalg.vector_norm(to_bf16(x + noise) - rounded, dim=-1)
            assert (moved <= bound * (1 + 1e-12)).all()


# Elementwise functions


def test_elementwise_functions_do_not_depend_on_place() -> None:
    x = torch.linspace(-90, 90, 41)
    for function in (sigmoid, silu, lambda t: softplus(t, "log1p"), lambda t: softplus(t, "log_exp")):
        whole = function(x)
        assert all(torch.equal(function(x[i : i + 1]), whole[i : i + 1]) for i in range(len(x)))
        assert whole.isfinite().all()


def test_softplus_forms_and_switch() -> None:
    x = torch.tensor([-30.0, 0.0, 20.0, 20.5, 200.0])
    assert softplus(x, "log1p")[0] > 0 and softplus(x, "log_exp")[0] == 0
    for form in ("log1p", "log_exp"):
        assert softplus(x, form)[3:].tolist() == [20.5, 200.0]
        torch.testing.assert_close(softplus(x, form)[1:3], torch.nn.functional.softplus(x[1:3]))


# The recurrence, re-derived with numpy's extended precision, one scalar loop


def _ops(n: int, hk: int, hv: int, dk: int, dv: int, seed: int = 0) -> tuple[Tensor, GdnOps]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    bf16 = [normal(n, hk, dk), normal(n, hk, dk), normal(n, hv, dv), normal(n, hv), 3 * normal(n, hv)]
    return normal(hv, dv, dk), GdnOps(*(x.bfloat16() for x in bf16), normal(hv), normal(hv))


def _longdouble_chain(R0: Tensor, ops: GdnOps, rows: list[int], head_map: str) -> tuple[np.ndarray, np.ndarray]:
    """State and output after `rows`, numpy longdouble, per head and per element."""
    wide = np.longdouble
    q, k, v, a, b = (x.float().numpy().astype(wide) for x in (ops.q, ops.k, ops.v, ops.a, ops.b))
    A_log, dt = ops.A_log.numpy().astype(wide), ops.dt_bias.numpy().astype(wide)
    R = R0.numpy().astype(wide)
    hv, dv, dk = R.shape
    hk, out = k.shape[1], np.zeros((hv, dv), wide)
    for t in rows:
        for h in range(hv):
            s = h // (hv // hk) if head_map == "grouped" else h % hk
            kh = k[t, s] / np.sqrt((k[t, s] ** 2).sum() + wide("1e-6"))
            qh = q[t, s] / np.sqrt((q[t, s] ** 2).sum() + wide("1e-6")) / np.sqrt(wide(dk))
            g = -np.exp(A_log[h]) * np.log1p(np.exp(a[t, h] + dt[h]))
            beta = 1 / (1 + np.exp(-b[t, h]))
            for i in range(dv):
                row = np.exp(g) * R[h, i]
                R[h, i] = row + beta * (v[t, h, i] - row @ kh) * kh
                out[h, i] = R[h, i] @ qh
    return R, out


@pytest.mark.parametrize("head_map", ["grouped", "tiled"])
def test_oracle_agrees_with_extended_precision(head_map: str) -> None:
    R0, ops = _ops(5, 2, 6, 7, 3)
    tree = Tree.make([-1, 0, 0, 2, 3])
    for truth in gdn_oracle(tree, R0, ops, Contract(head_map=head_map), tile=4):
        R, out = _longdouble_chain(R0, ops, list(tree.path(truth.row)), head_map)
        np.testing.assert_allclose(truth.state.numpy(), R.astype(float), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(truth.out.numpy(), out.astype(float), rtol=1e-12, atol=1e-13)


def test_oracle_yields_active_rows_once_and_leaves_its_input_alone() -> None:
    R0, ops = _ops(5, 2, 6, 7, 3)
    R0 = R0.double()
    before = R0.clone()
    tree = Tree.make([-1, 0, 0, 2, 1], active=[True, True, True, False, True])
    kept = {t.row: t for t in gdn_oracle(tree, R0, ops, Contract())}
    assert sorted(kept) == [0, 1, 2, 4]
    for truth in gdn_oracle(tree, R0, ops, Contract(), recycle=True):
        assert torch.equal(truth.state, kept[truth.row].state) and torch.equal(truth.out, kept[truth.row].out)
    assert torch.equal(R0, before)


def test_row_step_does_not_depend_on_the_number_of_rows() -> None:
    R0, ops = _ops(5, 2, 6, 60, 9)
    alone = GdnOps(*(x[3:4].clone() for x in (ops.q, ops.k, ops.v, ops.a, ops.b)), ops.A_log, ops.dt_bias)
    for got, want in zip(
        gdn_step(R0, gdn_row(ops, 3), Contract()), gdn_step(R0, gdn_row(alone, 0), Contract()), strict=True
    ):
        assert torch.equal(got, want)


def test_variants_change_bits_and_carry_is_rounded() -> None:
    R0, ops = _ops(1, 2, 6, 60, 9)
    plain, out = gdn_step(R0, gdn_row(ops, 0), Contract())
    for variant in (Contract(beta="bf16"), Contract(norm="sqrt"), Contract(norm="bf16"), Contract(head_map="tiled")):
        assert not torch.equal(gdn_step(R0, gdn_row(ops, 0), variant)[0], plain)
    carried, same_out = gdn_step(R0, gdn_row(ops, 0), Contract(carry="bf16"))
    assert torch.equal(carried, plain.bfloat16().float()) and torch.equal(out, same_out)


@pytest.mark.parametrize("layout", ["VK", "KV"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_layout_and_dtype_round_trip(layout: str, dtype: torch.dtype) -> None:
    contract = Contract(layout=layout, state_dtype=dtype, claims="algebra")
    R = torch.randn(3, 4, 5).to(dtype).float()
    slot = torch.zeros((3, 4, 5) if layout == "VK" else (3, 5, 4), dtype=dtype)
    store_state(slot, R, contract)
    assert torch.equal(slot.float(), R if layout == "VK" else R.transpose(1, 2))
    assert torch.equal(load_state(slot, contract), R)
    load_state(slot, contract).zero_()
    assert torch.equal(load_state(slot, contract), R)


# Convolution and attention


def test_conv_sums_oldest_first_and_shifts() -> None:
    # Products 2^24, 1, -2^24: oldest first loses the 1, newest first keeps it.
    history = torch.tensor([[2.0**12, 1.0, -(2.0**12)]]).bfloat16()
    weight = torch.tensor([[2.0**12, 1.0, 2.0**12, 1.0]]).bfloat16()
    shifted, out = conv_step(history, torch.tensor([3.0]).bfloat16(), weight, Contract())
    assert shifted.tolist() == [[1.0, -(2.0**12), 3.0]]
    assert torch.equal(out, silu(torch.tensor([3.0])).bfloat16())


def test_conv_bf16_product_rounds_each_product() -> None:
    x, w = 1 + 2.0**-7, 1 + 2.0**-7  # product 1 + 2^-6 + 2^-14 is 1 + 2^-6 in bf16
    history, zero = torch.zeros(1, 3).bfloat16(), torch.zeros(1, 4).bfloat16()
    weight = zero.clone()
    weight[0, 2:] = w
    history[0, 2] = x
    one = torch.tensor([x]).bfloat16()
    total = {"fp32": 2 * x * w, "bf16_product": 2 * (1 + 2.0**-6)}
    for form, value in total.items():
        _, out = conv_step(history, one, weight, Contract(conv=form))
        assert torch.equal(out, silu(torch.tensor([value])).bfloat16())


def test_rope_rotates_half_split_pairs_and_passes_the_rest() -> None:
    cos, sin = torch.tensor([[1.0, 1.0], [0.0, 0.6]]), torch.tensor([[0.0, 0.0], [1.0, 0.8]])
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]).bfloat16()
    assert torch.equal(rotate(x, 0, cos, sin), x)
    want = torch.tensor([[-3.0, 2 * 0.6 - 4 * 0.8, 1.0, 4 * 0.6 + 2 * 0.8, 5.0]]).bfloat16()
    assert torch.equal(rotate(x, 1, cos, sin), want)


def test_attend_is_grouped_and_normalised() -> None:
    V = torch.randn(3, 2, 8).bfloat16()
    uniform = attend(torch.zeros(4, 8).bfloat16(), torch.randn(3, 2, 8).bfloat16(), V)
    want = V.float().mean(0).repeat_interleave(2, 0)
    torch.testing.assert_close(uniform.float(), want, rtol=2.0**-7, atol=1e-3)
    K = torch.zeros(3, 2, 8).bfloat16()
    K[1, :, 0], q = 100.0, torch.zeros(4, 8).bfloat16()
    q[:, 0] = 100.0
    assert torch.equal(attend(q, K, V), V[1].repeat_interleave(2, 0))
