"""Target rows from logits: sampling parameters per row, with every convention that implementations differ in stated.

The row of a tree row r is the law of the token after r: its history is what was committed before row 0, then the tokens
of the path from row 0 (the pending token, not yet counted as committed) to r itself. The same function serves plain
decoding (a tree of one row), so that a verifier's target cannot drift from the sampler's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lumotree.errors import InputError
from lumotree.tree import Tree

#: The one threshold at or below which a temperature means greedy (vLLM's value).
GREEDY_TEMPERATURE = 1e-5

Stage = Literal["penalties", "temperature", "top_k", "top_p", "min_p"]

#: Default order (that of Hugging Face transformers and vLLM, min-p last).
ORDER: tuple[Stage, ...] = ("penalties", "temperature", "top_k", "top_p", "min_p")


def _demand(name: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise InputError(f"{name} {value!r}: expected {allowed}")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one row.

    temperature: logits are divided by it; at or below GREEDY_TEMPERATURE the row is one-hot at the first argmax of the
    penalised logits and nothing is divided. top_k: 0 = off. top_p: in (0, 1], 1 = off. min_p: in [0, 1], keeps tokens
    of probability >= min_p * largest, 0 = off. repetition: > 0, divides positive and multiplies other logits of tokens
    seen in prompt, output or ancestors, 1 = off. presence, frequency: subtracted once, or once an occurrence, for
    tokens of output or ancestors, 0 = off. Raises InputError naming the parameter.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        _demand("temperature", self.temperature, 0 <= self.temperature < math.inf, "finite and >= 0")
        _demand("top_k", self.top_k, isinstance(self.top_k, int) and self.top_k >= 0, "an integer >= 0 (0 = off)")
        _demand("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _demand("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _demand("repetition", self.repetition, 0 < self.repetition < math.inf, "finite and > 0")
        _demand("presence", self.presence, math.isfinite(self.presence), "finite")
        _demand("frequency", self.frequency, math.isfinite(self.frequency), "finite")

    @property
    def penalised(self) -> bool:
        """Whether any penalty is on, so that the history matters."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


@dataclass(frozen=True)
class Conventions:
    """What implementations disagree about.

    order: the stages in the order they apply. top_k_ties: at the k-th largest value keep "index" = exactly k, lowest
    indices first (default, a sort's answer), or "all" = every token tied with it (a threshold's answer). top_k_top_p:
    "sequential" = each filter sees the law renormalised over what the earlier one kept (default), or "joint" = top-p
    looks at the law that top-k saw too, and a token must pass both. Ties at the top-p boundary go by index; top-p keeps
    the fewest largest tokens whose mass reaches top_p, so at least one. Raises InputError naming the argument.
    """

    order: tuple[Stage, ...] = ORDER
    top_k_ties: Literal["index", "all"] = "index"
    top_k_top_p: Literal["sequential", "joint"] = "sequential"

    def __post_init__(self) -> None:
        _demand("order", self.order, sorted(self.order) == sorted(ORDER), f"a permutation of {ORDER}")
        _demand("top_k_ties", self.top_k_ties, self.top_k_ties in ("index", "all"), "'index' or 'all'")
        joint = self.top_k_top_p
        _demand("top_k_top_p", joint, joint in ("sequential", "joint"), "'sequential' or 'joint'")


DEFAULT_CONVENTIONS = Conventions()


def target_rows(
    logits: Tensor,
    tree: Tree,
    params: SamplingParams | Sequence[SamplingParams],
    conventions: Conventions = DEFAULT_CONVENTIONS,
    prompt_counts: Tensor | None = None,
    output_counts: Tensor | None = None,
) -> Tensor:
    """Law of the token after each active row, float64 `[N, V]`, each summing to 1; zeros for inactive rows.

    logits: `[N, V]` of any float dtype, -inf allowed. params: of all rows, or one a row. prompt_counts, output_counts:
    int `[V]`, occurrences before row 0 (the prompt's count only for the repetition penalty), none by default. Inputs
    are not changed. Raises InputError naming the row and value: NaN, +inf, a row of -inf; bad shapes; a path token
    outside the vocabulary of a row that has penalties.
    """
    if logits.ndim != 2 or logits.shape[0] != tree.n or not logits.dtype.is_floating_point:
        raise InputError(f"logits: expected float [{tree.n}, V], got {logits.dtype} {list(logits.shape)}")
    of_row = [params] * tree.n if isinstance(params, SamplingParams) else list(params)
    if len(of_row) != tree.n:
        raise InputError(f"params: expected one or {tree.n}, got {len(of_row)}")
    vocab = logits.shape[1]
    prompt, output = _counts("prompt_counts", prompt_counts, vocab), _counts("output_counts", output_counts, vocab)
    rows = torch.zeros(logits.shape, dtype=torch.float64)
    for row in tree.active_rows:
        values = logits[row].to(torch.float64)
        _check_logits(row, values)
        history = (prompt, output, tree.tokens[list(tree.path(row))])
        rows[row] = _Row(values, of_row[row], conventions, row, history).law()
    return rows


class _Row:
    """One row on its way through the stages. logits, keep: float64 and bool `[V]`."""

    def __init__(
        self,
        logits: Tensor,
        params: SamplingParams,
        conventions: Conventions,
        row: int,
        history: tuple[Tensor, Tensor, np.ndarray],
    ) -> None:
        self.logits, self.params, self.conventions, self.row, self.history = logits, params, conventions, row, history
        self.keep = torch.isfinite(logits)
        self.before_top: Tensor | None = None  # what was kept before the first of top-k and top-p

    def law(self) -> Tensor:
        """Apply the stages in order and return probabilities, float64 `[V]`."""
        stages: dict[Stage, Callable[[], None]] = {
            "penalties": self._penalties,
            "temperature": self._temperature,
            "top_k": self._top_k,
            "top_p": self._top_p,
            "min_p": self._min_p,
        }
        if self.params.temperature <= GREEDY_TEMPERATURE:
            self._penalties()  # the argmax survives every filter, and so do no others
            return torch.zeros_like(self.logits).index_fill_(0, torch.tensor(first_argmax(self.logits)), 1.0)
        for stage in self.conventions.order:
            stages[stage]()
        return self._probabilities(self.keep)

    def _penalties(self) -> None:
        params = self.params
        if not params.penalised:
            return
        prompt, output, path = self.history
        if path.min() < 0 or path.max() >= len(self.logits):
            raise InputError(
                f"row {self.row}: path token {int(path.max() if path.min() >= 0 else path.min())} is outside the "
                f"vocabulary; allowed: 0..{len(self.logits) - 1}"
            )
        count = output + torch.bincount(torch.from_numpy(path), minlength=len(self.logits))
        seen = (count + prompt) > 0
        scaled = torch.where(self.logits > 0, self.logits / params.repetition, self.logits * params.repetition)
        self.logits = torch.where(seen, scaled, self.logits)
        self.logits = self.logits - params.frequency * count - params.presence * (count > 0)

    def _temperature(self) -> None:
        # The largest logit becomes 0 first: a small temperature must not overflow.
        self.logits = (self.logits - self.logits.max()) / self.params.temperature

    def _top_k(self) -> None:
        k = self.params.top_k
        self.before_top = self.keep if self.before_top is None else self.before_top
        values = self.logits.masked_fill(~self.keep, -math.inf)
        if not 0 < k < int(self.keep.sum()):
            return
        boundary = torch.topk(values, k).values[-1]
        above, tied = values > boundary, values == boundary
        if self.conventions.top_k_ties == "index":
            extra = torch.nonzero(tied)[k - int(above.sum()) :, 0]
            tied[extra] = False
        self.keep = above | tied

    def _top_p(self) -> None:
        if self.params.top_p == 1:
            return
        self.before_top = self.keep if self.before_top is None else self.before_top
        seen = self.before_top if self.conventions.top_k_top_p == "joint" else self.keep
        ordered, index = self._probabilities(seen).sort(descending=True, stable=True)
        before = torch.cumsum(ordered, 0).roll(1)
        before[0] = 0
        inside = torch.zeros_like(self.keep)
        inside[index[before < self.params.top_p]] = True
        # Jointly, top-p's set and top-k's both hold the largest tokens first, so their intersection is not empty.
        self.keep = self.keep & inside

    def _min_p(self) -> None:
        if self.params.min_p > 0:
            law = self._probabilities(self.keep)
            self.keep = self.keep & (law >= self.params.min_p * law.max())

    def _probabilities(self, keep: Tensor) -> Tensor:
        return torch.softmax(self.logits.masked_fill(~keep, -math.inf), 0)


def first_argmax(values: Tensor) -> int:
    """Index of the largest value, the first of tied ones (NumPy promises that, torch does not)."""
    return int(np.argmax(values.cpu().numpy()))


def _check_logits(row: int, values: Tensor) -> None:
    wrong = torch.isnan(values) | (values == math.inf)
    if bool(wrong.any()):
        token = int(torch.nonzero(wrong)[0, 0])
        raise InputError(
            f"logits row {row} is {float(values[token])} at token {token}; expected finite numbers or -inf"
        )
    if not bool(torch.isfinite(values).any()):
        raise InputError(f"logits row {row} is -inf at every token; at least one must be possible")


def _counts(name: str, counts: Tensor | None, vocab: int) -> Tensor:
    if counts is None:
        return torch.zeros(vocab, dtype=torch.int64)
    if counts.shape != (vocab,) or counts.dtype.is_floating_point or bool((counts < 0).any()):
        raise InputError(f"{name}: expected non-negative integers [{vocab}], got {counts.dtype} {list(counts.shape)}")
    return counts.to(torch.int64)
