"""Predictors that a model must beat to be worth anything: uniform, unigram, and an order-3 n-gram."""

from __future__ import annotations

import lzma

import numpy as np
from numpy.typing import NDArray

from lumotree.byte_tokens import END

Tokens = NDArray[np.int16]
Floats = NDArray[np.float64]

_SYMBOLS = END + 1


def baselines(train: Tokens, held_out: Tokens, order: int = 3) -> dict[str, float]:
    """Bits per token of the held-out stream under each predictor fitted on the training stream.

    The n-gram predicts from up to `order` tokens before, each order interpolated with the next lower one by Witten and
    Bell's rule, the lowest with the uniform law. `lzma` is the held-out stream compressed by itself.
    """
    laws = ngram_probabilities(train, held_out, order)
    packed = lzma.compress(bytes(held_out[held_out < END].astype(np.uint8)), preset=9)
    return {
        "uniform": float(np.log2(_SYMBOLS)),
        "unigram": float(-np.log2(ngram_probabilities(train, held_out, 0)).mean()),
        f"order-{order} n-gram": float(-np.log2(laws).mean()),
        "lzma": 8 * len(packed) / len(held_out),
    }


def ngram_probabilities(train: Tokens, text: Tokens, order: int) -> Floats:
    """Probability of each token of `text` given up to `order` tokens before it, float64 `[len(text)]`."""
    law = np.full(len(text), 1.0 / _SYMBOLS)
    for size in range(order + 1):
        law = _interpolated(_contexts(train, size), train, _contexts(text, size), text, law)
    return law


def _contexts(tokens: Tokens, size: int) -> NDArray[np.int64]:
    """One number for the `size` tokens before each place; places too early for that have one of their own."""
    number = np.zeros(len(tokens), np.int64)
    for back in range(1, size + 1):
        before = np.full(len(tokens), _SYMBOLS, np.int64)
        before[back:] = tokens[:-back]
        number = number * (_SYMBOLS + 1) + before
    return number


def _interpolated(
    seen: NDArray[np.int64], train: Tokens, asked: NDArray[np.int64], text: Tokens, lower: Floats
) -> Floats:
    """(count(context, token) + kinds(context) * lower) / (count(context) + kinds(context)), `lower` if never seen."""
    pairs, counts = np.unique(seen * _SYMBOLS + train, return_counts=True)
    contexts, first, kinds = np.unique(pairs // _SYMBOLS, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first)
    of_pair = _looked_up(pairs, counts, asked * _SYMBOLS + text)
    of_context, kinds_of = _looked_up(contexts, totals, asked), _looked_up(contexts, kinds, asked)
    known = of_context > 0
    return np.where(known, (of_pair + kinds_of * lower) / np.where(known, of_context + kinds_of, 1), lower)


def _looked_up(keys: NDArray[np.int64], values: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[place] == asked, values[place], 0)
