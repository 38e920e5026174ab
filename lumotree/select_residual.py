"""What is left at one row for many walks at once: the vectorised `select_reference.RowLaw`.

Only the weights on a *support* of K tokens can change (the declared law's tokens, or the children's tokens for point
masses); everywhere else the residual is the prepared target. State is `[n, K]`, or `[1, K]` where it is the same for
every walk (fixed drafts), and then costs nothing per walk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lumotree.select_prepare import PreparedStep


def take(state: Tensor, keep: Tensor) -> Tensor:
    """The kept walks of `state` `[n, ...]`; a state shared by all walks, `[1, ...]`, stays as it is."""
    return state if state.shape[0] == 1 else state[keep]


@dataclass
class Residual:
    """Residual of one row after some refusals; b is n or 1; weights and masses in units of 2^-52.

    prepared, row: where it comes from. tokens int64 `[b or 1, K]` support, ascending; start `[b or 1, K]` target
    weights on it; weights `[b, K]` what is left of them; mass `[b]` sum of all weights, off the support included;
    law `[b, K]` unnormalised draft law, None for point masses; law_mass `[b]`; later: children that may still be tried.
    """

    prepared: PreparedStep
    row: int
    tokens: Tensor
    start: Tensor
    weights: Tensor
    mass: Tensor
    law: Tensor | None
    law_mass: Tensor
    later: int

    @classmethod
    def at(cls, prepared: PreparedStep, row: int, drafts: Tensor) -> Self:
        """The state before the first child is tried; drafts: int64 `[n or 1, N]`."""
        mass, children = prepared.cdf[row, -1:], prepared.tree.active_children(row)
        if prepared.laws is not None and row in prepared.laws:
            law = prepared.laws[row]
            start, weights = law.target[None], law.weights[None]
            return cls(prepared, row, law.tokens[None], start, start, mass, weights, law.cdf[-1:], len(children))
        # A repeated token is always found at its first place, so its weight is lost once.
        tokens = drafts[:, list(children)].sort(dim=1).values
        start = prepared.weights[row][tokens]
        return cls(prepared, row, tokens, start, start, mass, None, mass, len(children))

    def keep(self, kept: Tensor) -> None:
        """Forget the other walks; kept: bool `[n]` or indices."""
        self.tokens, self.start, self.weights = (
            take(self.tokens, kept),
            take(self.start, kept),
            take(self.weights, kept),
        )
        self.mass, self.law_mass = take(self.mass, kept), take(self.law_mass, kept)
        self.law = None if self.law is None else take(self.law, kept)

    def _place(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens `[n or 1]` stand in the support, `[b, 1]`, and whether they do, bool `[b]`."""
        if self.tokens.shape[0] == 1:
            place = torch.searchsorted(self.tokens[0], tokens)[:, None]
        else:
            place = torch.searchsorted(self.tokens, tokens[:, None].expand(self.tokens.shape[0], 1).contiguous())
        place = place.clamp_(max=self.tokens.shape[1] - 1)
        return place, (_pick(self.tokens, place) == tokens)

    def chance(self, tokens: Tensor) -> Tensor:
        """What is left for the drafted tokens `[n or 1]`, p, float64 `[b]`."""
        return self._chance(tokens, *self._place(tokens))

    def _chance(self, tokens: Tensor, place: Tensor, found: Tensor) -> Tensor:
        return torch.where(found, _pick(self.weights, place), self.prepared.weights[self.row][tokens]) / self.mass

    def ratio(self, tokens: Tensor, reach: Tensor) -> Tensor:
        """min(1, reach * p / q) of the drafted tokens `[n or 1]`, float64 `[b]`; reach `[b]`."""
        place, found = self._place(tokens)
        p = self._chance(tokens, place, found) * reach
        if self.law is None:
            return p.clamp(max=1.0)
        q = torch.where(found, _pick(self.law, place), 0.0) / self.law_mass
        return torch.where(q == 0, (p > 0).to(p.dtype), (p / q).clamp(max=1.0))

    def refuse(self, tokens: Tensor, reach: Tensor) -> Tensor:
        """Refuse the drafted tokens `[n or 1]` of all walks held; return the new reach `[b]`."""
        asked = self.asked(tokens)
        if not bool((reach == 1).all()):
            asked = asked / torch.where(reach == 0, 1.0, reach)[:, None]  # with reach 0 everything stays, see below
        cuts = torch.minimum(asked, self.weights).round_()
        left = self.mass - cuts.sum(dim=1)
        stays = (left == 0) | (reach == 0)
        if bool(stays.any()):
            cuts = cuts.masked_fill(stays[:, None], 0.0)
        remaining = reach * left / self.mass
        self.weights = torch.sub(self.weights, cuts, out=cuts)  # cuts has the shape of what is left
        self.mass = torch.where(stays, self.mass, left)
        return torch.where(stays, (reach == 1).to(reach.dtype), remaining / (remaining + (1 - reach)))

    def asked(self, tokens: Tensor) -> Tensor:
        """The declared law q of the drafted tokens, in the scale of what is left: `[b, K]`. A child with these tokens
        has then been tried, and they leave the law of its later siblings."""
        place, found = self._place(tokens)
        self.later -= 1
        if self.law is None:  # a point mass asks for everything
            count = max(len(place), len(self.mass))
            everything = self.mass.expand(count)[:, None]
            return self.mass.new_zeros(count, self.tokens.shape[1]).scatter_(1, place.expand(count, 1), everything)
        asked = (self.law / self.law_mass[:, None]).mul_(self.mass[:, None])
        if self.later:  # nothing is drafted after the last child: its law is not asked for again
            self._remove(place, found)
        return asked

    def _remove(self, place: Tensor, found: Tensor) -> None:
        """Take the tokens at `place` out of the draft law."""
        assert self.law is not None
        gone = torch.where(found, _pick(self.law, place), 0.0)
        self.law_mass = self.law_mass - gone
        law = self.law.expand(len(place), -1)
        self.law = law.scatter(1, place, (_pick(law, place) - gone)[:, None])

    def draw(self, coins: Tensor) -> Tensor:
        """Inverse CDF of the residual at residual coins `[n]`: int64 `[n]`, tokens of positive weight.

        The residual's CDF is the target's minus what the support has lost so far. The loss is constant between two
        support tokens, so the first search finds the pair and the second the token.
        """
        cdf = self.prepared.cdf[self.row]
        threshold = torch.floor(coins * self.mass)
        if not self.tokens.shape[1]:
            return torch.searchsorted(cdf, threshold, right=True)
        lost = torch.cumsum(self.start - self.weights, dim=1)
        kept = cdf[self.tokens] - lost
        if len(kept) == 1:
            pairs = torch.searchsorted(kept[0], threshold, right=True)[:, None]
        else:
            pairs = torch.searchsorted(kept, threshold[:, None], right=True)
        before = torch.where(pairs[:, 0] > 0, _pick(lost, (pairs - 1).clamp_(min=0)), 0.0)
        return torch.searchsorted(cdf, threshold + before, right=True)


def _pick(values: Tensor, place: Tensor) -> Tensor:
    """values `[b or 1, K]` at place `[n, 1]`: `[n]`."""
    return values.expand(len(place), -1).gather(1, place)[:, 0]
