"""Sampler faults as wrappers: each changes exactly what it says, seen by a spy in the place of the sampler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from audit.fault_source import RecipeSource
from audit.sampler_steps import small_steps
from faults.sampler import NOT_EXPRESSED, SAMPLER_FAULTS
from lumotree.errors import InputError
from lumotree.select import GREEDY, MULTI_ROUND
from lumotree.select_types import Coins, Step
from lumotree.tree import Tree

STEPS = {recipe.name: (recipe, step) for recipe, step in small_steps(32)}
BY_KIND = {kind: [f for f in SAMPLER_FAULTS.values() if f.kind == kind] for kind in ("coins", "target", "laws")}
ROWS = list(STEPS["peaked-fixed"][1].tree.active_rows)


class Spy:
    """A sampler that takes coins, passes them on and remembers what it was given."""

    def select(self, step, tokens, coins):
        self.step, self.tokens, self.coins = step, tokens, coins
        self.walks = MULTI_ROUND.select(step, tokens, coins)
        return self.walks


def spied(fault, name, walks=64, seed=3):
    recipe, step = STEPS[name]
    spy = Spy()
    out = fault.wrap(spy, RecipeSource(recipe, step)).walk(step, walks, seed)
    return spy, out, step


def right(name, walks=64, seed=3):
    return spied(replace(SAMPLER_FAULTS["residual_half"], change=type(SAMPLER_FAULTS["q_one"].change)()), name)


def same_coins(a, b):
    return torch.equal(a.accept, b.accept), torch.equal(a.residual, b.residual)


@pytest.mark.parametrize("fault", BY_KIND["target"], ids=lambda f: f.id)
def test_target_faults_change_the_target_alone(fault):
    touched = False
    for name in STEPS:
        spy, _, step = spied(fault, name)
        clean, _, _ = right(name)
        assert torch.equal(spy.tokens, clean.tokens)
        assert same_coins(spy.coins, clean.coins) == (True, True)
        assert (spy.step.laws is None) == (step.laws is None)
        assert spy.step.laws is None or torch.equal(spy.step.laws, step.laws)
        sums = spy.step.target[ROWS].sum(1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
        touched |= not torch.equal(spy.step.target, step.target)
    assert touched or fault.id in ("min_p_ignored", "min_p_bonus_only")  # at 32 tokens min-p cuts nothing


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("residual_half", (True, False)),
        ("accept_zero", (False, True)),
        ("accept_reused", (True, False)),
        ("accept_is_draft", (False, True)),
        ("residual_is_draft", (True, False)),
        ("one_stream_rows", (False, False)),
        ("floor_24_bits", (False, False)),
        ("frozen_generator", (False, False)),
        ("late_generator", (False, False)),
        ("fixed_seed", (False, False)),
    ],
)
def test_coin_faults_change_coins_alone(name, changes):
    spy, _, step = spied(SAMPLER_FAULTS[name], "mixed-stochastic")
    clean, _, _ = right("mixed-stochastic")
    assert spy.step is step
    assert same_coins(spy.coins, clean.coins) == changes


def test_what_the_coins_become():
    def coins(name):
        return spied(SAMPLER_FAULTS[name], "mixed-stochastic")[0].coins

    clean = right("mixed-stochastic")[0].coins
    assert bool((coins("residual_half").residual == 0.5).all())
    assert not coins("accept_zero").accept.any()
    assert torch.equal(coins("accept_reused").residual[:, 0], clean.accept[:, 3])  # row 3 is row 0's last child
    assert torch.equal(coins("one_stream_rows").accept[:, 5], clean.accept[:, 1])
    grid = coins("floor_24_bits").accept * 2**24
    assert torch.equal(grid, grid.round())
    assert len(coins("frozen_generator").accept.unique(dim=0)) == 1
    assert torch.equal(coins("late_generator").accept[1::2], coins("late_generator").accept[::2])
    other = spied(SAMPLER_FAULTS["fixed_seed"], "mixed-stochastic", seed=99)[0].coins
    assert torch.equal(other.accept, coins("fixed_seed").accept)


@pytest.mark.parametrize("fault", BY_KIND["laws"], ids=lambda f: f.id)
def test_law_faults_leave_target_and_coins(fault):
    spy, _, step = spied(fault, "mixed-stochastic")
    clean, _, _ = right("mixed-stochastic")
    assert torch.equal(spy.step.target, step.target)
    assert same_coins(spy.coins, clean.coins) == (True, True)
    drafts_moved = not torch.equal(spy.tokens.expand_as(clean.tokens), clean.tokens)
    law_moved = spy.step.laws is None or not torch.equal(spy.step.laws, step.laws)
    assert drafts_moved or law_moved or fault.id == "bf16_draw"  # 64 walks hardly ever meet a difference of 2^-9
    assert not (drafts_moved and law_moved)


def test_outcome_faults_change_the_bonus_alone():
    for name in ("bonus_from_parent", "bonus_greedy", "cartesian_write"):
        spy, out, _ = spied(SAMPLER_FAULTS[name], "mixed-stochastic")
        assert torch.equal(out.last, spy.walks.last)
        assert not torch.equal(out.bonus, spy.walks.bonus)
        if name == "bonus_from_parent":
            assert torch.equal(out.bonus[spy.walks.refused], spy.walks.bonus[spy.walks.refused])


def test_inputs_are_not_changed():
    for name in ("truncated-fixed", "truncated-stochastic"):
        recipe, step = STEPS[name]
        before = step.target.clone(), None if step.laws is None else step.laws.clone()
        for fault in SAMPLER_FAULTS.values():
            fault.wrap(MULTI_ROUND, RecipeSource(recipe, step)).walk(step, 16, 1)
        assert torch.equal(step.target, before[0])
        assert before[1] is None or torch.equal(step.laws, before[1])


def test_no_fault_no_change():
    """The control: the wrapper with nothing changed, and the variant rule without a flaw, decide as the rule does."""
    variant = type(SAMPLER_FAULTS["q_one"].change.rule(MULTI_ROUND))()
    for name in STEPS:
        spy, out, step = right(name)
        assert spy.step is step
        assert torch.equal(out.bonus, spy.walks.bonus)
        again = variant.select(step, spy.tokens, spy.coins)
        assert torch.equal(again.last, out.last)
        assert torch.equal(again.bonus, out.bonus)


def test_last_argmax_under_the_greedy_rule():
    target = torch.tensor([[0.25, 0.375, 0.375], [0.5, 0.0, 0.5], [0.5, 0.0, 0.5]], dtype=torch.float64)
    step = Step(Tree.make([-1, 0, 0], tokens=[0, 1, 2], vocab=3), target)
    coins = Coins(torch.full((1, 3), 0.5, dtype=torch.float64), torch.full((1, 3), 0.5, dtype=torch.float64))
    tokens = torch.tensor([[0, 1, 2]])
    first = GREEDY.select(step, tokens, coins)
    last = SAMPLER_FAULTS["argmax_last"].wrap(GREEDY).select(step, tokens, coins)
    assert (int(first.last), int(first.bonus)) == (1, 0)
    assert (int(last.last), int(last.bonus)) == (2, 2)


class Closed:
    """A sampler that shows no coins."""

    def walk(self, step, walks, seed):
        self.step, self.seed = step, seed
        return replace_nothing(step, walks, seed)


def replace_nothing(step, walks, seed):
    return SAMPLER_FAULTS["bonus_greedy"].wrap(MULTI_ROUND).walk(step, walks, seed)


def test_closed_samplers():
    recipe, step = STEPS["peaked-fixed"]
    for fault in SAMPLER_FAULTS.values():
        if not fault.closed:
            with pytest.raises(InputError, match=f"{fault.id}: needs a sampler that takes coins"):
                fault.wrap(Closed())
            continue
        inner = Closed()
        fault.wrap(inner, RecipeSource(recipe, step)).walk(step, 10, 7)
        assert (inner.seed != 7) == (fault.change.seed is not None)
        assert fault.change.rows is not None or inner.step is step


def test_a_reading_without_a_source_is_refused():
    step = STEPS["peaked-fixed"][1]
    with pytest.raises(InputError, match="needs the step's source"):
        SAMPLER_FAULTS["temperature_twice"].wrap(MULTI_ROUND).walk(step, 1, 0)


def test_every_class_is_expressed_or_explained():
    said = " ".join([*(f.provenance for f in SAMPLER_FAULTS.values()), *(name for name, _ in NOT_EXPRESSED)])
    classes = [f"K{i}" for i in range(1, 17)] + [f"L{i}" for i in range(1, 8)]
    classes += [f"M{i}" for i in (1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13)] + [f"X{i}" for i in range(1, 6)]
    words = set(said.replace(",", " ").replace(";", " ").replace("(", " ").split())
    assert [c for c in classes if c not in words] == []
