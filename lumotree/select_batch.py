"""Selection for a batch of requests with trees of their own: the step between verification and publication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lumotree.backends.batch import accepted_paths
from lumotree.backends.protocol import Accepted
from lumotree.coins import coins_for
from lumotree.errors import InputError
from lumotree.select import Rule
from lumotree.select_types import Step


@dataclass(frozen=True)
class Request:
    """One request of a batch: its step, its number and cycle (the address of its coins), rule and what it may emit.

    drafts: int64 `[N]`, the tree's tokens by default. budget: tokens left to emit, or None.
    """

    step: Step
    number: int
    cycle: int
    rule: Rule
    budget: int | None = None
    drafts: Tensor | None = None


def select_batch(
    requests: Sequence[Request | None], seed: int, device: torch.device | str = "cpu", longest: int | None = None
) -> tuple[Accepted, Tensor]:
    """Accepted path of each request and its new pending token b*, int64 `[B]`, -1 for a padding request (None).

    A request's outcome depends on its own step, rule and coin address alone, not on what else is in the batch. longest:
    width of `Accepted.rows`, the longest path by default. Raises InputError naming the request.
    """
    paths: list[tuple[int, ...]] = []
    pending = torch.full((len(requests),), -1, dtype=torch.int64)
    for index, request in enumerate(requests):
        if request is None:
            paths.append(())
            continue
        try:
            last, pending[index] = _select_one(request, seed)
        except InputError as cause:
            raise type(cause)(f"request {index}: {cause}") from cause
        paths.append(request.step.tree.path(last))
    return accepted_paths(paths, device, longest), pending.to(device)


def _select_one(request: Request, seed: int) -> tuple[int, int]:
    tree = request.step.tree
    drafts = torch.from_numpy(tree.tokens.copy()) if request.drafts is None else request.drafts
    coins = coins_for(seed, [request.number], request.cycle, tree.n, tree.active_rows)
    rule = request.rule if request.budget is None else replace(request.rule, budget=request.budget)
    walks = rule.select(request.step, drafts[None], coins)
    return int(walks.last[0]), int(walks.bonus[0])
