"""A sampler written down from the definition of the rules, with one hook per thing that can go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lumotree.select_types import Step, Walks
from lumotree.tree import Tree


def same(x):
    return x


def drawn(law: np.ndarray, coin: np.ndarray) -> np.ndarray:
    """Inverse transform: law [W, V] or [V], coin [W]; never a token without probability."""
    below = np.cumsum(law, -1)
    return (below <= (coin * below[..., -1])[:, None]).sum(1)


@dataclass(frozen=True)
class Reference:
    """Multi-round rejection without replacement, or the naive rule.

    coins: maps uniform numbers [3, W, N] (accept, residual, draft); target, law: map one row before it is used;
    residual: maps (residual, target row) before a bonus is drawn; seed: maps the seed.
    """

    naive: bool = False
    coins: Callable = same
    target: Callable = same
    law: Callable = same
    residual: Callable = lambda residual, _: residual
    seed: Callable = same

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        rng = np.random.default_rng(self.seed(seed))
        accept, residual, draft = self.coins(rng.random((3, walks, step.tree.n)))
        tokens = self._drafts(step, draft)
        at, bonus, refused = np.zeros(walks, int), np.zeros(walks, int), np.zeros(walks, bool)
        for row in step.tree.active_rows:
            here = np.flatnonzero(at == row)
            at[here], bonus[here], refused[here] = self._row(step, row, tokens[here], accept[here], residual[here, row])
        shown = tokens if step.laws is not None else tokens[:1]
        return Walks(*map(torch.from_numpy, (at, bonus, refused, shown)))

    def _drafts(self, step: Step, coin: np.ndarray) -> np.ndarray:
        tokens = np.tile(step.tree.tokens, (len(coin), 1))
        if step.laws is None:
            return tokens
        for row in step.tree.active_rows:
            q = np.tile(self.law(step.laws[row].numpy()), (len(coin), 1))
            for child in step.tree.active_children(row):
                tokens[:, child] = drawn(q, coin[:, child])
                q[np.arange(len(coin)), tokens[:, child]] = 0
        return tokens

    def _row(self, step, row, tokens, accept, coin):
        count, children = len(tokens), step.tree.active_children(row)
        at, live = np.full(count, row), np.ones(count, bool)
        target = self.target(step.target[row].numpy())
        p = np.tile(target, (count, 1))
        if self.naive:
            bonus = drawn(p, coin)
            for child in children:
                hit = live & (tokens[:, child] == bonus)
                at[hit], live[hit] = child, False
            return at, bonus, live & bool(children)
        q = None if step.laws is None else np.tile(step.laws[row].numpy(), (count, 1))
        every = np.arange(count)
        for child in children:
            token = tokens[:, child]
            point = np.zeros_like(p)
            point[every, token] = 1
            law = point if q is None else q / q.sum(1, keepdims=True)
            ok = live & (accept[:, child] * law[every, token] < p[every, token])
            at[ok], live[ok] = child, False
            rest = np.maximum(p - law, 0)
            p = np.where(live[:, None], rest / np.where(live, rest.sum(1), 1)[:, None], p)
            if q is not None:
                q[every, token] = 0
        return at, drawn(self.residual(p, target), coin), live & bool(children)


def make_step(stochastic: bool, seed: int = 0, vocab: int = 12, parents=(-1, 0, 0, 0, 1, 1)) -> Step:
    """Rows of a Dirichlet law; children on likely tokens; draft laws near the rows, one token fewer."""
    rng = np.random.default_rng([seed, 5])
    n = len(parents)
    target = rng.dirichlet(np.full(vocab, 0.8), n) * 0.9 + 0.1 / vocab
    target[:, 0] = 0
    target /= target.sum(1, keepdims=True)
    tokens, used = np.zeros(n, int), np.zeros(n, int)
    for row in range(1, n):
        parent = parents[row]
        tokens[row] = np.argsort(-target[parent])[used[parent]]
        used[parent] += 1
    laws = None
    if stochastic:
        laws = target**0.7 * np.exp(0.4 * rng.standard_normal(target.shape))
        laws[:, 1] = 0
        laws = torch.from_numpy(laws / laws.sum(1, keepdims=True))
    return Step(Tree.make(parents, tokens=tokens, vocab=vocab), torch.from_numpy(target), laws)


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """Reference: the sampler; step(stochastic, seed, vocab, parents): a small step."""
    return SimpleNamespace(Reference=Reference, step=make_step)
