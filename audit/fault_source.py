"""The logits and parameters of a captured-like step, for faults that read them in another way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from audit.sampler_steps import Floats, Ints, Recipe, keep, largest, logits, nucleus, scaled
from faults.sampler_types import Reading
from lumotree.sampling import SamplingParams
from lumotree.select_types import Step

_ALIKE = 1e-12
"""Largest difference of a probability that is rounding: orders of operations differ by about 1e-16."""


class LogitsSource:
    """A `StepSource` of a step whose rows are `params` applied to logits float64 `[N, V]`.

    Penalties are the presence penalty of tokens on the tree alone.
    """

    def __init__(self, params: SamplingParams, logits: Floats, step: Step) -> None:
        self.params, self.step, self._logits = params, step, logits

    @property
    def temperature(self) -> float:
        """The step's temperature."""
        return self.params.temperature

    def target(self, reading: Reading) -> Tensor:
        """Target rows float64 `[N, V]` under a reading; the step's own tensor where it reads nothing differently."""
        if not self.differs(reading):
            return self.step.target
        tree = self.step.tree
        own = self.step.target.numpy()
        rows = own.copy()
        for row in tree.active_rows:
            values = self._logits[row]
            if self.params.presence:
                values = values - self.params.presence * self._counts(row, reading)
            rows[row] = self._law(values, reading, not tree.active_children(row))
        # A row that comes out alike is the step's own, also if the step was computed in another order of operations.
        alike = np.abs(rows - own).max(1) < _ALIKE
        rows[alike] = own[alike]
        return torch.from_numpy(rows)

    def differs(self, reading: Reading) -> bool:
        """Whether a reading concerns a parameter that the step sets; ties or rows may still come out alike."""
        params = self.params
        return (
            reading.heat != 1
            or (reading.twice and params.temperature != 1)
            or (reading.ties != "index" and params.top_k > 0)
            or ((reading.swapped or reading.joint) and params.top_k > 0 and params.top_p < 1)
            or (reading.min_p != "all" and params.min_p > 0)
            or (reading.penalty != "path" and params.presence != 0)
        )

    def _counts(self, row: int, reading: Reading) -> Floats:
        """How often the presence penalty of each token is taken off, `[V]`."""
        tree, tokens = self.step.tree, self.step.tree.tokens.astype(np.int64)
        path = list(tree.path(row))
        seen = {
            "path": path,
            "twice-last": path,
            "flat": [other for other in tree.active_rows if other < row] + [row],
            "last": [row],
            "siblings": path + [other for other in tree.active_children(path[-2]) if other < row]
            if len(path) > 1
            else path,
            "none": [],
        }[reading.penalty]
        counts = np.zeros(self._logits.shape[1])
        counts[np.unique(tokens[seen])] = 1.0
        if reading.penalty == "twice-last":
            counts[tokens[row]] += 1.0
        return counts

    def _law(self, values: Floats, reading: Reading, leaf: bool) -> Floats:
        params = self.params
        heat = reading.heat * params.temperature * (params.temperature if reading.twice else 1.0)
        law = self._top(scaled(values, heat), reading)
        if params.min_p and (reading.min_p == "all" or (leaf and reading.min_p == "leaves")):
            law = keep(law, np.flatnonzero(law >= params.min_p * law.max()))
        return law

    def _top(self, law: Floats, reading: Reading) -> Floats:
        filters: list[Callable[[Floats], Ints]] = []
        params = self.params
        if params.top_k:
            filters.append(lambda row: largest(row, params.top_k, reading.ties))
        if params.top_p < 1:
            filters.append(lambda row: nucleus(row, params.top_p))
        if reading.swapped:
            filters.reverse()
        if reading.joint and filters:
            passed = [set(chosen(law).tolist()) for chosen in filters]
            return keep(law, np.array(sorted(set.intersection(*passed)), np.int64))
        for chosen in filters:
            law = keep(law, chosen(law))
        return law


class RecipeSource(LogitsSource):
    """A `StepSource` of `make_step(recipe, vocab)`; holds the logits (8 * 32 * vocab bytes)."""

    def __init__(self, recipe: Recipe, step: Step) -> None:
        super().__init__(recipe.params, logits(recipe, step.target.shape[1]), step)
