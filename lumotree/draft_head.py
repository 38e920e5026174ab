"""Running a draft head over growing trees, a batch of requests at a time.

Row r of a request's candidate tree, at depth d, is row r of the head too: position m - 1 + d, the token of row r, and
the hidden row of its parent (of the target for row 0). Its logits are the law of r's children. A call runs all rows so
far and not only the new ones: attention sees the rows of its own call, and rows get the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lumotree.backends.batch import build_batch
from lumotree.draft_types import DraftRequest, DraftState
from lumotree.errors import InputError
from lumotree.placed_tree import placed
from lumotree.sampling import GREEDY_TEMPERATURE
from lumotree.tree import Tree

Law = NDArray[np.float64]


@dataclass
class Growth:
    """The rows of one request that the head has run over or is to run over, parents first.

    parents, tokens: of each row; row 0 carries b*. after: bf16 `[H]`, what the row's children read, and laws: float64
    `[V]` of its children, both None until the row has run.
    """

    request: DraftRequest
    parents: list[int] = field(default_factory=lambda: [-1])
    tokens: list[int] = field(default_factory=list)
    after: list[Tensor | None] = field(default_factory=lambda: [None])
    laws: list[Law | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        self.tokens.append(int(self.request.tokens[-1]))

    def add(self, parent: int, token: int) -> int:
        """A new row below one that has run; returns its number."""
        self.parents.append(parent)
        self.tokens.append(token)
        self.after.append(None)
        self.laws.append(None)
        return len(self.parents) - 1

    def reads(self, row: int) -> Tensor:
        """The hidden row that a row reads, bf16 `[H]`."""
        read = self.request.hidden if row == 0 else self.after[self.parents[row]]
        assert read is not None, "a row is added after its parent has run"
        return read


def run_head(growths: Sequence[Growth], rows: Sequence[Sequence[int]], state: DraftState) -> None:
    """One forward over the given rows of each request (ascending, closed under parents), in scratch slots.

    Fills `after` and `laws` of the rows that have none yet; the law is the softmax of the head's logits at the
    request's temperature (1 if it is greedy), in float64. Raises InputError without a head, or for more rows than
    scratch slots.
    """
    if state.head is None or state.cache is None:
        raise InputError("draft: this drafter needs a draft head; the model has none")
    work = [(growth, chosen) for growth, chosen in zip(growths, rows, strict=True) if chosen]
    if not work:
        return
    batch = build_batch(
        [_tree(growth, chosen, state.cache.k.shape[1]) for growth, chosen in work],
        state_slots=range(len(work)),
        page_table=torch.stack([growth.request.pages for growth, _ in work]),
        page_size=state.page_size,
        device=state.cache.k.device,
    )
    tokens = torch.tensor([growth.tokens[row] for growth, chosen in work for row in chosen])
    hidden = torch.stack([growth.reads(row) for growth, chosen in work for row in chosen])
    out = state.head.forward(tokens.to(state.cache.k.device), hidden, batch, state.cache)
    logits, place = out.logits.to("cpu", torch.float64).numpy(), 0
    for growth, chosen in work:
        for row in chosen:
            if growth.laws[row] is None:
                growth.laws[row] = softmax(logits[place], growth.request.params.temperature)
                growth.after[row] = out.hidden[place].clone()
            place += 1


def _tree(growth: Growth, rows: Sequence[int], num_slots: int) -> Tree:
    request = growth.request
    if len(rows) > len(request.scratch):
        raise InputError(
            f"request {request.number}: {len(rows)} drafted rows but {len(request.scratch)} scratch slots; "
            "lower the drafter's budget"
        )
    place = {row: index for index, row in enumerate(rows)}
    parents = [place[growth.parents[row]] if row else -1 for row in rows]
    return placed(
        parents, [0] * len(rows), request.scratch[: len(rows)], num_slots=num_slots, prefix_len=request.committed - 1
    )


def softmax(logits: NDArray[np.float64], temperature: float) -> Law:
    """Law float64 `[V]` of one row of logits; a greedy temperature counts as 1, since a drafter wants to know how sure
    the head is."""
    scaled = (logits - logits.max()) / (temperature if temperature > GREEDY_TEMPERATURE else 1.0)
    weights = np.exp(scaled)
    return np.asarray(weights / weights.sum())
