"""The selection rules over many walks; each decides exactly as its namesake in `select_reference`.

Every rule maps (prepared step, drafts int64 `[W or 1, N]`, coins `[W, N]`) to (last, bonus), int64 `[W]` each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lumotree.select_prepare import PreparedStep
from lumotree.select_residual import Residual, take
from lumotree.select_types import Coins

Decision = tuple[Tensor, Tensor]
Start = Callable[[PreparedStep, int, Tensor], Residual]
"""What is left at a row before its first child is tried, from drafts int64 `[n or 1, N]`."""

#: Numbers held in one state array of a chunk of walks: 4 MiB, which stays in cache.
_CHUNK_NUMBERS = 1 << 19


def greedy(prepared: PreparedStep, drafts: Tensor, coins: Coins) -> Decision:
    """Follow the first child that carries the row's argmax; reads no coin."""

    def next_tokens(row: int, here: Tensor) -> Tensor:
        return torch.full((len(here),), prepared.best[row], dtype=torch.int64, device=drafts.device)

    return _follow(prepared, drafts, coins, next_tokens)


def naive(prepared: PreparedStep, drafts: Tensor, coins: Coins) -> Decision:
    """Draw each next token from the target; follow the first child that carries it."""

    def next_tokens(row: int, here: Tensor) -> Tensor:
        empty = drafts.new_zeros(1, 0)
        none = prepared.weights.new_zeros(1, 0)
        mass = prepared.cdf[row, -1:]
        return Residual(prepared, row, empty, none, none, mass, None, mass, 0).draw(coins.residual[here, row])

    return _follow(prepared, drafts, coins, next_tokens)


def _follow(
    prepared: PreparedStep, drafts: Tensor, coins: Coins, next_tokens: Callable[[int, Tensor], Tensor]
) -> Decision:
    last = torch.zeros(coins.accept.shape[0], dtype=torch.int64, device=drafts.device)
    bonus = torch.zeros_like(last)
    for row in prepared.tree.active_rows:  # parents first, so a walk is complete when its last row has been settled
        here = torch.nonzero(last == row)[:, 0]
        if not len(here):
            continue
        tokens = next_tokens(row, here)
        bonus[here] = tokens
        for child in reversed(prepared.tree.active_children(row)):  # the first match is written last
            last[here[take(drafts[:, child], here) == tokens]] = child
    return last, bonus


def multi_round(prepared: PreparedStep, drafts: Tensor, coins: Coins) -> Decision:
    """Children in order, each against the residual of the earlier refusals."""
    return multi_round_with(Residual.at, prepared, drafts, coins)


def multi_round_with(
    start: Start, prepared: PreparedStep, drafts: Tensor, coins: Coins, backwards: bool = False
) -> Decision:
    """As `multi_round`, with `start` to say what is left at a row, and siblings in order or backwards."""

    def decide(prepared: PreparedStep, drafts: Tensor, coins: Coins) -> Decision:
        return _multi_round(start, backwards, prepared, drafts, coins)

    return _in_chunks(decide, prepared, drafts, coins)


def _multi_round(start: Start, backwards: bool, prepared: PreparedStep, drafts: Tensor, coins: Coins) -> Decision:
    last = torch.zeros(coins.accept.shape[0], dtype=torch.int64, device=drafts.device)
    bonus = torch.zeros_like(last)
    one = prepared.cdf.new_ones(1)
    for row in prepared.tree.active_rows:
        here = torch.nonzero(last == row)[:, 0]
        if not len(here):
            continue
        residual = start(prepared, row, take(drafts, here))
        children = prepared.tree.active_children(row)
        for child in reversed(children) if backwards else children:
            tokens = take(drafts[:, child], here)
            accepted = coins.accept[here, child] < residual.ratio(tokens, one)
            last[here[accepted]] = child
            here = here[~accepted]
            if not len(here):  # state that all walks share does not shrink with them: nothing is left to refuse for
                break
            residual.keep(~accepted)
            residual.refuse(take(tokens, ~accepted), one)
        else:
            bonus[here] = residual.draw(coins.residual[here, row])
    return last, bonus


def traversal(prepared: PreparedStep, drafts: Tensor, coins: Coins) -> Decision:
    """Leaves first; a refused leaf is deleted and changes its parent's residual and reach."""
    return _in_chunks(_traversal, prepared, drafts, coins)


def _traversal(prepared: PreparedStep, drafts: Tensor, coins: Coins) -> Decision:
    walks = torch.arange(coins.accept.shape[0], device=drafts.device)
    last, bonus = torch.zeros_like(walks), torch.zeros_like(walks)

    def visit(row: int, here: Tensor, reach: Tensor) -> Tensor:
        """Settle the subtree of `row` for the walks `here`; return bool `[n]`, those in which it was deleted."""
        if not len(here):
            return here.bool()
        residual = Residual.at(prepared, row, take(drafts, here))
        alive = torch.arange(len(here), device=here.device)
        for child in prepared.tree.active_children(row):
            tokens = take(drafts[:, child], here[alive])
            gone = visit(child, here[alive], residual.ratio(tokens, reach))
            alive, reach = alive[gone], take(reach, gone)
            if not len(alive):  # as in _multi_round
                return torch.zeros(len(here), dtype=torch.bool, device=here.device)
            residual.keep(gone)
            reach = residual.refuse(take(tokens, gone), reach)
        walks_here = here[alive]
        taken = coins.accept[walks_here, row] < reach if row else torch.ones_like(walks_here, dtype=torch.bool)
        residual.keep(taken)
        last[walks_here[taken]] = row
        bonus[walks_here[taken]] = residual.draw(coins.residual[walks_here[taken], row])
        deleted = torch.zeros(len(here), dtype=torch.bool, device=here.device)
        deleted[alive[~taken]] = True
        return deleted

    visit(0, walks, prepared.cdf.new_ones(1))
    return last, bonus


def _in_chunks(
    rule: Callable[[PreparedStep, Tensor, Coins], Decision], prepared: PreparedStep, drafts: Tensor, coins: Coins
) -> Decision:
    """Run a rule on chunks of walks, so that the state of one row stays in cache; walks do not interact."""
    walks = coins.accept.shape[0]
    size = _chunk(prepared, drafts, walks)
    if walks <= size:
        return rule(prepared, drafts, coins)
    parts = []
    for start in range(0, walks, size):
        part = slice(start, start + size)
        mine = drafts if drafts.shape[0] == 1 else drafts[part]
        parts.append(rule(prepared, mine, Coins(coins.accept[part], coins.residual[part])))
    return torch.cat([last for last, _ in parts]), torch.cat([bonus for _, bonus in parts])


def _chunk(prepared: PreparedStep, drafts: Tensor, walks: int) -> int:
    if drafts.shape[0] == 1:
        return walks
    laws = (prepared.laws or {}).values()
    support = max([len(law.tokens) for law in laws], default=prepared.tree.n)
    return max(1, _CHUNK_NUMBERS // support)
