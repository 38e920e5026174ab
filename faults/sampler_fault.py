"""`SamplerFault`, and the samplers that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeGuard, cast

from faults.sampler_types import Change, StepSource
from faults.sampler_wrap import FaultyClosed, FaultySampler
from lumotree.errors import InputError
from lumotree.select_types import ClosedSampler, CoinSampler

Kind = Literal["coins", "target", "laws", "outcome", "arithmetic"]


@dataclass(frozen=True)
class SamplerFault:
    """A named way to make a right sampler wrong in exactly one way.

    id, statement (one sentence), provenance (classes of defect-classes.md, contract section). kind: the place. change:
    what is replaced. needs: "" for any step, "laws" = only steps with redrawn drafts can show it, "fixed" = only those
    with fixed drafts, "greedy" = only the greedy rule. dependence: the law of one walk is unchanged, the walks or
    streams depend on each other. expect: "detected" or "harmless" (the emitted law is right; must pass).
    """

    id: str
    statement: str
    provenance: str
    kind: Kind
    change: Change
    needs: Literal["", "laws", "fixed", "greedy"] = ""
    dependence: bool = False
    expect: Literal["detected", "harmless"] = "detected"

    @property
    def closed(self) -> bool:
        """Whether it can be put around a sampler that keeps its coins to itself."""
        change = self.change
        return not (change.coins or change.drawn or change.rule)

    def wrap(
        self, sampler: CoinSampler | ClosedSampler, source: StepSource | None = None
    ) -> FaultySampler | FaultyClosed:
        """Return the faulty sampler; `.walk(step, walks, seed)` always, `.select(step, tokens, coins)` with coins.

        source: of the target rows of the step that it will be run on (the parameters of the request); needed by faults
        of kind "target" that change how logits are read. A sampler that has `select` is wrapped by that. Raises
        InputError if a fault needs coins that a closed sampler does not show.
        """
        if has_coins(sampler):
            return FaultySampler(sampler, self.change, source)
        if not self.closed:
            raise InputError(f"fault {self.id}: needs a sampler that takes coins, got a closed one")
        return FaultyClosed(cast(ClosedSampler, sampler), self.change, source)


def has_coins(sampler: CoinSampler | ClosedSampler) -> TypeGuard[CoinSampler]:
    """Whether a sampler takes its coins as an argument."""
    return hasattr(sampler, "select")
