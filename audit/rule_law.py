"""The law of one walk, row by row: what a clean rule does at a row, given that it got there.

At a row the walk either goes on to child c, which carries token t, or stops and draws the bonus t. A *top-down* rule
(naive, multi-round) decides this from coins and drafts of that row alone, so the law of a walk is a product along its
path. Traversal verification decides bottom-up and has no such law; its joint law must come from elsewhere. A fault that
changes the rows or the declared law has the same rule's law of the changed step.

Drafts are averaged over: for a fixed stochastic draft the emitted law is not the target's (contract section 7). Target
rows belong to rows, not to the tokens that lead there, as in a captured step. Sums are float64, off by about 1e-15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lumotree.errors import InputError
from lumotree.select_types import Step
from lumotree.tree import Tree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_PREFIXES = 2**16
"""Most ordered prefixes of siblings that are enumerated: 64 tokens and three children need 2^12."""


@dataclass(frozen=True, eq=False)
class TokenLaw:
    """Probability `mass` [S] of each of `tokens` [S], ascending; no other token has any. It may sum to less than 1."""

    tokens: Ints
    mass: Floats

    def at(self, tokens: Ints) -> Floats:
        """Return the probability of each given token."""
        if not len(self.tokens):
            return np.zeros(len(tokens))
        index = np.minimum(np.searchsorted(self.tokens, tokens), len(self.tokens) - 1)
        return np.where(self.tokens[index] == tokens, self.mass[index], 0.0)


@dataclass(frozen=True, eq=False)
class RuleLaw:
    """child[c]: P(go on to row c, carrying token t | parent visited); bonus [N, V]: P(stop at r, draw t | r visited).

    Rows that are inactive have an empty law and a zero row.
    """

    tree: Tree
    child: tuple[TokenLaw, ...]
    bonus: Floats

    @property
    def reach(self) -> Floats:
        """P(row is visited) [N]."""
        reach = np.zeros(self.tree.n)
        reach[0] = 1.0
        for row in self.tree.active_rows[1:]:
            reach[row] = reach[self.tree.parents[row]] * self.child[row].mass.sum()
        return reach


class NodeRule(Protocol):
    """What a rule does at one row with stochastic drafts."""

    def __call__(self, target: Floats, tokens: Ints, law: Floats, children: int) -> tuple[list[Floats], Floats]:
        """target [V]; tokens [S] and law [S] of the first child. Return the accepted mass [S] of each child and the
        bonus [V]."""
        ...


def multi_round_law(step: Step) -> RuleLaw:
    """Return the law of multi-round rejection over siblings drawn without replacement. Raises as `rule_law` does."""
    return rule_law(step, _multi_round)


def naive_law(step: Step) -> RuleLaw:
    """Return the law of the naive rule: draw from the target, follow the first child that carries the token."""
    return rule_law(step, _naive)


def rule_law(step: Step, node: NodeRule) -> RuleLaw:
    """Return the law of a top-down rule, given what it does at one row.

    With fixed drafts the naive and the multi-round rule have one law: each distinct child takes its token's
    probability.
    Raises InputError if a draft law has fewer tokens than children or too many ordered prefixes (`MAX_PREFIXES`).
    """
    tree, rows = step.tree, step.target.numpy()
    child = [TokenLaw(np.zeros(0, np.int64), np.zeros(0))] * tree.n
    bonus = np.zeros(rows.shape)
    for row in tree.active_rows:
        children = tree.active_children(row)
        if not children:
            bonus[row] = rows[row]
        elif step.laws is None:
            bonus[row] = rows[row]
            for index in children:
                token = tree.tokens[index : index + 1].astype(np.int64)
                child[index] = TokenLaw(token, bonus[row, token].copy())
                bonus[row, token] = 0.0
        else:
            tokens, law = draft_support(step, row)
            accepted, bonus[row] = node(rows[row], tokens, law, len(children))
            for index, mass in zip(children, accepted, strict=True):
                child[index] = TokenLaw(tokens, mass)
    return RuleLaw(tree, tuple(child), bonus)


def draft_support(step: Step, row: int) -> tuple[Ints, Floats]:
    """Return tokens [S], ascending, and law [S] of the first child of `row`. Raises InputError, see `rule_law`."""
    if step.laws is None:
        raise InputError("draft law: expected a step with laws, got one with fixed drafts")
    law, children = step.laws[row].numpy(), len(step.tree.active_children(row))
    tokens = np.flatnonzero(law)
    prefixes = float(len(tokens)) ** (children - 1)
    if len(tokens) < children or prefixes > MAX_PREFIXES:
        raise InputError(
            f"draft law of row {row}: expected at least {children} tokens for {children} children and at most "
            f"{MAX_PREFIXES} ordered prefixes of siblings, got {len(tokens)} tokens and {prefixes:.0f} prefixes"
        )
    return tokens, law[tokens] / law[tokens].sum()


def draft_marginals(law: Floats, children: int) -> list[Floats]:
    """Return the law [S] of each child's token, averaged over its earlier siblings; `law` is that of the first."""
    weight, q = np.ones(1), law[None]
    marginals = []
    for index in range(children):
        joint = weight[:, None] * q
        marginals.append(joint.sum(0))
        if index + 1 < children:
            weight, q = joint.ravel(), _without_last(q)
    return marginals


def _without_last(q: Floats) -> Floats:
    """Return the sibling law after each prefix and each token drawn from q: [A, S] -> [A * S, S], renormalised."""
    size = q.shape[1]
    left = np.repeat(q[:, None, :], size, axis=1)
    left[:, np.arange(size), np.arange(size)] = 0.0
    return _normalised(left.reshape(-1, size))


def _normalised(rows: Floats) -> Floats:
    total = rows.sum(1, keepdims=True)
    scaled: Floats = np.divide(rows, total, out=np.zeros_like(rows), where=total > 0)
    return scaled


def _multi_round(target: Floats, tokens: Ints, law: Floats, children: int) -> tuple[list[Floats], Floats]:
    """Follow every ordered prefix of refused siblings: its weight, sibling law q, residual p.

    p is kept on the support alone; off it, the residual is the target times one factor per prefix.
    """
    off_mass = float(np.delete(target, tokens).sum())
    weight, q, p, factor = np.ones(1), law[None], target[tokens][None], np.ones(1)
    accepted = []
    for index in range(children):
        taken = np.minimum(p, q)
        accepted.append(weight @ taken)
        refused = weight[:, None] * (q - taken)
        left = p - taken
        total = left.sum(1) + factor * off_mass
        inverse = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
        p, factor = left * inverse[:, None], factor * inverse
        if index + 1 == children:
            weight = refused.sum(1)
        else:  # one prefix for each token that may have been refused
            weight, q = refused.ravel(), _without_last(q)
            p, factor = np.repeat(p, len(law), axis=0), np.repeat(factor, len(law))
    bonus = target * float(weight @ factor)
    bonus[tokens] = weight @ p
    return accepted, bonus


def _naive(target: Floats, tokens: Ints, law: Floats, children: int) -> tuple[list[Floats], Floats]:
    drafted = draft_marginals(law, children)
    accepted = [target[tokens] * each for each in drafted]
    bonus = target.copy()
    # Siblings differ, so the chances that each of them carries a token add up.
    bonus[tokens] *= np.maximum(0.0, 1.0 - np.sum(drafted, axis=0))
    return accepted, bonus
