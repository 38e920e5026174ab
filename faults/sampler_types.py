"""What a sampler fault is made of: the places at which a sampler can go wrong, and the source of its target rows.

A sampler has five such places: the rows that it verifies against, the law that its drafts really come from, its coins
(and the seed that they grow from), its arithmetic, and what it hands out. A `Change` replaces some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from lumotree.select_types import CoinSampler, Step, Walks

Penalty = Literal["path", "flat", "last", "twice-last", "siblings", "none"]


@dataclass(frozen=True)
class Reading:
    """How a sampler turns logits into target rows; the defaults are the step's own, right way.

    heat: the temperature is heat * T. twice: logits are divided by T a second time. ties: at the top-k boundary, None =
    as the step has it. swapped: top-p before top-k. joint: top-p looks at the law that top-k saw too. min_p: whether
    min-p applies at all, or at leaves only. penalty: tokens that count as seen at a row: those of its "path" (row 0 and
    its own included), of all rows before it and its own in the "flat" buffer, the "last" of the path only, the path
    with its last token counted twice, the path and the row's elder "siblings", or none.
    """

    heat: float = 1.0
    twice: bool = False
    ties: Literal["index", "all"] = "index"
    swapped: bool = False
    joint: bool = False
    min_p: Literal["all", "leaves", "none"] = "all"
    penalty: Penalty = "path"


class StepSource(Protocol):
    """Where the target rows of one step come from: its logits and its parameters, which the audit fills in."""

    @property
    def temperature(self) -> float:
        """The temperature T of the step."""
        ...

    def target(self, reading: Reading) -> Tensor:
        """Target rows float64 `[N, V]` under a reading; `Reading()` gives the step's own."""
        ...


@dataclass(frozen=True)
class Draws:
    """All coins of W walks over N rows, float64 `[W, N]` in [0, 1). draft: None where the drafts are fixed or given."""

    accept: Tensor
    residual: Tensor
    draft: Tensor | None = None


@dataclass(frozen=True)
class Change:
    """What is replaced; None = right.

    rows(step, source): the step that verification reads instead; source may be None, and then a change that needs it
    raises InputError. drawn(step): the step whose laws (None: whose tokens) the drafts really come from.
    coins(step, draws): coins read instead; whole walks may share them. seed: the seed used instead. rule(sampler):
    the sampler whose arithmetic is used instead. outcome(step, walks, draws): what is handed out instead.
    """

    rows: Callable[[Step, StepSource | None], Step] | None = None
    drawn: Callable[[Step], Step] | None = None
    coins: Callable[[Step, Draws], Draws] | None = None
    seed: Callable[[int], int] | None = None
    rule: Callable[[CoinSampler], CoinSampler] | None = None
    outcome: Callable[[Step, Walks, Draws], Walks] | None = None
