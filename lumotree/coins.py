"""Counter-based coins: a uniform number is a pure function of its address.

An address is (seed, request, cycle, row, purpose). Nothing is advanced, so a coin depends neither on the batch a
request sits in, nor on the order of rows, nor on what was refused before. Generator: Philox4x32-10 (Salmon, Moraes,
Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11), key = seed, counter = (request low, request high,
cycle, row * 256 + purpose // 2). One block is 128 bits, that is two coins of 64 bits, of which 53 are used.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import IntEnum
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lumotree.errors import InputError
from lumotree.select_types import Coins

Words = NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_CHUNK = 1 << 15  # coins at a time: few enough for a core's second-level cache, enough to hide the call overhead

MAX_ROW = 1 << 24


class Purpose(IntEnum):
    """What a coin decides; no two purposes share a coin."""

    ACCEPT = 0
    RESIDUAL = 1
    DRAFT = 2


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of 32-bit words held in uint64 arrays that broadcast together; key: two 32-bit integers."""
    c0, c1, c2, c3 = (np.array(words) for words in np.broadcast_arrays(*counter))
    low, high = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = key
    for _ in range(_ROUNDS):  # in place: half of the time would go into fresh memory
        np.multiply(c0, _MULTIPLIERS[0], out=low)
        np.multiply(c2, _MULTIPLIERS[1], out=high)
        np.right_shift(high, _SHIFT, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(k0)
        np.right_shift(low, _SHIFT, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(k1)
        np.bitwise_and(high, _MASK, out=c1)
        np.bitwise_and(low, _MASK, out=c3)
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(
    seed: int, requests: Sequence[int] | Tensor, cycle: int, row: int, purpose: Purpose
) -> NDArray[np.float64]:
    """The coins of one row and purpose, float64 `[W]`, one a request. Raises InputError for an address out of range."""
    key, numbers = _key(seed), _requests(requests)
    both = _coins(key, numbers, _number("cycle", cycle, 1 << 32), [row], purpose // 2)
    coins: NDArray[np.float64] = both[purpose % 2, 0]
    return coins


def coins_for(
    seed: int, requests: Sequence[int] | Tensor, cycle: int, n: int, rows: Sequence[int] | None = None
) -> Coins:
    """Accept and residual coins of W requests over a tree of n rows, float64 `[W, n]` (columns contiguous).

    seed: 0..2^64-1. requests: W different numbers in 0..2^63-1 (in a Monte Carlo run each walk is a request). cycle:
    0..2^32-1. rows: the rows that need coins, all by default; the coins of other rows are 0 and mean nothing (pass
    `tree.active_rows`). Raises InputError naming the number out of range.
    """
    key, numbers, turn = _key(seed), _requests(requests), _number("cycle", cycle, 1 << 32)
    both = np.zeros((2, _number("rows", n, MAX_ROW), len(numbers)))
    chosen = list(range(n) if rows is None else rows)
    both[:, chosen] = _coins(key, numbers, turn, chosen, Purpose.ACCEPT // 2)
    accept, residual = both
    return Coins(torch.from_numpy(accept).T, torch.from_numpy(residual).T)


def coins_at(seed: int, request: int, cycle: int, rows: Sequence[int]) -> tuple[list[float], list[float]]:
    """Accept and residual coins of some rows of one request: those of `coins_for`, all in one call.

    Raises InputError naming the number out of range.
    """
    accept, residual = _coins_of_rows(seed, request, cycle, rows, Purpose.ACCEPT // 2)
    return accept.tolist(), residual.tolist()


def draft_coins_at(seed: int, request: int, cycle: int, rows: Sequence[int]) -> NDArray[np.float64]:
    """Draft coins of some rows of one request, float64 `[rows]`: those of `draft_coins`, all in one call."""
    draft: NDArray[np.float64] = _coins_of_rows(seed, request, cycle, rows, Purpose.DRAFT // 2)[Purpose.DRAFT % 2]
    return draft


def _coins_of_rows(seed: int, request: int, cycle: int, rows: Sequence[int], block: int) -> NDArray[np.float64]:
    return _coins(_key(seed), _requests([request]), _number("cycle", cycle, 1 << 32), rows, block)[:, :, 0]


def draft_coins(
    seed: int, requests: Sequence[int] | Tensor, cycle: int, n: int, rows: Sequence[int] | None = None
) -> Tensor:
    """Draft coins, float64 `[W, n]`: coin [w, r] draws the token of row r. Arguments as in `coins_for`."""
    key, numbers, turn = _key(seed), _requests(requests), _number("cycle", cycle, 1 << 32)
    draft = np.zeros((_number("rows", n, MAX_ROW), len(numbers)))
    chosen = list(range(n) if rows is None else rows)
    draft[chosen] = _coins(key, numbers, turn, chosen, Purpose.DRAFT // 2)[Purpose.DRAFT % 2]
    return torch.from_numpy(draft).T


def _coins(key: tuple[int, int], requests: Words, cycle: int, rows: Sequence[int], block: int) -> NDArray[np.float64]:
    """Both coins of one block, float64 `[2, rows, W]`: rows of few requests in one call, many requests in several."""
    tail = np.array([_number("row", row, MAX_ROW) * 256 + block for row in rows], np.uint64)[:, None]
    both = np.empty((2, len(rows), len(requests)))
    step = max(1, _CHUNK // max(1, len(requests)))
    for first, start in product(range(0, len(rows), step), range(0, len(requests), _CHUNK)):
        part = requests[start : start + _CHUNK]
        counter = part & _MASK, part >> _SHIFT, np.full(1, cycle, np.uint64), tail[first : first + step]
        words = philox4x32(counter, key)
        place = slice(first, first + step), slice(start, start + _CHUNK)
        both[0][place], both[1][place] = _to_unit(words[0], words[1]), _to_unit(words[2], words[3])
    return both


def _to_unit(low: Words, high: Words) -> NDArray[np.float64]:
    """53 of 64 bits as a multiple of 2^-53: exactly 0 and 1 - 2^-53 are possible, 1 is not."""
    return ((high << _SHIFT | low) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _key(seed: int) -> tuple[int, int]:
    number = _number("seed", seed, 1 << 64)
    return number & 0xFFFFFFFF, number >> 32


def _requests(requests: Sequence[int] | Tensor) -> Words:
    numbers = np.asarray(requests.cpu() if isinstance(requests, Tensor) else requests)
    if numbers.size == 0:
        return np.zeros(0, np.uint64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise InputError(f"coins: requests must be integers [W], got {numbers.dtype} with shape {numbers.shape}")
    if int(numbers.min()) < 0 or int(numbers.max()) >= 1 << 63:
        bad = int(numbers.min()) if int(numbers.min()) < 0 else int(numbers.max())
        raise InputError(f"coins: request {bad} is out of range; allowed: 0..2^63-1")
    return numbers.astype(np.uint64)


def _number(name: str, value: int, end: int) -> int:
    try:
        number = operator.index(value)
    except TypeError as cause:
        raise InputError(f"coins: {name} must be an integer, got {value!r}") from cause
    if not 0 <= number < end:
        raise InputError(f"coins: {name} {number} is out of range; allowed: 0..{end - 1}")
    return number
