"""Exact laws of faults: the simulated faulty sampler follows its claimed law, and the audit sees it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from audit.fault_joint import cartesian, joint_of, joint_tv
from audit.fault_laws import FLAWS, Flaw, fault_law, flawed_law
from audit.fault_source import RecipeSource
from audit.gtest import g_test
from audit.montecarlo import run_step
from audit.rule_law import multi_round_law
from audit.sampler_steps import Recipe, make_step, small_steps
from faults.sampler import SAMPLER_FAULTS
from faults.sampler_types import Reading
from lumotree.sampling import SamplingParams
from lumotree.select import GREEDY, MULTI_ROUND
from lumotree.select_types import Step
from lumotree.tree import Tree

WALKS = 8_000
DETECTED = [f for f in SAMPLER_FAULTS.values() if f.expect == "detected"]


# At a small vocabulary the recipes' min-p cuts nothing, and their presence penalty moves little.
MORE = (
    Recipe("min-p", "", "peaked", "flat", False, (0.66, 0.1, 0.07), SamplingParams(min_p=0.05), seed=9),
    Recipe("penalised", "", "peaked", "flat", False, (0.6, 0.15, 0.1), SamplingParams(presence=1.0), pool=10, seed=10),
)
STEPS = {
    recipe.name: (step, RecipeSource(recipe, step))
    for recipe, step in [*small_steps(32), *((more, make_step(more, 32)) for more in MORE)]
}
CLEAN = {name: multi_round_law(step) for name, (step, _) in STEPS.items()}
LAWS = {
    fault.id: {name: fault_law(fault, step, source, CLEAN[name]) for name, (step, source) in STEPS.items()}
    for fault in SAMPLER_FAULTS.values()
}


def duplicates() -> Step:
    """Row 2 repeats the token of its sibling, row 1."""
    rng = np.random.default_rng(4)
    target = torch.from_numpy(rng.dirichlet(np.ones(6), 4))
    return Step(Tree.make([-1, 0, 0, 0], tokens=[0, 2, 2, 4], vocab=6), target)


def ties() -> Step:
    target = torch.tensor([[0.25, 0.375, 0.375], [0.5, 0.0, 0.5], [0.5, 0.0, 0.5]], dtype=torch.float64)
    return Step(Tree.make([-1, 0, 0], tokens=[0, 1, 2], vocab=3), target)


def test_the_source_gives_the_steps_rows():
    for step, source in STEPS.values():
        source.differs = lambda reading: True  # not the shortcut
        assert torch.equal(source.target(Reading()), step.target)
        del source.differs


def test_without_a_flaw_the_law_is_that_of_the_rule():
    for name, (step, _) in STEPS.items():
        assert joint_tv(flawed_law(step, step, Flaw()), CLEAN[name]) < 1e-14


@pytest.mark.parametrize("fault", DETECTED, ids=lambda f: f.id)
def test_reachable_somewhere(fault):
    found = list(LAWS[fault.id].values())
    if fault.needs == "greedy":
        assert fault_law(fault, ties(), greedy=True).tv == 1
    elif fault.dependence:
        assert all(law.dependence and law.tv == 0 and law.reachable for law in found)
    else:
        assert max(law.tv for law in found) > (1e-8 if fault.id == "floor_24_bits" else 1e-4)
    for law in found:
        assert law.reachable or law.tv <= 1e-12
        assert law.reachable or law.note


@pytest.mark.parametrize("fault", SAMPLER_FAULTS.values(), ids=lambda f: f.id)
def test_simulated_walks_follow_the_law(fault):
    for name, (step, source) in STEPS.items():
        found = LAWS[fault.id][name]
        if found.dependence:
            continue
        walks = fault.wrap(MULTI_ROUND, source).walk(step, WALKS, 5)
        counts = np.zeros(step.target.shape)
        np.add.at(counts, (walks.last.numpy(), walks.bonus.numpy()), 1)
        if fault.id == "one_stream_rows":  # its law is that of the last row
            stop = found.alternative.stop
            outcome = g_test(counts.sum(1), stop / stop.sum())
        else:
            law = joint_of(found.law) if found.law else cartesian(CLEAN[name])
            assert law.sum() == pytest.approx(1)
            outcome = g_test(counts.ravel(), law.ravel())
        assert outcome is not None, name
        assert outcome.p_value > 1e-6, name


def test_the_check_above_can_fail():
    """Walks of one fault against the law of another, milder one."""
    step, source = STEPS["mixed-stochastic"]
    walks = SAMPLER_FAULTS["q_sharper"].wrap(MULTI_ROUND, source).walk(step, WALKS, 5)
    counts = np.zeros(step.target.shape)
    np.add.at(counts, (walks.last.numpy(), walks.bonus.numpy()), 1)
    law = joint_of(LAWS["q_raw_vs_processed"]["mixed-stochastic"].law)
    assert g_test(counts.ravel(), law.ravel()).p_value < 1e-6


@pytest.mark.parametrize("fault", DETECTED, ids=lambda f: f.id)
def test_detected_where_it_matters(fault):
    """The step in which the fault is hardest to see, of those with a TV of 0.01."""
    name = (
        min((law.tv, name) for name, law in LAWS[fault.id].items() if law.dependence or law.tv >= 0.01)[1]
        if any(law.dependence or law.tv >= 0.01 for law in LAWS[fault.id].values())
        else None
    )
    if name is None:
        assert fault.id in ("floor_24_bits", "bf16_draw", "argmax_last")
        return
    (step, source), law = STEPS[name], LAWS[fault.id][name]
    result = run_step(
        fault.wrap(MULTI_ROUND, source),
        step,
        walks=8_000,
        chunk=4_000,
        min_visits=200,
        looks=4,
        law=law.clean,
        alternatives={} if law.alternative is None else {fault.id: law.alternative},
        seed=11,
    )
    assert result.verdict == "FAIL"


@pytest.mark.parametrize("name", ["deterministic_q_one", "sample_and_match"])
@pytest.mark.parametrize("step_name", ["tied-fixed", "truncated-stochastic"])
def test_harmless_ones_pass(name, step_name):
    (step, source), law = STEPS[step_name], LAWS[name][step_name]
    result = run_step(
        SAMPLER_FAULTS[name].wrap(MULTI_ROUND, source), step, walks=16_000, chunk=8_000, min_visits=200, law=law.clean
    )
    assert result.verdict == "PASS", result.messages()
    assert law.reachable
    assert law.alternative is None


def test_duplicates_and_ties_are_simulated_as_claimed():
    fault, step = SAMPLER_FAULTS["duplicate_twice"], duplicates()
    walks = fault.wrap(MULTI_ROUND).walk(step, WALKS, 1)
    counts = np.zeros(step.target.shape)
    np.add.at(counts, (walks.last.numpy(), walks.bonus.numpy()), 1)
    assert g_test(counts.ravel(), joint_of(fault_law(fault, step).law).ravel()).p_value > 1e-6
    fault, step = SAMPLER_FAULTS["argmax_last"], ties()
    law = fault_law(fault, step, greedy=True).law
    walks = fault.wrap(GREEDY).walk(step, 10, 1)
    assert joint_of(law)[walks.last.numpy(), walks.bonus.numpy()].tolist() == [1.0] * 10


def test_laws_by_hand():
    """One child with token 0, p = (1/4, 3/4), q = (1/2, 1/2): accepted with 1/2 x 1/2 or 1/2; correction token 1."""
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    step = Step(Tree.make([-1, 0], tokens=[0, 0], vocab=2), torch.tensor([[0.25, 0.75]] * 2, dtype=torch.float64), half)
    clean = multi_round_law(step)
    assert clean.child[1].mass.tolist() == [0.25, 0.5]
    assert clean.bonus[0].tolist() == [0.0, 0.25]
    every = {name: flawed_law(step, step, flaw) for name, flaw in FLAWS.items()}
    assert every["accept_all"].child[1].mass.tolist() == [0.5, 0.5]
    assert every["q_one"].child[1].mass.tolist() == [0.125, 0.375]
    assert every["resample_from_p"].bonus[0].tolist() == [0.0625, 0.1875]
    # The draft coin of token 0 lies below 1/2, which its ratio of 1/2 always exceeds.
    assert every["accept_is_draft"].child[1].mass.tolist() == [0.5, 0.5]
    soft = np.exp([0.0, 1.0])
    np.testing.assert_allclose(every["residual_softmax"].bonus[0], 0.25 * soft / soft.sum())


def test_accept_reused_by_hand():
    """Fixed draft of token 1, p = (1/4, 1/4, 1/2): refused coins are above 1/4, the residual (1/3, 0, 2/3)."""
    target = torch.tensor([[0.25, 0.25, 0.5]] * 2, dtype=torch.float64)
    step = Step(Tree.make([-1, 0], tokens=[0, 1], vocab=3), target)
    law = flawed_law(step, step, FLAWS["accept_reused"])
    np.testing.assert_allclose(law.bonus[0], [1 / 12, 0, 2 / 3])
    half = flawed_law(step, step, FLAWS["residual_half"])
    np.testing.assert_allclose(half.bonus[0], [0, 0, 0.75])
    unclamped = flawed_law(step, step, FLAWS["residual_unclamped"])
    np.testing.assert_allclose(unclamped.bonus[0], [0.25, 0, 0.5])
    short = flawed_law(step, step, FLAWS["residual_unnormalised"])
    np.testing.assert_allclose(short.bonus[0], [0.75 * 0.25, 0, 0.75 * 0.75])
