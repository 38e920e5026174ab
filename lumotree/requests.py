"""What is asked of a decoder, and what has become of it so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lumotree.draft_types import Drafter
from lumotree.errors import RequestError
from lumotree.sampling import GREEDY_TEMPERATURE, SamplingParams
from lumotree.select import RULES, Rule
from lumotree.slots import Lease

GREEDY = SamplingParams(temperature=0.0)


class Finish(Enum):
    """Why a request ended."""

    EOS = "eos"
    LENGTH = "length"


@dataclass(frozen=True)
class Request:
    """One request.

    number: its name, and with `seed` the address of its coins; different for all requests of a decoder.
    prompt: token ids, at least one. max_tokens: most tokens to emit, at least one. eos: end-of-sequence token or None.
    drafter: None decodes with zero drafts. rule: name of a selection rule; "auto" is greedy at temperature 0 and
    multi-round otherwise. chunk: most prompt tokens fed in one cycle, None = as many rows as the decoder has.

    Raises RequestError naming the field.
    """

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    drafter: Drafter | None = None
    rule: str = "auto"
    eos: int | None = None
    seed: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        where = f"request {self.number}"
        if not self.prompt:
            raise RequestError(f"{where}: expected at least one prompt token, got an empty prompt")
        if self.number < 0 or self.seed < 0:
            raise RequestError(f"{where}: expected number and seed >= 0, got seed={self.seed}")
        if self.max_tokens < 1:
            raise RequestError(f"{where}: expected max_tokens >= 1, got max_tokens={self.max_tokens}")
        if self.chunk is not None and self.chunk < 1:
            raise RequestError(f"{where}: expected chunk >= 1 or None, got chunk={self.chunk}")
        if self.rule != "auto" and self.rule not in RULES:
            raise RequestError(f"{where}: expected rule auto, {', '.join(RULES)}, got rule={self.rule!r}")

    @property
    def greedy(self) -> bool:
        """Whether every law of this request is one-hot."""
        return self.sampling.temperature <= GREEDY_TEMPERATURE

    @property
    def selection(self) -> Rule:
        """The rule, without eos and budget."""
        return RULES[self.rule if self.rule != "auto" else "greedy" if self.greedy else "multi-round"]

    @property
    def longest(self) -> int:
        """Most positions that are ever materialised: the last emitted token never is."""
        return len(self.prompt) + self.max_tokens - 1


def check_tokens(where: str, tokens: Sequence[int], vocab: int) -> None:
    """Raise RequestError naming position and value of a token outside the vocabulary."""
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise RequestError(
                f"{where}: token {token} at position {position} is outside the vocabulary; allowed: 0..{vocab - 1}"
            )


@dataclass
class Running:
    """An admitted request; only publication changes it.

    tokens: prompt and output. committed: m, how many of them are materialised. hidden: bf16 `[H]`, the target's row at
    m - 1, None before the first token. cycle: verifications so far that emitted something (the address of the next
    coins). paths: accepted length of each decoding cycle, root included.
    """

    request: Request
    lease: Lease
    tokens: list[int]
    committed: int = 0
    hidden: Tensor | None = None
    cycle: int = 0
    finished: Finish | None = None
    paths: list[int] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The request's number."""
        return self.request.number

    @property
    def output(self) -> list[int]:
        """What was emitted, the pending token included."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_tokens - len(self.output)

    @property
    def prefilling(self) -> bool:
        """Whether nothing was emitted yet."""
        return len(self.tokens) == len(self.request.prompt)

    def array(self) -> NDArray[np.int64]:
        """All tokens, the pending one last."""
        return np.asarray(self.tokens, dtype=np.int64)

    def emit(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens and decide whether the request has ended. Ends with the first end-of-sequence."""
        self.tokens.extend(tokens)
        if self.request.eos is not None and tokens[-1] == self.request.eos:
            self.finished = Finish.EOS
        elif self.left <= 0:
            self.finished = Finish.LENGTH
