"""Samplers with one `Change`: around a sampler that takes coins, and around a closed one."""

from __future__ import annotations

import torch
from torch import Tensor

from faults.sampler_types import Change, Draws, StepSource
from faults.sampler_variant import VariantRule
from lumotree.coins import coins_for, draft_coins
from lumotree.select import Rule
from lumotree.select_draft import drafts_from_coins
from lumotree.select_prepare import PreparedStep, prepare
from lumotree.select_types import ClosedSampler, Coins, CoinSampler, Step, Walks


class FaultySampler:
    """A sampler with coins, changed. It is a `CoinSampler`, and a `ClosedSampler` that draws coins and drafts itself.

    The step of the last call is kept, with everything that was derived from it, so that chunks of walks cost no more.
    """

    def __init__(self, sampler: CoinSampler, change: Change, source: StepSource | None = None) -> None:
        self.sampler = change.rule(sampler) if change.rule else sampler
        self.change, self.source = change, source
        self._known: tuple[Step, Step | PreparedStep, PreparedStep] | None = None

    def select(self, step: Step, tokens: Tensor, coins: Coins) -> Walks:
        """Select with the fault on W walks; what it changes in the drafts, `drawn`, has no part in this."""
        return self._select(step, tokens, Draws(coins.accept, coins.residual))

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        """Draw W walks with counter-based coins: walk w is request w of `seed`, cycle 0."""
        seed = self.change.seed(seed) if self.change.seed else seed
        rows = step.tree.active_rows
        coins = coins_for(seed, torch.arange(walks), 0, step.tree.n, rows)
        drafter = self._ready(step)[2]
        drafted = step.laws is not None or drafter.laws is not None
        draft = draft_coins(seed, torch.arange(walks), 0, step.tree.n, rows[1:]) if drafted else None
        draws = Draws(coins.accept, coins.residual, draft)
        if self.change.coins:
            draws = self.change.coins(step, draws)
        if drafter.laws is None or draws.draft is None:
            tokens = torch.from_numpy(drafter.tree.tokens.copy())[None]
        else:
            tokens = drafts_from_coins(drafter, draws.draft)
        return self._decide(step, tokens, draws)

    def _select(self, step: Step, tokens: Tensor, draws: Draws) -> Walks:
        return self._decide(step, tokens, self.change.coins(step, draws) if self.change.coins else draws)

    def _decide(self, step: Step, tokens: Tensor, draws: Draws) -> Walks:
        walks = self.sampler.select(self._ready(step)[1], tokens, Coins(draws.accept, draws.residual))  # type: ignore[arg-type]
        return self.change.outcome(step, walks, draws) if self.change.outcome else walks

    def _ready(self, step: Step) -> tuple[Step, Step | PreparedStep, PreparedStep]:
        """The step itself, the one that is verified (prepared where the sampler can use it), the one drafted from."""
        if self._known is None or self._known[0] is not step:
            verified = self.change.rows(step, self.source) if self.change.rows else step
            drafted = self.change.drawn(step) if self.change.drawn else step
            ready: Step | PreparedStep = verified
            if isinstance(self.sampler, Rule | VariantRule):
                ready = prepare(verified)
            same = isinstance(ready, PreparedStep) and drafted is verified
            self._known = (step, ready, ready if same and isinstance(ready, PreparedStep) else prepare(drafted))
        return self._known


class FaultyClosed:
    """A closed sampler, changed in what goes in (rows, seed) and comes out (outcome). A `ClosedSampler`."""

    def __init__(self, sampler: ClosedSampler, change: Change, source: StepSource | None = None) -> None:
        self.sampler, self.change, self.source = sampler, change, source
        self._known: tuple[Step, Step] | None = None

    def walk(self, step: Step, walks: int, seed: int) -> Walks:
        """Draw W walks. An outcome that needs coins gets fresh ones from a generator of the same seed."""
        seed = self.change.seed(seed) if self.change.seed else seed
        drawn = self.sampler.walk(self._verified(step), walks, seed)
        if not self.change.outcome:
            return drawn
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        fresh = torch.rand(2, walks, step.tree.n, generator=generator, dtype=torch.float64)
        return self.change.outcome(step, drawn, Draws(fresh[0], fresh[1]))

    def _verified(self, step: Step) -> Step:
        if self._known is None or self._known[0] is not step:
            self._known = (step, self.change.rows(step, self.source) if self.change.rows else step)
        return self._known[1]
