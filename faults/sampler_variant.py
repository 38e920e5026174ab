"""Multi-round rejection that is right but for one operation: the rule of `lumotree`, with another residual at a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lumotree.select import cut_walks
from lumotree.select_prepare import PreparedStep, check_coins, check_tokens, prepare
from lumotree.select_residual import Residual, take
from lumotree.select_rules import multi_round_with
from lumotree.select_types import Coins, Step, Walks

Kind = Literal["right", "unclamped", "unnormalised", "target", "target-draw", "softmax"]


@dataclass(frozen=True)
class VariantRule:
    """Multi-round rejection with one flaw. A `CoinSampler`.

    accept: "ratio" (right), "one" = the test divides by 1, "all" = every draft is accepted. residual after a refusal:
    "unclamped" = p - q keeps its negative parts (a draw takes the first token whose running sum exceeds the coin),
    "unnormalised" = max(p - q, 0) is not divided by its sum (a coin beyond it draws the vocabulary's last token),
    "target" = p again, for later siblings and for the correction, "target-draw" = for the correction alone, "softmax"
    = the correction is drawn from softmax(max(p - q, 0)), at rows where that is one law: fixed drafts or one child.
    declared law of later siblings: "unrenormalised" = its sum left below 1, "replaced" = the first child's law.
    backwards: siblings are tried from last to first, each against the law that its place in this order would have.
    again: a sibling that repeats a refused token is tried against the weights from before that refusal.
    """

    accept: Literal["ratio", "one", "all"] = "ratio"
    residual: Kind = "right"
    declared: Literal["right", "unrenormalised", "replaced"] = "right"
    backwards: bool = False
    again: bool = False

    def select(self, step: Step | PreparedStep, tokens: Tensor, coins: Coins) -> Walks:
        """Select on W walks. Arguments and errors as in `lumotree.select.Rule.select`."""
        prepared = step if isinstance(step, PreparedStep) else prepare(step)
        check_tokens(prepared, tokens, check_coins(coins, prepared.tree.n), True)
        last, bonus = multi_round_with(self._start, prepared, tokens, coins, self.backwards)
        return cut_walks(prepared.tree, last, bonus, tokens, None, None)

    def _start(self, prepared: PreparedStep, row: int, drafts: Tensor) -> Residual:
        flawed = _Flawed.at(prepared, row, drafts)
        flawed.flaw = self
        return flawed


@dataclass
class _Flawed(Residual):
    """What a `VariantRule` believes to be left at a row. before: fixed drafts tried so far, with weights and mass from
    before that."""

    flaw: VariantRule = field(default_factory=VariantRule)
    before: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    def keep(self, kept: Tensor) -> None:
        """Forget the other walks."""
        super().keep(kept)
        self.before = [(token, take(weights, kept), take(mass, kept)) for token, weights, mass in self.before]

    def ratio(self, tokens: Tensor, reach: Tensor) -> Tensor:
        """As `Residual.ratio`, or not divided, or certain."""
        if self.flaw.again and self.law is None:
            self._restore(int(tokens[0]))
        if self.flaw.accept == "all":
            return torch.ones_like(self.mass)
        return self.chance(tokens) if self.flaw.accept == "one" else super().ratio(tokens, reach)

    def _restore(self, token: int) -> None:
        """Go back to what was left before the token was refused for the first time."""
        for refused, weights, mass in self.before:
            if refused == token:
                self.weights, self.mass = weights, mass
                break
        self.before.append((token, self.weights, self.mass))

    def refuse(self, tokens: Tensor, reach: Tensor) -> Tensor:
        """As `Residual.refuse`, or one of its steps left out."""
        kind = self.flaw.residual
        if kind not in ("target", "unclamped", "unnormalised"):
            return super().refuse(tokens, reach)
        asked = self.asked(tokens)
        if kind == "target":
            return reach
        left = self.weights - (asked if kind == "unclamped" else torch.minimum(asked, self.weights)).round_()
        total = self.mass - self.weights.clamp(min=0).sum(1) + left.clamp(min=0).sum(1)
        stays = total <= 0  # nothing is left: a refusal of probability 0
        self.weights = torch.where(stays[:, None], self.weights, left)
        if kind == "unclamped":
            self.mass = torch.where(stays, self.mass, total)
        return reach

    def _remove(self, place: Tensor, found: Tensor) -> None:
        mass = self.law_mass
        if self.flaw.declared != "replaced":
            super()._remove(place, found)
        if self.flaw.declared != "right":
            self.law_mass = mass.expand(len(self.law_mass))

    def draw(self, coins: Tensor) -> Tensor:
        """As `Residual.draw`, from what the flaw leaves; a coin beyond all sums draws the vocabulary's last token."""
        children = len(self.prepared.tree.active_children(self.row))
        if self.flaw.residual == "softmax" and children and (self.law is None or children == 1):
            return self._softmax(coins)
        if self.flaw.residual == "unclamped":
            return self._first_above(coins)
        if self.flaw.residual == "target-draw":
            self.weights, self.mass = self.start, self.prepared.cdf[self.row, -1:]
        return super().draw(coins).clamp(max=self.prepared.vocab - 1)

    def _softmax(self, coins: Tensor) -> Tensor:
        if not len(coins):
            return coins.to(torch.int64)
        lost = (self.start - self.weights)[0]
        residual = self.prepared.weights[self.row].index_add(0, self.tokens[0], lost, alpha=-1)
        cdf = torch.cumsum(torch.exp(residual / self.mass[0]), 0)
        return torch.searchsorted(cdf, coins * cdf[-1], right=True).clamp(max=len(cdf) - 1)

    def _first_above(self, coins: Tensor) -> Tensor:
        """First token whose running sum exceeds coin x mass, where sums may fall again."""
        cdf, target, tokens = self.prepared.cdf[self.row], self.prepared.weights[self.row], self.tokens[0]
        threshold, size = coins * self.mass, len(tokens)
        lost = torch.cumsum(self.start - self.weights, 1).expand(len(coins), -1)
        before = torch.cat([lost.new_zeros(len(coins), 1), lost], 1)
        sums = lost.new_empty(len(coins), 2 * size + 1)
        sums[:, ::2] = torch.cat([cdf[tokens] - target[tokens], cdf[-1:]]) - before  # off the support, up to a token
        sums[:, 1::2] = cdf[tokens] - lost  # at one of its tokens
        place = torch.searchsorted(torch.cummax(sums, 1).values, threshold[:, None], right=True)[:, 0]
        gap = (place // 2).clamp(max=size)
        off = torch.searchsorted(cdf, threshold + before.gather(1, gap[:, None])[:, 0], right=True)
        on = tokens[gap.clamp(max=size - 1)] if size else off
        found = torch.where(place % 2 == 1, on, off)
        return torch.where(place < sums.shape[1], found, len(cdf) - 1)
