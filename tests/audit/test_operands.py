"""Regimes reach what they are named after, and exact-grid operands are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from audit.cases import Case
from audit.families import DIMS_EXACT, DIMS_MICRO, DIMS_MICRO_EXACT, DIMS_MICRO_FULL
from audit.horizon import memory_tokens, root_reach
from audit.judge import exact_width
from audit.operands import EXACT_STATE_UNIT, REGIMES, Source, on_grid
from audit.truth import find_truth
from lumotree.backends.reference import ReferenceBackend
from lumotree.contract import Contract
from lumotree.errors import ContractError
from lumotree.reference.gdn import gates, gdn_row, gdn_step, normalise
from lumotree.verifier.attention import rope

CONTRACT = Contract()


def decays(case: Case) -> torch.Tensor:
    return torch.stack([gates(gdn_row(case.gdn[0], row), CONTRACT)[0] for row in range(len(case.active))])


def test_a_source_is_reproducible_and_its_streams_differ() -> None:
    assert torch.equal(Source((1, 2)).normal(5), Source((1, 2)).normal(5))
    assert not torch.equal(Source((1, 2)).normal(5), Source((1, 3)).normal(5))
    assert set(Source((1,)).choice((0.0, 2.0), 100).tolist()) == {0.0, 2.0}
    assert set(Source((1,)).integers(-1, 2, 100).tolist()) == {-1, 0, 1}


def test_decay_regimes_are_near_one_and_near_zero(engine: Any) -> None:
    one = decays(Case(engine.spec(regime="near_one", dims=replace(DIMS_MICRO, hv=48)), CONTRACT))
    zero = decays(Case(engine.spec(regime="near_zero", dims=replace(DIMS_MICRO, hv=48)), CONTRACT))
    assert one.min() > 0.99 and zero.max() < 1e-3


def test_key_regimes_have_zero_and_tiny_rows(engine: Any) -> None:
    zero = Case(engine.spec(regime="zero_keys", trees=("chain:16",)), CONTRACT).gdn[0].k.float().abs().amax((1, 2))
    tiny = Case(engine.spec(regime="tiny_keys", trees=("chain:16",)), CONTRACT).gdn[0].k.float().abs().amax((1, 2))
    assert (zero == 0).any() and (zero > 0.1).any()
    assert (tiny < 1e-6).any() and (tiny > 0.1).any() and (tiny > 0).all()


def test_large_gates_saturate_both_ways(engine: Any) -> None:
    case = Case(engine.spec(regime="large_gates", trees=("chain:16",)), CONTRACT)
    decay = decays(case)
    assert (decay == 0).any() and (decay == 1).any()
    assert {-80.0, 80.0} <= set(case.gdn[0].b.flatten().tolist())


def test_middling_gates_bend_softplus_under_decays_that_do_not_hide_it(engine: Any) -> None:
    case = Case(engine.spec(regime="mid_gates", trees=("chain:16",)), CONTRACT)
    ops = case.gdn[0]
    x = ops.a.float() + ops.dt_bias
    assert bool(((x > 1) & (x < 20)).float().mean() > 0.9)
    assert float(decays(case).max()) > 0.8 and float(decays(case).min()) < 0.05


def test_large_gates_overflow_exp_but_not_the_decay(engine: Any) -> None:
    case = Case(engine.spec(regime="large_gates"), CONTRACT)
    ops = case.gdn[0]
    assert torch.exp(ops.a[1::2, -1].float()).isinf().all() and ops.A_log[-1] == -9
    assert ((decays(case)[1::2, -1] - 0.98773).abs() < 1e-3).all()


def test_cold_scores_are_all_far_below_zero(engine: Any) -> None:
    case = Case(engine.spec(regime="cold"), CONTRACT)
    ops, prefix = case.attention[0], case.committed(0, range(5))
    q, (k, cached) = ops.q.float(), (ops.k.float(), case.pools.cache.k[0, prefix].float())
    keys = torch.cat([k, cached])[:, [0, 0]]
    assert torch.einsum("ihd,jhd->hij", q, keys).max() * DIMS_MICRO.head_dim**-0.5 < -150


def test_cold_needs_a_channel_that_does_not_rotate(engine: Any) -> None:
    with pytest.raises(ContractError, match="expected rotary_dim < head_dim=8"):
        Case(engine.spec(regime="cold", dims=DIMS_MICRO_FULL), CONTRACT)


def exact_case(engine: Any, dims: Any = DIMS_MICRO_EXACT, tree: str = "hydra27") -> Case:
    return Case(engine.spec(regime="exact", dims=dims, trees=(tree,), prefixes=(9,)), CONTRACT)


@pytest.mark.parametrize("dims", [DIMS_MICRO_EXACT, DIMS_EXACT], ids=lambda d: d.name)
def test_norm_gates_and_rope_of_exact_grid_operands_are_exact(dims: Any, engine: Any) -> None:
    case = exact_case(engine, dims)
    ops = case.gdn[0]
    unit = normalise(ops.k.float().flatten(0, 1), "rsqrt")
    assert set(unit.abs().flatten().tolist()) <= {0.0, 0.5, 1.0}
    assert torch.equal(unit, normalise(ops.k.float().flatten(0, 1), "sqrt"))
    assert set(decays(case).flatten().tolist()) <= {0.0, 0.5, 1.0}
    betas = {float(x) for row in range(len(ops.b)) for x in gates(gdn_row(ops, row), CONTRACT)[1]}
    assert betas <= {0.0, 0.5, 1.0} and len(betas) == 3
    attention = case.attention[0]
    position = case.batch.position.long()
    turned = rope(attention.k, attention.cos[position], attention.sin[position]).double()
    assert torch.equal(turned.square().sum(-1), attention.k.double().square().sum(-1))  # a quarter turn keeps the norm


def test_exact_grid_states_do_not_depend_on_the_precision_of_the_chain(engine: Any) -> None:
    """The chain in fp32 equals the same chain in float64, bit for bit, although keys mix channels."""
    case = exact_case(engine)
    tree, ops = case.trees[0], case.gdn[0]
    slot = case.state_slots[0]
    for leaf in tree.leaves:
        R = case.pools.recurrent[0, slot].clone()
        wide = R.double()
        for row in tree.path(leaf):
            one = gdn_row(ops, row)
            R, _ = gdn_step(R, one, CONTRACT)
            decay, beta = (x.double()[:, None, None] for x in gates(one, CONTRACT))
            k = normalise(one.k.float(), "rsqrt").double()[[0] * 3][:, None, :]
            wide = decay * wide
            u = beta[:, 0] * (one.v.double() - (wide * k).sum(-1))
            wide = wide + u[:, :, None] * k
        assert torch.equal(R.double(), wide)
        assert torch.equal(on_grid(wide, EXACT_STATE_UNIT), wide)


def test_exact_grid_cases_still_move_the_state_and_forget_some(engine: Any) -> None:
    case = exact_case(engine)
    truth = find_truth(ReferenceBackend(), case, ["gdn"])[0, 0]
    states = [truth.native.recurrent[row] for row in case.trees[0].active_rows]
    assert len({tuple(s.flatten().tolist()) for s in states}) > len(states) // 2
    assert any(bool((s % 4 != 0).any()) for s in states)  # mixing keys leave the coarse grid: sums are really taken


def test_every_row_of_an_exact_attention_case_looks_at_one_position_and_a_neighbour_gives_another_value(
    engine: Any,
) -> None:
    case = exact_case(engine)
    out = find_truth(ReferenceBackend(), case, ["attention"])[0, 0]
    values = {float(x) for x in case.attention[0].v.flatten()} | {
        float(x) for x in case.pools.cache.v[0, case.committed(0, range(9))].flatten()
    }
    rows = case.trees[0].active_rows
    assert all(float(x) in values for row in rows for x in out.native.attention_out[row].flatten())


@pytest.mark.parametrize(
    ("value", "ok"),
    [
        (3 * EXACT_STATE_UNIT, True),
        (3 * EXACT_STATE_UNIT * (1 + 1e-9), True),  # the epsilon of the norm, which float64 keeps
        (3.5 * EXACT_STATE_UNIT, False),
        (EXACT_STATE_UNIT * 2.0**24, False),  # needs more than 24 bits
        (float("nan"), False),
    ],
)
def test_on_grid_raises_for_a_value_that_is_not_exact(value: float, ok: bool) -> None:
    x = torch.tensor([0.0, value], dtype=torch.float64)
    if ok:
        assert on_grid(x, EXACT_STATE_UNIT).tolist() == [0.0, 3 * EXACT_STATE_UNIT]
    else:
        with pytest.raises(AssertionError, match="left its grid"):
            on_grid(x, EXACT_STATE_UNIT)


@pytest.mark.parametrize(
    ("width", "exact"),
    [(1, True), (4, True), (16, True), (64, True), (8, False), (12, False), (60, False), (128, False)],
)
def test_a_width_is_exact_when_its_inverse_root_is_a_power_of_two(width: int, exact: bool) -> None:
    assert exact_width(width) is exact


def reach(engine: Any, regime: str, tree: str = "chain:12") -> float:
    case = Case(engine.spec(regime=regime, trees=(tree,)), CONTRACT)
    return root_reach(case, find_truth(ReferenceBackend(), case, ["gdn"]))


def test_a_change_at_the_root_reaches_the_deepest_state_unless_the_state_forgets(engine: Any) -> None:
    assert reach(engine, "near_one") > 1000
    assert reach(engine, "near_zero") < 1
    assert reach(engine, "near_zero", "chain:1") > 1  # nothing to forget yet


def test_memory_is_long_near_one_and_short_near_zero(engine: Any) -> None:
    long, short = (memory_tokens(Case(engine.spec(regime=r), CONTRACT)) for r in ("near_one", "near_zero"))
    assert long[0] > 1e3 and long[1] >= long[0] and short[1] < 1


@pytest.mark.parametrize("regime", sorted(REGIMES))
def test_every_regime_is_finite_and_of_the_declared_dtype(regime: str, engine: Any) -> None:
    case = Case(engine.spec(regime=regime, dims=DIMS_MICRO_EXACT), CONTRACT)
    for ops in (case.gdn[0], case.conv[0], case.attention[0]):
        for name, x in vars(ops).items():
            fp32 = name in ("A_log", "dt_bias", "cos", "sin")
            assert x.isfinite().all() and x.dtype == (torch.float32 if fp32 else torch.bfloat16), name
