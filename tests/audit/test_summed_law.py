"""Summing a sampler's law: the shipped rules match, shifted breakpoints and shared coins show, the bound is honest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from audit import summed_law as summed_module
from audit.fault_laws import fault_law
from audit.law_rules import RULES
from audit.law_step import law_of_step
from audit.sampler_cases import small_step
from audit.summed_law import EDGE, MARGIN, SummedLaw, summed_law
from faults.sampler import SAMPLER_FAULTS
from lumotree import select
from lumotree.backends.peer_samplers import _single
from lumotree.errors import InputError
from lumotree.select_types import Coins, Step, Walks
from lumotree.tree import Tree

SAMPLERS = {
    "greedy": select.GREEDY,
    "naive": select.NAIVE,
    "multiround": select.MULTI_ROUND,
    "traversal": select.TRAVERSAL,
}
TREES = ([-1, 0], [-1, 0, 0], [-1, 0, 1], [-1, 0, 0, 1], [-1, 0, 1, 1])


def a_step(parents: list[int], vocab: int = 3, sampled: bool = False, seed: int = 7) -> Step:
    rng = np.random.default_rng(seed)
    target, laws = (torch.from_numpy(rng.dirichlet(np.ones(vocab), len(parents))) for _ in range(2))
    tokens = rng.permutation(vocab).tolist() * 2
    return Step(Tree.make(parents, tokens=tokens[: len(parents)]), target, laws if sampled else None)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_shipped_rules_have_the_exact_law(name: str, parents: list[int]) -> None:
    for sampled in (False, True):
        found = summed_law(SAMPLERS[name], a_step(parents, sampled=sampled and len(parents) < 4), RULES[name], 1 << 11)
        assert found.unresolved == 0 and found.odd == ""
        assert found.bound < 1e-9
        assert sum(found.law.values()) == pytest.approx(1, abs=1e-12)
        assert found.walks == found.cells * (1 + 4 * len(parents))


def test_rows_with_zeros_and_ties() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [1.0, 0.0, 0.0]], dtype=torch.float64)
    step = Step(Tree.make([-1, 0, 0], tokens=[0, 2, 0]), target)
    for name, sampler in SAMPLERS.items():
        assert summed_law(sampler, step, RULES[name], 1 << 11).bound < 1e-9


@dataclass(frozen=True)
class Changed:
    """The multi-round rule with its coins or its outcome changed."""

    fault: str

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        accept, residual = coins.accept, coins.residual
        if self.fault == "half":
            residual = torch.full_like(residual, 0.5)
        elif self.fault == "accept-zero":
            accept = torch.zeros_like(accept)
        elif self.fault == "shifted":  # accepts with coins below threshold + 0.03
            accept = (accept - 0.03).clamp(min=0)
        elif self.fault == "wobbling":  # as "shifted", to the last bits by another coin, as rounded sums are
            accept = (accept - 0.03 - 6 * EDGE * residual[:, :1]).clamp(min=0)
        elif self.fault == "reused":
            residual = accept[:, [1, 1, 1]]
        elif self.fault == "mirrored":  # another sampler with the same law
            residual = (1 - 2.0**-53) - residual
        elif self.fault == "warm":
            step = replace(step, target=step.target**0.9 / (step.target**0.9).sum(1, keepdim=True))
        walks = select.MULTI_ROUND.select(step, tokens, Coins(accept, residual))
        if self.fault == "outside":
            walks = replace(walks, bonus=torch.where(walks.last == 0, step.target.shape[1], walks.bonus))
        return walks


def summed(fault: str, budget: int = 1 << 13) -> SummedLaw:
    return summed_law(Changed(fault), a_step([-1, 0, 1]), RULES["multiround"], budget)


@pytest.mark.parametrize("fault", ["half", "accept-zero", "shifted", "reused", "warm", "outside"])
def test_a_changed_sampler_is_seen(fault: str) -> None:
    found = summed(fault)
    assert found.tv > 0.002 and found.unresolved == 0


def test_a_shifted_threshold_is_located_and_measured() -> None:
    """Thresholds 0.03 higher, bonus laws unchanged: the ends move by what follows from that."""
    found = summed("shifted")
    assert "accept coin of row" in found.odd
    stop = law_of_step(a_step([-1, 0, 1]), RULES["multiround"]).stop
    first, second = stop[1:].sum(), stop[2] / stop[1:].sum()
    raised, lifted = min(1, first + 0.03), min(1, second + 0.03)
    moved = np.array([1 - raised, raised * (1 - lifted), raised * lifted])
    assert found.tv == pytest.approx(np.abs(moved - stop).sum() / 2, abs=1e-9)


def test_a_change_that_wobbles_in_its_last_bits_is_one_breakpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Located anew in many cells, EDGEs apart: no cell of either side may count as unresolved for it."""
    found = summed("wobbling")
    assert found.unresolved == 0
    assert found.tv == pytest.approx(summed("shifted").tv, abs=1e-9)
    monkeypatch.setattr(summed_module, "MARGIN", EDGE)  # asked nearer to the ends than the places agree
    assert summed("wobbling").unresolved > 0.01


@pytest.mark.parametrize("name", ["fork-3", "chain-3"])
def test_a_test_against_the_target_alone_is_off_for_certain(name: str) -> None:
    step = small_step(name, True)
    faulty = SAMPLER_FAULTS["q_one"].wrap(select.MULTI_ROUND)
    found = summed_law(faulty, step, RULES["multiround"], 1 << 14)  # type: ignore[arg-type]
    assert found.unresolved < 1e-6
    assert found.tv >= fault_law(SAMPLER_FAULTS["q_one"], step).tv - 1e-6


class OneCoinARow:
    """The naive rule's law from other coins: the accept coin of a row's first child chooses among the children, against
    the running sum of their target; the residual coin of the last row draws from what is left. As sglang's kernel, in
    float32 as well, so that its breakpoints lie beside those of the exact law."""

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        count, tree, target = len(coins.accept), step.tree, step.target.float()
        accept, residual = _single(coins.accept), _single(coins.residual)
        drafts = tokens.expand(count, -1)
        last = torch.zeros(count, dtype=torch.int64)
        left = target[None].repeat(count, 1, 1)
        for row in tree.active_rows:
            here = torch.nonzero(last == row)[:, 0]
            running = torch.zeros(len(here))
            for child in tree.active_children(row):
                token = drafts[here, child]
                running = running + target[row][token]
                taken = (last[here] == row) & (accept[here, tree.active_children(row)[0]] < running)
                last[here[taken]] = child
                left[here, row, token] = 0.0
        end = torch.arange(count)
        cdf = torch.cumsum(left[end, last], 1)
        threshold = residual[end, last] * cdf[:, -1]
        bonus = torch.searchsorted(cdf, threshold[:, None], right=True)[:, 0]
        inner = torch.tensor([bool(tree.active_children(row)) for row in range(tree.n)])
        return Walks(last, bonus, inner[last], tokens)


def test_expected_breakpoints_that_a_sampler_does_not_have_make_room_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = small_step("mixed-4", True)
    step.target[1] = torch.tensor([0.134, 0.01, 0.856], dtype=torch.float64)
    found = summed_law(OneCoinARow(), step, RULES["naive"], 1 << 14)
    assert found.unresolved == 0 and found.bound < 1e-6
    monkeypatch.setattr(summed_module, "_needed", lambda sides, answers: list(sides))
    assert summed_law(OneCoinARow(), step, RULES["naive"], 1 << 14).unresolved > 0.01


@pytest.mark.parametrize("budget", [150, 1 << 13])
def test_bound_covers_the_true_deviation(budget: int) -> None:
    """The law of "warm" is known: the summed one is off by what was left unresolved at most."""
    step = a_step([-1, 0, 1])
    warm = replace(step, target=step.target**0.9 / (step.target**0.9).sum(1, keepdim=True))
    masses = [law_of_step(each, RULES["multiround"]).mass for each in (warm, step)]
    true = float(np.abs(masses[0] - masses[1]).sum() / 2)
    found = summed("warm", budget)
    assert true <= found.bound
    assert abs(found.tv - true) <= found.unresolved + found.edges
    assert (found.unresolved > 0) == (budget == 150)


def test_a_sampler_with_the_same_law_and_other_pieces_passes() -> None:
    found = summed("mirrored")
    assert found.bound < 1e-9 and "residual coin" in found.odd


def test_outside_the_vocabulary_is_an_outcome_of_its_own() -> None:
    assert any(tokens[-1] == 3 for tokens, _, _ in summed("outside").law)


def test_edges_are_small_and_counted() -> None:
    found = summed("none")
    assert 0 < found.edges < 2000 * MARGIN


def test_too_wide_a_step_is_refused() -> None:
    with pytest.raises(InputError, match="budget"):
        summed_law(select.NAIVE, a_step([-1, 0, 0, 0, 0], vocab=9), RULES["naive"], 1 << 10)
