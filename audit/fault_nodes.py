"""What a faulty multi-round rule does at one row, exactly: every draft of the siblings is followed.

Written from the definition of each flaw, apart from `faults.sampler_variant`. p is kept on the tokens that some sibling
may carry (the *support* [S]); off it, the residual is the target over one mass per prefix. What is left after a refusal
depends on the siblings tried before, P ordered prefixes, so a row costs about P * S * S operations (P = 4,096 and
S = 64 for three children).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from audit.rule_law import Floats, Ints
from lumotree.errors import InputError

Draw = Literal["fresh", "half", "accept", "draft", "target", "softmax", "grid"]

SLICE = 256  # prefixes at a time: [P, S, S] numbers stay at 8 MB
GRID = 2.0**24
FEW = 8


@dataclass(frozen=True)
class Flaw:
    """What is wrong; the defaults are right.

    accept: the test divides by "one" instead of q, takes "all" drafts, has a coin of "zero", or one on the "grid" of
    2^-24, or the "draft" coin. residual, declared, backwards, again: as in `faults.sampler_variant.VariantRule`. draw:
    the bonus coin is "half", the refused child's "accept" coin, its "draft" coin, on the "grid"; or the bonus comes
    from the "target" (after refusals) or a "softmax".
    """

    accept: Literal["ratio", "one", "all", "zero", "grid", "draft"] = "ratio"
    residual: Literal["right", "unclamped", "unnormalised", "target"] = "right"
    declared: Literal["right", "unrenormalised", "replaced"] = "right"
    draw: Draw = "fresh"
    backwards: bool = False
    again: bool = False


@dataclass(frozen=True, eq=False)
class Drafts:
    """How the k siblings of a row are drafted. tokens [S] ascending: the support; declared [S]: law that the rule
    takes the first for, None for point masses; joint: P(siblings' places), an array of k axes [S]."""

    tokens: Ints
    declared: Floats | None
    joint: Floats

    @property
    def children(self) -> int:
        """k."""
        return self.joint.ndim


def sibling_joint(law: Floats, children: int) -> Floats:
    """Return P(places of `children` siblings drawn from law [S] without replacement), `children` axes [S]."""
    size, joint = len(law), np.ones(())
    q = law / law.sum()
    for index in range(children):
        places = np.indices((size,) * index)
        left = np.broadcast_to(q, (*joint.shape, size)).copy()
        for axis in range(index):
            np.put_along_axis(left, places[axis][..., None], 0.0, -1)
        total = left.sum(-1, keepdims=True)
        joint = joint[..., None] * np.divide(left, total, out=np.zeros_like(left), where=total > 0)
    return joint


def fixed_joint(places: Sequence[int], size: int) -> Floats:
    """Return the point mass on the siblings' places."""
    joint = np.zeros((size,) * len(places))
    joint[tuple(places)] = 1.0
    return joint


@dataclass(eq=False)
class _Prefixes:
    """State after some refusals. drawn [P, i]: places of the siblings tried; weight [P]: P(not yet accepted, given
    those drafts); p [P, S], mass [P]: residual on the support and what it is divided by; before: p and mass by sibling.
    """

    drawn: NDArray[np.int64]
    weight: Floats
    p: Floats
    mass: Floats


def node_law(target: Floats, drafts: Drafts, flaw: Flaw) -> tuple[list[Floats], Floats]:
    """Return the accepted mass [S] of each child in row order and the bonus [V]; together they sum to 1."""
    k, size = drafts.children, len(drafts.tokens)
    joint = drafts.joint.transpose(tuple(reversed(range(k)))) if flaw.backwards else drafts.joint
    state = _Prefixes(np.zeros((1, 0), np.int64), np.ones(1), target[drafts.tokens][None], np.full(1, target.sum()))
    accepted, last = [], None
    history: list[_Prefixes] = []
    for index in range(k):
        marginal = joint.sum(tuple(range(index + 1, k))).reshape(-1, size)[_codes(state.drawn, size)]
        if flaw.again:
            state = _restored(state, history, marginal)
        q = _declared(drafts, state.drawn, flaw)
        chance, ratio = _chance(state, q, drafts, flaw, marginal)
        accepted.append((marginal * state.weight[:, None] * chance).sum(0))
        history.append(state)
        last = (state, ratio, marginal)
        state = _refused(state, q, chance, marginal, index + 1 < k or drafts.declared is None, flaw)
    if flaw.backwards:
        accepted.reverse()
    return accepted, _bonus(target, drafts, state, last, flaw)


def _codes(drawn: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    code = np.zeros(len(drawn), np.int64)
    for column in drawn.T:
        code = code * size + column
    return code


def _restored(state: _Prefixes, history: list[_Prefixes], marginal: Floats) -> _Prefixes:
    """Fixed drafts: if this token was refused before, go back to what was left before that."""
    if len(state.drawn) != 1:
        return state
    place = int(np.argmax(marginal[0]))
    for index, earlier in enumerate(history):
        if state.drawn[0, index] == place:
            return _Prefixes(state.drawn, state.weight, earlier.p, earlier.mass)
    return state


def _declared(drafts: Drafts, drawn: NDArray[np.int64], flaw: Flaw) -> Floats | None:
    """Law [P, S] that the rule takes the next sibling for; None for point masses."""
    if drafts.declared is None:
        return None
    q = np.repeat((drafts.declared / drafts.declared.sum())[None], len(drawn), 0)
    if flaw.declared == "replaced" or not drawn.shape[1]:
        return q
    np.put_along_axis(q, drawn, 0.0, 1)
    if flaw.declared == "unrenormalised":
        return q
    total = q.sum(1, keepdims=True)
    return np.asarray(np.divide(q, total, out=np.zeros_like(q), where=total > 0))


def _chance(state: _Prefixes, q: Floats | None, drafts: Drafts, flaw: Flaw, marginal: Floats) -> tuple[Floats, Floats]:
    """P(accepted | place) [P, S], and the threshold that the accept coin is held against."""
    p = np.divide(state.p, state.mass[:, None], out=np.zeros_like(state.p), where=state.mass[:, None] > 0)
    p = np.maximum(p, 0.0)
    if q is None or flaw.accept == "one":
        ratio = np.minimum(p, 1.0)
    else:
        ratio = np.minimum(1.0, np.divide(p, q, out=(p > 0).astype(np.float64), where=q > 0))
    if flaw.accept == "all":
        return np.ones_like(ratio), np.ones_like(ratio)
    if flaw.accept == "zero":
        return (ratio > 0).astype(np.float64), ratio
    if flaw.accept == "grid":
        return np.ceil(ratio * GRID) / GRID, ratio
    if flaw.accept == "draft" and drafts.declared is not None:
        # Given the token, the coin that drew it lies in its part of the running sum.
        low, width = _draft_interval(marginal)
        inside = np.divide(ratio - low, width, out=np.zeros_like(ratio), where=width > 0)
        return np.clip(inside, 0.0, 1.0), ratio
    return ratio, ratio


def _draft_interval(marginal: Floats) -> tuple[Floats, Floats]:
    """Low end and width [P, S] of the draft coins that draw each place, given the prefix."""
    total = marginal.sum(1, keepdims=True)
    law = np.divide(marginal, total, out=np.zeros_like(marginal), where=total > 0)
    return np.cumsum(law, 1) - law, law


def _refused(
    state: _Prefixes, q: Floats | None, chance: Floats, marginal: Floats, split: bool, flaw: Flaw
) -> _Prefixes:
    """State after a refusal: one prefix for each place that could be drawn (`split`), else the prefixes as they are."""
    size = state.p.shape[1]
    if q is None:
        which, place = np.nonzero(marginal > 0)
        q = np.zeros((len(which), size))
        q[np.arange(len(which)), place] = 1.0
        state = _picked(state, which, place, chance)
        return _less(state, q, flaw)
    left = _less(state, q, flaw)
    if not split:
        weight = (marginal * state.weight[:, None] * (1 - chance)).sum(1)
        return _Prefixes(state.drawn, weight, left.p, left.mass)
    which, place = np.nonzero(marginal > 0)
    return _picked(left, which, place, chance)


def _picked(state: _Prefixes, which: NDArray[np.int64], place: NDArray[np.int64], chance: Floats) -> _Prefixes:
    return _Prefixes(
        np.concatenate([state.drawn[which], place[:, None]], 1),
        state.weight[which] * (1 - chance[which, place]),
        state.p[which],
        state.mass[which],
    )


def _less(state: _Prefixes, q: Floats, flaw: Flaw) -> _Prefixes:
    """What is left when siblings of law q [P, S] are refused. Where that is nothing, the refusal never happens."""
    if flaw.residual == "target":
        return state
    cut = state.mass[:, None] * q
    p = state.p - cut
    if flaw.residual != "unclamped":
        p = np.maximum(p, 0.0)
    if flaw.residual == "unnormalised":
        return _Prefixes(state.drawn, state.weight, p, state.mass)
    # mass counts the positive parts, on the support and off it
    mass = state.mass - np.maximum(state.p, 0).sum(1) + np.maximum(p, 0).sum(1)
    none = mass <= 1e-13
    return _Prefixes(state.drawn, state.weight, np.where(none[:, None], state.p, p), np.where(none, state.mass, mass))


_Last = tuple[_Prefixes, Floats, Floats] | None


def _bonus(target: Floats, drafts: Drafts, state: _Prefixes, last: _Last, flaw: Flaw) -> Floats:
    """Law [V] of the bonus, times the probability that the walk stops here."""
    weight = state.weight
    if drafts.declared is None:  # prefixes were split to the end: weights lack the chance of the draft, which is 1
        weight = weight * np.ones(len(state.mass))
    line = Line(target, drafts.tokens, state.p, state.mass)
    if flaw.draw == "target":
        return np.asarray(target / target.sum() * weight.sum())
    if flaw.draw == "half":
        return line.at_coin(np.full((len(weight), 1), 0.5), weight[:, None])
    if flaw.residual == "unclamped":
        return line.first_passage(weight)
    if flaw.draw == "softmax" and (drafts.children == 1 or (drafts.children and drafts.declared is None)):
        return line.softmax(weight)
    if flaw.draw == "grid" and len(weight) <= FEW:
        return line.on_grid(weight)
    if flaw.draw in ("accept", "draft") and drafts.children and last is not None:
        return _conditioned(line, last, drafts, flaw)
    return line.fresh(weight)


def _conditioned(line: Line, last: tuple[_Prefixes, Floats, Floats], drafts: Drafts, flaw: Flaw) -> Floats:
    """The bonus coin is one that was used for the last child: the interval in which it must lie is known."""
    before, ratio, marginal = last
    weight = marginal * before.weight[:, None] * (1 - ratio)
    if drafts.declared is None:
        weight, ratio = weight[marginal > 0][None], ratio[marginal > 0][None]
    if flaw.draw == "accept":
        return line.within(ratio, np.ones_like(ratio), weight)
    if drafts.declared is None:
        return line.fresh(weight.sum(1))
    low, width = _draft_interval(marginal)
    return line.within(low, np.minimum(low + width, 1.0), weight)


@dataclass(eq=False)
class Line:
    """Residuals of P prefixes laid out over [0, 1), for inverse-transform draws. p [P, S], mass [P]; see the module."""

    target: Floats
    tokens: Ints
    p: Floats
    mass: Floats

    def __post_init__(self) -> None:
        self.cdf = np.cumsum(self.target)
        lost = np.cumsum(self.target[self.tokens] - self.p, 1)
        self.kept = self.cdf[self.tokens] - lost  # running sum at the end of each support token
        self.lost = np.concatenate([np.zeros((len(self.p), 1)), lost], 1)

    def fresh(self, weight: Floats) -> Floats:
        """Bonus [V] with a fresh coin; what the residual lacks of its mass goes to the last token."""
        share = np.divide(weight, self.mass, out=np.zeros_like(weight), where=self.mass > 0)
        bonus = np.asarray(self.target * share.sum())
        bonus[self.tokens] = share @ self.p
        bonus[-1] += max(0.0, float(weight.sum() - bonus.sum()))
        return bonus

    def softmax(self, weight: Floats) -> Floats:
        """Bonus [V] drawn from the softmax of the residuals."""
        bonus = np.zeros_like(self.target)
        for p, mass, part in zip(self.p, self.mass, weight, strict=True):
            law = self.target / mass
            law[self.tokens] = p / mass
            law = np.exp(law)
            bonus += part * law / law.sum()
        return bonus

    def on_grid(self, weight: Floats) -> Floats:
        """Bonus [V] with a coin on multiples of 2^-24: a token has as many as lie in its part."""
        bonus = np.zeros_like(self.target)
        for p, mass, part in zip(self.p, self.mass, weight, strict=True):
            law = self.target / mass
            law[self.tokens] = p / mass
            ends = np.ceil(np.minimum(np.cumsum(law), 1.0) * GRID) / GRID
            ends[-1] = 1.0
            bonus += part * np.diff(ends, prepend=0.0)
        return bonus

    def first_passage(self, weight: Floats) -> Floats:
        """Bonus [V] of the first token whose running sum exceeds a fresh coin, where sums may fall; else the last."""
        bonus = np.zeros_like(self.target)
        share = np.divide(weight, self.mass, out=np.zeros_like(weight), where=self.mass > 0)
        steps = np.zeros(len(self.target) + 1)
        top = np.zeros(len(self.p))
        edges = [*self.tokens.tolist(), len(self.target)]
        start = 0
        for place, token in enumerate(edges):  # the tokens off the support before `token`, then `token` itself
            end = (self.cdf[token - 1] if token else 0.0) - self.lost[:, place]
            rising = np.flatnonzero(end > top + 1e-15)
            first = np.searchsorted(self.cdf, top[rising] + self.lost[rising, place], side="right")
            first = np.maximum(first, start)
            part = self.cdf[np.minimum(first, len(self.cdf) - 1)] - self.lost[rising, place] - top[rising]
            np.add.at(bonus, np.minimum(first, token - 1), share[rising] * np.where(first < token, part, 0.0))
            np.add.at(steps, np.minimum(first + 1, token), share[rising])
            np.add.at(steps, np.full(len(rising), token), -share[rising])
            top = np.maximum(top, end)
            if place < len(self.tokens):
                gain = np.maximum(self.kept[:, place] - top, 0.0)
                bonus[token] += float(share @ gain)
                top = top + gain
            start = token + 1
        bonus += self.target * np.cumsum(steps)[:-1]
        bonus[-1] += max(0.0, float(weight.sum() - bonus.sum()))
        return bonus

    def at_coin(self, coin: Floats, weight: Floats) -> Floats:
        """Bonus [V] where the coin is known: coin [P, C], weight [P, C]."""
        bonus = np.zeros_like(self.target)
        for part, threshold in self._slices(coin):
            token, _, _ = self._locate(part, threshold)
            np.add.at(bonus, token.ravel(), weight[part].ravel())
        return bonus

    def within(self, low: Floats, high: Floats, weight: Floats) -> Floats:
        """Bonus [V] where the coin is uniform on [low, high), each [P, C], with probability weight [P, C]."""
        width = high - low
        density = np.divide(weight, width, out=np.zeros_like(weight), where=width > 1e-300)
        bonus = np.zeros_like(self.target)
        self._above(low, density, bonus)
        self._above(high, -density, bonus)
        return np.maximum(bonus, 0.0)  # differences of equal sums round below 0

    def _above(self, coin: Floats, density: Floats, bonus: Floats) -> None:
        """Add density x (length of each token's part of [coin, 1))."""
        steps = np.zeros(len(self.target) + 1)
        for part, threshold in self._slices(coin):
            token, place, end = self._locate(part, threshold)
            d = np.where(threshold < self.mass[part, None], density[part], 0.0)
            scaled = d / self.mass[part, None]
            np.add.at(bonus, token.ravel(), (scaled * (end - threshold)).ravel())
            np.add.at(steps, token.ravel() + 1, scaled.ravel())
            later = np.arange(len(self.tokens))[None, :, None] >= place[:, None, :]
            whole = np.einsum("psc,pc->ps", later, scaled)
            bonus[self.tokens] += (whole * self.p[part]).sum(0)
        off = self.target.copy()
        off[self.tokens] = 0.0
        bonus += off * np.cumsum(steps)[:-1]

    def _slices(self, coin: Floats) -> Iterator[tuple[slice, Floats]]:
        for start in range(0, len(coin), SLICE):
            part = slice(start, start + SLICE)
            yield part, coin[part] * self.mass[part, None]

    def _locate(self, part: slice, threshold: Floats) -> tuple[Ints, Ints, Floats]:
        """For thresholds [P, C]: the token drawn there, how many support tokens end at or before it, the token
        included, and the running sum at its end."""
        kept, lost = self.kept[part], self.lost[part]
        passed = (kept[:, :, None] <= threshold[:, None, :]).sum(1)
        before = np.take_along_axis(lost, passed, 1)
        token = np.minimum(np.searchsorted(self.cdf, threshold + before, side="right"), len(self.cdf) - 1)
        at = np.minimum(passed, len(self.tokens) - 1) if len(self.tokens) else passed
        on = (self.tokens[at] <= token) & (passed < len(self.tokens)) if len(self.tokens) else token < 0
        token = np.where(on, self.tokens[at], token) if len(self.tokens) else token
        end = (
            np.where(on, np.take_along_axis(kept, at, 1), self.cdf[token] - before)
            if len(self.tokens)
            else self.cdf[token]
        )
        return token, passed + on, end


def check_size(size: int, children: int) -> None:
    """Refuse a draft law that is too wide to enumerate. Raises InputError."""
    if float(size) ** children > 2**20:
        raise InputError(
            f"draft law: expected at most 2^20 ordered drafts of siblings, got {size} tokens and {children} children"
        )
