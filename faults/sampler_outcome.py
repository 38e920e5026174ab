"""Faults of the outcome: what is handed out is not what a right rule decided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from faults.sampler_fault import SamplerFault
from faults.sampler_types import Change, Draws
from lumotree.select_types import Coins, CoinSampler, Step, Walks


def bonus_from_parent(step: Step, walks: Walks, draws: Draws) -> Walks:
    """A bonus at a leaf is drawn from the row of the leaf's parent."""
    bonus = walks.bonus.clone()
    for row in step.tree.active_rows[1:]:
        here = torch.nonzero(walks.last == row)[:, 0]
        if len(here) and not step.tree.active_children(row):
            bonus[here] = inverse(step.target[step.tree.parents[row]], draws.residual[here, row])
    return replace(walks, bonus=bonus)


def inverse(law: Tensor, coins: Tensor) -> Tensor:
    """Inverse CDF: law `[V]` at coins `[n]`; tokens with probability only."""
    cdf = torch.cumsum(law, 0)
    threshold = torch.minimum(coins * cdf[-1], torch.nextafter(cdf[-1], torch.zeros_like(cdf[-1])))
    return torch.searchsorted(cdf, threshold.contiguous(), right=True)


def bonus_greedy(step: Step, walks: Walks, draws: Draws) -> Walks:
    """The pending token is the first argmax of the last row's target, also after a refusal."""
    best = torch.from_numpy(np.argmax(step.target.cpu().numpy(), axis=1))
    return replace(walks, bonus=best[walks.last])


def cartesian_write(step: Step, walks: Walks, draws: Draws) -> Walks:
    """Walks are a batch of two: the first overwrites the second's token where they end in different rows."""
    bonus = walks.bonus.clone()
    first, second = walks.last[:-1:2], walks.last[1::2]
    bonus[1::2] = torch.where(first == second, bonus[1::2], walks.bonus[:-1:2])
    return replace(walks, bonus=bonus)


class LastArgmax:
    """A sampler that sees the vocabulary backwards: the last of tied maxima comes first. A `CoinSampler`."""

    def __init__(self, sampler: CoinSampler) -> None:
        self.sampler = sampler

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        """Select on the step with its vocabulary reversed, and reverse the tokens that come back."""
        top = step.target.shape[1] - 1
        laws = None if step.laws is None else step.laws.flip(1)
        walks = self.sampler.select(Step(step.tree, step.target.flip(1), laws), top - tokens, coins)
        return Walks(walks.last, top - walks.bonus, walks.refused, tokens)


FAULTS = [
    SamplerFault(
        "bonus_from_parent",
        "when a whole path is accepted the bonus is drawn from the row of the last accepted row's parent",
        "defect-classes K9 (bonus_from_parent_row)",
        "outcome",
        Change(outcome=bonus_from_parent),
    ),
    SamplerFault(
        "bonus_greedy",
        "the pending token is always the argmax of the last row's target",
        "issue item 6",
        "outcome",
        Change(outcome=bonus_greedy),
    ),
    SamplerFault(
        "cartesian_write",
        "one request of a batch of two overwrites the other's token where they end in different rows",
        "defect-classes K12 (cartesian_write)",
        "outcome",
        Change(outcome=cartesian_write),
    ),
    SamplerFault(
        "argmax_last",
        "the last of tied maxima is taken instead of the first",
        "defect-classes M10 (argmax_last_wins)",
        "outcome",
        Change(rule=LastArgmax),
        needs="greedy",
    ),
]
