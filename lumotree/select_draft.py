"""Drafts drawn from the declared laws: siblings without replacement, by inverse CDF, with draft coins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lumotree.coins import draft_coins
from lumotree.select_prepare import PreparedLaw, PreparedStep, prepare
from lumotree.select_types import Step


def draw_drafts(step: Step | PreparedStep, seed: int, requests: Sequence[int] | Tensor, cycle: int) -> Tensor:
    """Drafted tokens of W requests, int64 `[W, N]`, or the tree's own `[1, N]` for a deterministic draft.

    Row r's token is drawn with the draft coin of row r from its parent's declared law without the tokens of r's
    earlier siblings, renormalised. Row 0 and inactive rows keep the tree's tokens. Cost is independent of the law's
    support. Raises InputError as `prepare` and `coins.draft_coins` do.
    """
    prepared = step if isinstance(step, PreparedStep) else prepare(step)
    tree = prepared.tree
    tokens = torch.from_numpy(tree.tokens.copy())[None].to(prepared.cdf.device)
    if prepared.laws is None:
        return tokens
    coins = draft_coins(seed, requests, cycle, tree.n, tree.active_rows[1:]).to(prepared.cdf.device)
    return drafts_from_coins(prepared, coins)


def drafts_from_coins(prepared: PreparedStep, coins: Tensor) -> Tensor:
    """As `draw_drafts`, of a stochastic draft, with the draft coins given: float64 `[W, N]` in [0, 1)."""
    tree = prepared.tree
    columns = torch.from_numpy(tree.tokens.copy())[:, None].repeat(1, len(coins)).to(coins.device)
    for row, law in (prepared.laws or {}).items():
        _draw_siblings(law, tree.active_children(row), coins, columns)
    return columns.T


def _draw_siblings(law: PreparedLaw, siblings: tuple[int, ...], coins: Tensor, columns: Tensor) -> None:
    """Fill the rows `siblings` of columns int64 `[N, W]`."""
    taken = torch.empty(len(coins), 0, dtype=torch.int64, device=coins.device)  # places in the support, ascending
    mass = law.cdf[-1].expand(len(coins))
    for row in siblings:
        threshold = torch.floor(coins[:, row] * mass)
        for removed in taken.T:  # a token already drawn is stepped over: its weight is added to the threshold
            passed = threshold >= law.cdf[removed] - law.weights[removed]
            threshold = torch.where(passed, threshold + law.weights[removed], threshold)
        place = torch.searchsorted(law.cdf, threshold, right=True)
        columns[row] = law.tokens[place]
        mass = mass - law.weights[place]
        taken = torch.cat([taken, place[:, None]], dim=1).sort(dim=1).values
