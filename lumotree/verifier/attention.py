"""Tree attention: every row attends to the committed prefix, its ancestors and itself, in position order.

A row's bits depend on its query, its keys and their count alone, see `lumotree.verifier.attend`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lumotree.backends.batch import flat_slots
from lumotree.backends.protocol import AttentionOps, Batch, KVCache
from lumotree.verifier.attend import Keys
from lumotree.verifier.attend import attend as attend  # found here by `verify`, and by those who put another there
from lumotree.verifier.lanes import Lane, ancestor_rows


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary_dim` channels of bf16 `x [T, H, dh]` in half-split pairs, fp32 inside, bf16 out.

    cos, sin: fp32 `[T, rotary_dim / 2]` at each row's position.
    """
    half = cos.shape[-1]
    turning, rest = x.split_with_sizes((2 * half, x.shape[-1] - 2 * half), -1)
    low, high = turning.float().split_with_sizes((half, half), -1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat([(low * c).sub_(high * s), (high * c).add_(low * s)], -1)
    return torch.cat([turned.bfloat16(), rest], -1)


#: Pairs of query head and key that are scored at a time: 4 MiB. Calls that have more are worked on part by part.
SCORES = 1 << 20


def verify(ops: AttentionOps, cache: KVCache, batch: Batch, out: Tensor, layer: int) -> None:
    """Write the active rows' rotated K and V to their candidate slots and their outputs to `out` bf16 `[T, Hq, dh]`."""
    paths = ancestor_rows(batch)
    if not paths:
        return
    # All rows are a view; some are gathered.
    whole = len(paths) == batch.rows
    rows = slice(0, batch.rows) if whole else torch.tensor(list(paths), dtype=torch.int64, device=out.device)
    position, place = batch.position[rows].long(), batch.row_slot[rows].long()
    heads = torch.cat([ops.k[rows], ops.q[rows]], 1)  # one pass over both: on small rows the calls are the cost
    key, query = rope(heads, ops.cos[position], ops.sin[position]).split_with_sizes((ops.k.shape[1], ops.q.shape[1]), 1)
    cache.k[layer, place] = key
    cache.v[layer, place] = ops.v[rows]
    done = 0
    for seen in seen_keys(batch, paths, SCORES // ops.q.shape[1]):
        part = slice(done, done + len(seen.own))
        attended = attend(query[part], seen.read(cache, layer))
        out[part if isinstance(rows, slice) else rows[part]] = attended
        done = part.stop


@dataclass
class Seen:
    """What some rows see: flat slots of their keys, request by request; own, spans as in `Keys`."""

    slots: list[NDArray[np.int64]] = field(default_factory=list)
    own: list[NDArray[np.int64]] = field(default_factory=list)
    spans: list[tuple[slice, slice]] = field(default_factory=list)
    keys: int = 0
    pairs: int = 0

    def add(self, slots: NDArray[np.int64], own: Sequence[NDArray[np.int64]]) -> None:
        """Rows of one request, whose keys are numbered within `slots`."""
        self.spans.append((slice(len(self.own), len(self.own) + len(own)), slice(self.keys, self.keys + len(slots))))
        self.own += [self.keys + numbers for numbers in own]
        self.slots.append(slots)
        self.keys += len(slots)
        self.pairs += len(slots) * len(own)

    def read(self, cache: KVCache, layer: int) -> Keys:
        """From a layer of the cache."""
        heads, dim = cache.k.shape[2:]
        where = torch.from_numpy(np.concatenate(self.slots)).to(cache.k.device)
        k = torch.empty((heads, dim, self.keys), dtype=torch.float32, device=cache.k.device)
        v = torch.empty((self.keys + 1, heads, dim), dtype=torch.float32, device=cache.k.device)
        k.copy_(cache.k[layer, where].permute(1, 2, 0))
        v[:-1].copy_(cache.v[layer, where])
        v[-1].zero_()
        return Keys(k, v, tuple(self.own), tuple(self.spans))


def seen_keys(batch: Batch, paths: Mapping[int, Sequence[int]], most: int) -> Iterator[Seen]:
    """The keys of rows (row -> its path, rows of a request together): the committed prefix, then the path. In parts of
    at most `most` pairs of row and key where one row allows it."""
    prefix, request = batch.prefix_len.tolist(), batch.row_request.tolist()
    table, target = batch.page_table.cpu().numpy(), batch.row_slot.cpu().numpy()
    seen, size = Seen(), batch.page_size
    for i, group in itertools.groupby(paths, request.__getitem__):
        rows, position = list(group), np.arange(prefix[i])
        page, place = np.divmod(position, size)
        slots = np.concatenate([table[i, page].astype(np.int64) * size + place, target[rows]])
        number = {row: prefix[i] + at for at, row in enumerate(rows)}
        fits = max(1, most // len(slots))
        for lo in range(0, len(rows), fits):
            run = rows[lo : lo + fits]
            if seen.own and seen.pairs + len(run) * len(slots) > most:
                yield seen
                seen = Seen()
            seen.add(slots, [np.concatenate([position, [number[r] for r in paths[row]]]) for row in run])
    yield seen


def publish(cache: KVCache, batch: Batch, lanes: Sequence[Lane], layers: Sequence[int]) -> None:
    """Move accepted rows from their candidate slots to the committed slots of positions prefix_len, prefix_len + 1, ...

    Every source is read before anything is written: candidate and committed slots may overlap, also across requests.
    """
    if not lanes:
        return
    prefix = batch.prefix_len.tolist()
    source = torch.cat([batch.row_slot[list(lane.rows)].long() for lane in lanes])
    target = torch.cat(
        [
            flat_slots(
                batch.page_table,
                batch.page_size,
                lane.request,
                range(prefix[lane.request], prefix[lane.request] + len(lane.rows)),
            )
            for lane in lanes
        ]
    )
    for layer in layers:
        for tensor in (cache.k, cache.v):
            tensor[layer, target] = tensor[layer, source]
