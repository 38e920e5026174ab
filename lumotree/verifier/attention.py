"""Tree attention: every row attends to the committed prefix, its ancestors and itself, in position order.

A row's bits depend on its query, its keys and their count alone: scores and sums are elementwise products added in
the order of `halve`, the maximum is exact in any order, and exp is called on one row's `[heads, keys]` at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.backends.batch import flat_slots
from lumotree.backends.protocol import AttentionOps, Batch, KVCache
from lumotree.verifier.lanes import Lane, ancestor_rows
from lumotree.verifier.step import halve


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary_dim` channels of bf16 `x [T, H, dh]` in half-split pairs, fp32 inside, bf16 out.

    cos, sin: fp32 `[T, rotary_dim / 2]` at each row's position.
    """
    half = cos.shape[-1]
    low, high = x[..., :half].to(torch.float32), x[..., half : 2 * half].to(torch.float32)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat([low * c - high * s, high * c + low * s], dim=-1)
    return torch.cat([turned.to(torch.bfloat16), x[..., 2 * half :]], dim=-1)


@dataclass(frozen=True)
class Keys:
    """fp32 keys `[Hkv, dh, n]` and values `[Hkv, n, dh]` of one request: committed prefix, then room for a path.

    Keys lie transposed so that scores add contiguous vectors over the keys.
    """

    k: Tensor
    v: Tensor

    @staticmethod
    def room(cache: KVCache, count: int) -> Keys:
        """Room for `count` keys, unset."""
        heads, dim = cache.k.shape[2:]
        k = torch.empty((heads, dim, count), dtype=torch.float32, device=cache.k.device)
        return Keys(k, torch.empty((heads, count, dim), dtype=torch.float32, device=cache.k.device))

    def put(self, start: int, cache: KVCache, layer: int, slots: Tensor) -> None:
        """Read `slots` of the cache into consecutive places from `start`."""
        end = start + len(slots)
        self.k[:, :, start:end].copy_(cache.k[layer, slots].permute(1, 2, 0))
        self.v[:, start:end].copy_(cache.v[layer, slots].transpose(0, 1))

    def first(self, count: int) -> Keys:
        """The first `count` keys, as views."""
        return Keys(self.k[:, :, :count], self.v[:, :count])


#: Products that are worked on at a time: 1 MiB, which stays in a core's cache.
TOGETHER = 1 << 18


def _head_parts(kv_heads: int, products: int) -> list[slice]:
    """KV heads in runs of at most `TOGETHER` products, `products` a head; elementwise work, so any cut has its bits."""
    width = max(1, min(kv_heads, TOGETHER // products))
    return [slice(lo, min(lo + width, kv_heads)) for lo in range(0, kv_heads, width)]


def _summed(x: Tensor, y: Tensor, parts: Sequence[slice]) -> Tensor:
    """`x * y`, summed over dimension 2 of 4; the products of all parts of dimension 0 lie in the same memory."""
    if len(parts) == 1:
        return halve(x * y, 2)
    heads, group, summed, last = (max(sizes) for sizes in zip(x.shape, y.shape, strict=True))
    result = torch.empty((heads, group, last), dtype=x.dtype, device=x.device)
    scratch = torch.empty((parts[0].stop, group, summed, last), dtype=x.dtype, device=x.device)
    for h in parts:
        product = scratch[: h.stop - h.start]
        torch.mul(x[h], y[h], out=product)
        result[h] = halve(product, 2)
    return result


def attend(q: Tensor, keys: Keys) -> Tensor:
    """bf16 `[Hq, dh]` for one row: softmax over all `keys` of fp32 scores scaled by dh^-1/2. q: rotated bf16."""
    kv_heads, dim, count = keys.k.shape
    group = q.shape[0] // kv_heads
    query = q.to(torch.float32).reshape(kv_heads, group, dim, 1)
    parts = _head_parts(kv_heads, group * dim * count)
    scores = _summed(query, keys.k.unsqueeze(1), parts) * dim**-0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = weights / halve(weights.clone(), -1).unsqueeze(-1)
    return _summed(weights.unsqueeze(-1), keys.v.unsqueeze(1), parts).reshape(-1, dim).to(torch.bfloat16)


def verify(ops: AttentionOps, cache: KVCache, batch: Batch, out: Tensor, layer: int) -> None:
    """Write the active rows' rotated K and V to their candidate slots and their outputs to `out` bf16 `[T, Hq, dh]`."""
    paths = ancestor_rows(batch)
    if not paths:
        return
    # All rows are a view; some are gathered.
    whole = len(paths) == batch.rows
    rows = slice(0, batch.rows) if whole else torch.tensor(list(paths), dtype=torch.int64, device=out.device)
    position = batch.position[rows].to(torch.int64)
    cos, sin = ops.cos[position], ops.sin[position]
    target = batch.row_slot.to(torch.int64)
    place = target[rows]
    cache.k[layer, place] = rope(ops.k[rows], cos, sin)
    cache.v[layer, place] = ops.v[rows]
    query = dict(zip(paths, rope(ops.q[rows], cos, sin), strict=True))
    request, prefix = batch.row_request.tolist(), batch.prefix_len.tolist()
    for i in sorted({request[row] for row in paths}):
        own = {row: path for row, path in paths.items() if request[row] == i}
        keys = Keys.room(cache, prefix[i] + max(map(len, own.values())))
        keys.put(0, cache, layer, flat_slots(batch.page_table, batch.page_size, i, range(prefix[i])))
        for row, path in own.items():
            keys.put(prefix[i], cache, layer, target[path])
            out[row] = attend(query[row], keys.first(prefix[i] + len(path)))


def publish(cache: KVCache, batch: Batch, lanes: Sequence[Lane], layers: Sequence[int]) -> None:
    """Move accepted rows from their candidate slots to the committed slots of positions prefix_len, prefix_len + 1, ...

    Every source is read before anything is written: candidate and committed slots may overlap, also across requests.
    """
    if not lanes:
        return
    prefix = batch.prefix_len.tolist()
    source = torch.cat([batch.row_slot[list(lane.rows)].to(torch.int64) for lane in lanes])
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
