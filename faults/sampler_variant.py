"""Multi-round rejection that is right but for one operation; it shares no arithmetic with the right rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lumotree.select import cut_walks
from lumotree.select_prepare import PreparedStep, check_coins, check_tokens, prepare
from lumotree.select_types import Coins, Step, Walks

Residual = Literal["right", "unclamped", "unnormalised", "target", "target-draw", "softmax"]
_CHUNK = 8192  # walks at a time: [n, 2K + 1] numbers a draw


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
    residual: Residual = "right"
    declared: Literal["right", "unrenormalised", "replaced"] = "right"
    backwards: bool = False
    again: bool = False

    def select(self, step: Step | PreparedStep, tokens: Tensor, coins: Coins) -> Walks:
        """Select on W walks. Arguments and errors as in `lumotree.select.Rule.select`."""
        prepared = step if isinstance(step, PreparedStep) else prepare(step)
        check_tokens(prepared, tokens, check_coins(coins, prepared.tree.n), True)
        count = len(coins.accept)
        last, bonus = torch.zeros(2, count, dtype=torch.int64)
        for start in range(0, count, _CHUNK):
            part = slice(start, start + _CHUNK)
            drafts = tokens.expand(count, -1)[part]
            last[part], bonus[part] = self._walk(prepared, drafts, Coins(coins.accept[part], coins.residual[part]))
        return cut_walks(prepared.tree, last, bonus, tokens, None, None)

    def _walk(self, prepared: PreparedStep, drafts: Tensor, coins: Coins) -> tuple[Tensor, Tensor]:
        last, bonus = torch.zeros(2, len(drafts), dtype=torch.int64)
        for row in prepared.tree.active_rows:
            here = torch.nonzero(last == row)[:, 0]
            if not len(here):
                continue
            children = prepared.tree.active_children(row)
            state = _State.at(prepared, row, drafts[here])
            before: list[tuple[int, Tensor, Tensor]] = []
            for child in reversed(children) if self.backwards else children:
                tokens = drafts[here, child]
                if self.again and state.law is None:
                    state.restore(before, tokens)
                    before.append((int(tokens[0]) if len(tokens) else -1, state.weights.clone(), state.mass.clone()))
                refused = ~(coins.accept[here, child] < self._chance(state, tokens))
                last[here[~refused]] = child
                here, tokens = here[refused], tokens[refused]
                state.keep(refused)
                state.refuse(tokens, self.residual, self.declared)
                before = [(token, weights[refused], mass[refused]) for token, weights, mass in before]
            bonus[here] = self._draw(state, coins.residual[here, row], len(children))
        return last, bonus

    def _chance(self, state: _State, tokens: Tensor) -> Tensor:
        if self.accept == "all":
            return torch.ones(len(tokens), dtype=torch.float64)
        p, q = state.at_tokens(tokens)
        if self.accept == "one":
            return p.clamp(min=0)
        safe = torch.where(q > 0, q, torch.ones_like(q))
        return torch.where(q > 0, p / safe, (p > 0).to(p.dtype)).clamp(0, 1)

    def _draw(self, state: _State, coins: Tensor, children: int) -> Tensor:
        if not len(coins):
            return torch.zeros(0, dtype=torch.int64)
        if self.residual == "target-draw":
            state.weights = state.start.expand_as(state.weights)
            state.mass = torch.full_like(state.mass, float(state.cdf[-1]))
        if self.residual == "softmax" and children and (state.law is None or children == 1):
            return _softmax_draw(state, coins)
        return state.draw(coins)


@dataclass
class _State:
    """What is left at one row, n walks. tokens int64 `[K]` ascending; start `[K]`, cdf `[V]` and target `[V]`: the
    row's; weights `[n, K]` left, in the target's scale; mass `[n]`: what they are divided by; law `[n, K]` or None
    for point masses, law_mass `[n]`."""

    target: Tensor
    cdf: Tensor
    tokens: Tensor
    start: Tensor
    weights: Tensor
    mass: Tensor
    law: Tensor | None
    law_mass: Tensor

    @classmethod
    def at(cls, prepared: PreparedStep, row: int, drafts: Tensor) -> _State:
        count = len(drafts)
        known = None if prepared.laws is None else prepared.laws.get(row)
        children = list(prepared.tree.active_children(row))
        tokens = torch.unique(drafts[:, children]) if known is None else known.tokens
        target, cdf = prepared.weights[row] * 2.0**-52, prepared.cdf[row] * 2.0**-52
        weights = target[tokens].expand(count, -1).clone()
        law = None if known is None else (known.weights * 2.0**-52).expand(count, -1).clone()
        law_mass = torch.ones(count, dtype=torch.float64) if law is None else law.sum(1)
        mass = cdf[-1].expand(count).clone()
        return cls(target, cdf, tokens, target[tokens], weights, mass, law, law_mass)

    def _place(self, tokens: Tensor) -> Tensor:
        return torch.searchsorted(self.tokens, tokens).clamp(max=len(self.tokens) - 1)[:, None]

    def at_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """p and q of the drafted tokens `[n]`. A token outside the law's support has q = 0 and the target's weight."""
        place = self._place(tokens)
        found = self.tokens[place[:, 0]] == tokens
        p = torch.where(found, self.weights.gather(1, place)[:, 0], self.target[tokens]) / self.mass
        if self.law is None:
            return p, torch.ones_like(p)
        return p, torch.where(found, self.law.gather(1, place)[:, 0] / self.law_mass, 0.0)

    def keep(self, kept: Tensor) -> None:
        self.weights, self.mass, self.law_mass = self.weights[kept], self.mass[kept], self.law_mass[kept]
        self.law = None if self.law is None else self.law[kept]

    def restore(self, before: list[tuple[int, Tensor, Tensor]], tokens: Tensor) -> None:
        """Go back to the weights from before the (fixed) token was refused for the first time."""
        for token, weights, mass in before:
            if self.law is None and len(tokens) and token == int(tokens[0]):
                self.weights, self.mass = weights, mass
                return

    def refuse(self, tokens: Tensor, residual: Residual, declared: str) -> None:
        """Refuse the drafted tokens `[n]`."""
        if not len(tokens):
            return
        place = self._place(tokens)
        if self.law is None:
            cuts = torch.zeros_like(self.weights).scatter_(1, place, self.mass[:, None])
        else:
            cuts = self.law * (self.mass / self.law_mass)[:, None]
            self._remove(place, self.tokens[place[:, 0]] == tokens, declared)
        if residual == "target":
            return
        left = self.weights - (cuts if residual == "unclamped" else torch.minimum(cuts, self.weights))
        total = self.mass - (self.weights - left.clamp(min=0)).sum(1) - _negative(self.weights)
        stays = total <= 1e-13  # nothing is left: a refusal of probability 0
        self.weights = torch.where(stays[:, None], self.weights, left)
        if residual != "unnormalised":
            self.mass = torch.where(stays, self.mass, total)

    def _remove(self, place: Tensor, found: Tensor, declared: str) -> None:
        assert self.law is not None
        if declared == "replaced":
            return
        gone = torch.where(found, self.law.gather(1, place)[:, 0], 0.0)
        self.law.scatter_add_(1, place, -gone[:, None])
        if declared == "right":
            self.law_mass = self.law_mass - gone

    def draw(self, coins: Tensor) -> Tensor:
        """First token whose running sum exceeds coin x mass; the vocabulary's last where none does."""
        threshold = (coins * self.mass)[:, None]
        lost = torch.cumsum(self.start - self.weights, 1)
        before = torch.cat([lost.new_zeros(len(coins), 1), lost], 1)  # [n, K + 1]
        ends = torch.cat([self.cdf[self.tokens] - self.target[self.tokens], self.cdf[-1:]]) - before
        sums = torch.empty(len(coins), 2 * len(self.tokens) + 1, dtype=torch.float64)
        sums[:, ::2] = ends  # between two tokens of the support, off it
        sums[:, 1::2] = self.cdf[self.tokens] - lost  # at one of them
        place = torch.searchsorted(torch.cummax(sums, 1).values, threshold, right=True)[:, 0]
        gap = (place // 2).clamp(max=len(self.tokens))
        off = torch.searchsorted(self.cdf, threshold[:, 0] + before.gather(1, gap[:, None])[:, 0], right=True)
        on = self.tokens[gap.clamp(max=len(self.tokens) - 1)] if len(self.tokens) else off
        inside = place < sums.shape[1]
        return torch.where((place % 2 == 1) & inside, on, torch.where(inside, off, len(self.cdf) - 1))


def _negative(weights: Tensor) -> Tensor:
    """What negative weights took off a mass that counts positive ones only."""
    return -weights.clamp(max=0).sum(1)


def _softmax_draw(state: _State, coins: Tensor) -> Tensor:
    residual = state.target.clone()
    residual[state.tokens] = state.weights[0]
    cdf = torch.cumsum(torch.exp(residual / state.mass[0]), 0)
    return torch.searchsorted(cdf, coins * cdf[-1], right=True).clamp(max=len(cdf) - 1)
