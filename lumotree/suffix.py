"""Suffix matching: what came last time the text stood like this. No model, no state, a function of the tokens alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lumotree.errors import InputError

#: A shorter match says too little, a longer one says no more.
SHORTEST, LONGEST = 3, 64


def next_token(tokens: NDArray[np.int64], shortest: int = SHORTEST, longest: int = LONGEST) -> int | None:
    """The token that followed the latest earlier occurrence of the longest suffix of `tokens` int64 `[n]` that occurs
    earlier, occurrences that overlap the end included; None if no suffix of `shortest` tokens does.

    Suffixes beyond `longest` tokens are not told apart. Raises InputError unless 1 <= shortest <= longest.
    """
    if not 1 <= shortest <= longest:
        raise InputError(f"suffix: expected 1 <= shortest <= longest, got shortest={shortest}, longest={longest}")
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last]) if last > 0 else np.zeros(0, np.int64)
    size = 1
    while len(ends) and size < longest:
        longer = ends[ends >= size]
        longer = longer[tokens[longer - size] == tokens[last - size]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    return int(tokens[ends[-1] + 1]) if len(ends) and size >= shortest else None


def continuation(tokens: NDArray[np.int64], count: int, shortest: int = SHORTEST, longest: int = LONGEST) -> list[int]:
    """Up to `count` tokens, each `next_token` of all before it; ends where nothing matches. Raises as that does."""
    text = tokens
    for _ in range(count):
        token = next_token(text, shortest, longest)
        if token is None:
            break
        text = np.append(text, token)
    return [int(token) for token in text[len(tokens) :]]
