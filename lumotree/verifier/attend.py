"""Softmax over the keys of many rows at once, each row with the bits that it has alone.

Scores and sums are elementwise products added in the order of `halve`. Rows see different numbers of keys: their sums
are laid out by `lumotree.verifier.padded`. The maximum is exact in any order. exp is called on one row's
`[heads, keys]` at a time, without gaps and at the alignment of a fresh tensor, as though the row were alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lumotree.verifier.padded import NEUTRAL, places, tile_size
from lumotree.verifier.step import halve, in_place, inverse_root

#: Products that are worked on at a time: 1 MiB, which stays in a core's cache.
TOGETHER = 1 << 18
#: fp32 elements of the alignment of a fresh tensor, 64 bytes.
_ALIGNED = 16


@dataclass(frozen=True)
class Keys:
    """What R rows attend to. k: fp32 `[Hkv, dh, n]`; v: fp32 `[n + 1, Hkv, dh]`, zeros behind the n values.

    own: numbers of each row's keys, in position order. spans: consecutive rows, and the consecutive keys among which
    theirs are; every row is in one. Keys lie transposed so that scores add contiguous vectors over the keys.
    """

    k: Tensor
    v: Tensor
    own: tuple[NDArray[np.int64], ...]
    spans: tuple[tuple[slice, slice], ...]

    def of(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys `[Hkv, dh, m]` and values `[Hkv, m, dh]` of one row, in position order; copies."""
        own = torch.from_numpy(self.own[row]).to(self.k.device)
        return self.k[:, :, own], self.v[own].transpose(0, 1)


def attend(q: Tensor, keys: Keys) -> Tensor:
    """bf16 `[R, Hq, dh]`: each row's softmax over its own keys of fp32 scores scaled by dh^-1/2. q: rotated bf16."""
    kv_heads, dim, count = keys.k.shape
    heads = q.shape[1]
    if q.shape[0] == 1 and heads * dim * count <= TOGETHER and keys.own[0].tolist() == list(range(count)):
        return _alone(q, keys.k, keys.v[:-1])
    query, scale = q.float().reshape(len(q), kv_heads, heads // kv_heads, dim, 1), inverse_root(dim)
    parts = [_summed(query[rows], keys.k[:, None, :, span]).mul_(scale).view(-1) for rows, span in keys.spans]
    scores, (first, width) = torch.cat(parts), _score_places(keys, heads)
    out = torch.empty_like(q)
    for rows in _alike([len(own) for own in keys.own], heads * dim):
        own = [keys.own[row] for row in rows]
        layout = _layout(tuple(map(len, own)), heads, q.device)
        at = (first[rows] + layout.beside(own))[:, None] + width[rows, None] * np.arange(heads)[:, None]
        weights = _weights(scores[torch.from_numpy(at).to(q.device)], layout)
        values = keys.v[torch.from_numpy(layout.tiled(own, len(keys.v) - 1)).to(q.device)]
        mixed = _summed(weights.view(len(rows), kv_heads, -1, layout.size, 1), values.transpose(1, 2).unsqueeze(2))
        out[rows] = mixed.view(len(rows), heads, dim).bfloat16()
    return out


def _alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attend` of a lone row that sees all keys in their order: nothing to lay out. v: `[n, Hkv, dh]`."""
    kv_heads, dim, _ = k.shape
    query = q.float().reshape(kv_heads, -1, dim, 1)
    scores = halve(query * k.unsqueeze(1), 2) * inverse_root(dim)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = weights.div_(halve(weights.clone(), -1).unsqueeze(-1))
    return halve(weights.unsqueeze(-1) * v.transpose(0, 1).unsqueeze(1), 2).reshape(q.shape).bfloat16()


def _score_places(keys: Keys, heads: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the scores `[rows, heads, keys]` of all spans, one behind the other, hold those of a row: key j under head
    h is at `first + j + h * width`. Each int64 `[R, 1]`."""
    first, width = np.empty((2, len(keys.own), 1), np.int64)
    base = 0
    for rows, span in keys.spans:
        lines, count = heads * np.arange(rows.stop - rows.start), span.stop - span.start
        first[rows, 0], width[rows, 0] = base - span.start + count * lines, count
        base += heads * len(lines) * count
    return first, width


def _alike(lengths: Sequence[int], products: int) -> Iterator[list[int]]:
    """Rows in runs of similar length that make at most `TOGETHER` products, `products` for each key of a row."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    while order:
        fits = max(1, TOGETHER // (products * lengths[order[-1]]))
        yield order[-fits:]
        del order[-fits:]


def _summed(x: Tensor, y: Tensor) -> Tensor:
    """`x * y`, broadcast to 5 dimensions, summed over dimension 3: `[rows, heads, group, last]`, without gaps.

    The products of all parts lie in the same memory: fresh pages cost more than the arithmetic done in them.
    """
    y = y if y.dim() == 5 else y.unsqueeze(0)
    rows, heads, group, summed, last = map(max, zip(x.shape, y.shape, strict=True))
    result = torch.empty((rows, heads, group, last), dtype=x.dtype, device=x.device)
    x, y = x.expand(rows, heads, group, summed, -1), y.expand(rows, heads, -1, summed, last)
    scratch: Tensor | None = None
    for r, h in _blocks(rows, heads, group * summed * last):
        a, b = x[r, h], y[r, h]
        if scratch is None:
            scratch = torch.empty((*a.shape[:4], last), dtype=x.dtype, device=x.device)
        product = scratch[: len(a), : a.shape[1]]
        torch.mul(a, b, out=product)
        result[r, h] = halve(product, 3)
    return result


def _blocks(rows: int, heads: int, products: int) -> Iterator[tuple[slice, slice]]:
    """Rows and heads in runs of at most `TOGETHER` products, `products` for each head of a row, but at least one head;
    elementwise work, so any cut has its bits."""
    width = max(1, min(heads, TOGETHER // products))
    height = max(1, TOGETHER // (heads * products))
    for lo in range(0, rows, height):
        for h in range(0, heads, width):
            yield slice(lo, lo + height), slice(h, h + width)


class _Layout:
    """How the scores of R rows of given lengths are brought together.

    apart: from scores `[R, heads, longest]` to those of one row behind the other, with gaps between them and one
    element behind them; split by `sizes` every second piece is a gap. tile: from these, the last of which is neutral,
    to `[R, heads, size]`, summands in their `places`.
    """

    def __init__(self, lengths: Sequence[int], heads: int, device: torch.device) -> None:
        counts, rows = np.array(lengths), np.arange(len(lengths))
        self.shape, self.size = (len(lengths), max(lengths)), tile_size(lengths)
        row = np.repeat(rows, counts)  # of each key of all rows, as all that is of one size from here on
        begin = np.cumsum(counts) - counts
        nth = np.arange(len(row)) - begin[row]
        self._dense = row * self.shape[1] + nth
        place = np.concatenate([places(length, self.size) for length in lengths])
        self._spread = row * self.size + place
        head = np.arange(heads)[:, None]
        gaps = -heads * counts % _ALIGNED
        at = (heads * begin + np.cumsum(gaps) - gaps)[row] + head * counts[row] + nth
        apart = np.zeros(heads * len(row) + int(gaps.sum()) + 1, np.int64)
        apart[at] = (row * heads + head) * self.shape[1] + nth
        tile = np.full(len(lengths) * heads * self.size, len(apart) - 1)
        tile[(row * heads + head) * self.size + place] = at
        self.apart = torch.from_numpy(apart).to(device)
        self.sizes = [*np.stack([heads * counts, gaps], 1).ravel().tolist(), 1]
        self.tile = torch.from_numpy(tile.reshape(-1, heads, self.size)).to(device)

    def beside(self, own: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Keys of the rows `[R, longest]`; behind its last key a row has its first again."""
        found = np.repeat(np.array([keys[0] for keys in own]), self.shape[1])
        found[self._dense] = np.concatenate(own)
        return found.reshape(self.shape)

    def tiled(self, own: Sequence[NDArray[np.int64]], other: int) -> NDArray[np.int64]:
        """Keys of the rows `[R, size]` in their places, `other` in between."""
        found = np.full(self.shape[0] * self.size, other)
        found[self._spread] = np.concatenate(own)
        return found.reshape(-1, self.size)


@lru_cache(maxsize=64)
def _layout(lengths: tuple[int, ...], heads: int, device: torch.device) -> _Layout:
    """Layers and steps often see rows of the same lengths."""
    return _Layout(lengths, heads, device)


def _weights(scores: Tensor, layout: _Layout) -> Tensor:
    """Softmax of scores `[R, heads, longest]` over each row's own keys: fp32 `[R, heads, size]`, in their places."""
    shifted = scores - scores.amax(-1, keepdim=True)
    apart = shifted.view(-1)[layout.apart]
    in_place(torch.exp, apart.split_with_sizes(layout.sizes)[:-1:2])
    apart[-1] = NEUTRAL
    weights = apart[layout.tile]
    return weights / halve(weights.clone(), -1).unsqueeze(-1)
