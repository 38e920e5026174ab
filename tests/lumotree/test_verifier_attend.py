"""Sums of many lengths in one tile and attention of many rows at once: the bits of each alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from lumotree.backends.batch import build_batch
from lumotree.backends.protocol import AttentionOps
from lumotree.state import KVCache
from lumotree.tree import Tree
from lumotree.verifier import attend as module
from lumotree.verifier import attention
from lumotree.verifier.attend import Keys, attend
from lumotree.verifier.padded import NEUTRAL, places, tile_size
from lumotree.verifier.step import halve, in_place, rowwise


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("short", [1, 2, 3, 7, 15, 16, 17, 31, 48, 63, 64, 65, 90, 127])
@pytest.mark.parametrize("more", [0, 1, 2, 5, 17, 64])
def test_a_sum_in_a_longer_tile_keeps_its_bits(short: int, more: int) -> None:
    gen = torch.Generator().manual_seed(short)
    size = tile_size((short, short + more))
    assert short + more <= size <= max(short + more, 2 * short + 2 * more)
    for length in range(short, short + more + 1):
        values = torch.randn(length, 50, generator=gen) * 10 ** torch.randn(length, 1, generator=gen)
        values[:, 0] = -0.0  # a neutral element of +0.0 would turn this sum round
        tile = torch.full((size, 50), NEUTRAL)
        tile[torch.from_numpy(places(length, size).copy())] = values
        assert torch.equal(bits(halve(tile, 0)), bits(halve(values, 0)))


def test_zeros_at_the_end_would_not_do() -> None:
    """Negative control: what `places` is for."""
    values = torch.randn(90, 50, generator=torch.Generator().manual_seed(0))
    tile = torch.cat([values, torch.full((6, 50), NEUTRAL)])
    assert not torch.equal(bits(halve(tile, 0)), bits(halve(values.clone(), 0)))
    assert tile_size((90, 96)) == 96 and places(90, 96).tolist() != list(range(90))


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One row, as the rule says it: q `[Hq, dh]`, k `[Hkv, dh, n]`, v `[Hkv, n, dh]`."""
    kv_heads, dim, _ = k.shape
    query = q.to(torch.float32).reshape(kv_heads, -1, dim, 1)
    scores = halve(query * k.contiguous().unsqueeze(1), 2) * dim**-0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = weights / halve(weights.clone(), -1).unsqueeze(-1)
    return halve(weights.unsqueeze(-1) * v.contiguous().unsqueeze(1), 2).reshape(-1, dim).to(torch.bfloat16)


def scene(heads: int, kv_heads: int, dim: int, seed: int) -> tuple[Tensor, Keys]:
    """Rows of two requests, of many lengths, in any order of their keys."""
    gen, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    total = (70, 40)
    lengths = ((1, 2, 63, 64, 65, 70, 66, 70), (40, 1, 17, 39))
    own, base = [], 0
    for size, counts in zip(total, lengths, strict=True):
        own += [base + rng.permutation(size)[:count] for count in counts]
        base += size
    q = (3 * torch.randn(len(own), heads, dim, generator=gen)).bfloat16()
    k = 2 * torch.randn(kv_heads, dim, base, generator=gen)
    v = torch.cat([torch.randn(base, kv_heads, dim, generator=gen), torch.zeros(1, kv_heads, dim)])
    return q, Keys(k, v, tuple(own), ((slice(0, 8), slice(0, 70)), (slice(8, 12), slice(70, 110))))


@pytest.mark.parametrize("together", [1, 1 << 10, 1 << 14, 1 << 18])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (6, 1, 60), (3, 3, 8)])
def test_each_row_has_the_bits_that_it_has_alone(
    heads: int, kv_heads: int, dim: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOGETHER", together)
    q, keys = scene(heads, kv_heads, dim, seed=together % 7)
    found = attend(q, keys)
    for row, query in enumerate(q):
        assert torch.equal(bits(found[row]), bits(alone(query, *keys.of(row)))), row


@pytest.mark.parametrize("count", [1, 2, 7, 24, 63, 70])
def test_a_lone_row_without_a_layout_has_the_bits_that_it_has_with_one(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, keys = scene(4, 2, 60, count)
    k, v = keys.k[:, :, :count], torch.cat([keys.v[:count], keys.v[-1:]])
    for order in (np.arange(count), np.random.default_rng(count).permutation(count)):
        lone = Keys(k, v, (order,), ((slice(0, 1), slice(0, count)),))
        monkeypatch.undo()
        got = attend(q[:1], lone)
        monkeypatch.setattr(module, "TOGETHER", 1)  # too little for anything but the layout
        assert torch.equal(bits(got), bits(attend(q[:1], lone)))
        assert torch.equal(bits(got[0]), bits(alone(q[0], *lone.of(0))))


def test_exp_is_called_on_one_row_without_gaps_at_a_fresh_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, int]] = []

    def spying(function: object, rows: Sequence[Tensor]) -> None:
        assert function is torch.exp and all(row.is_contiguous() for row in rows)
        called.extend((row.numel(), row.data_ptr() % 64) for row in rows)
        in_place(torch.exp, rows)

    monkeypatch.setattr(module, "in_place", spying)
    q, keys = scene(4, 2, 64, seed=0)
    attend(q, keys)
    assert sorted(called) == sorted((4 * len(own), 0) for own in keys.own)


def test_a_loud_key_is_seen_by_those_alone_that_have_it() -> None:
    q, keys = scene(4, 2, 64, seed=1)
    quiet = attend(q, keys)
    for loud in (torch.nan, torch.inf):
        place = int(keys.own[2][0])
        k, v = keys.k.clone(), keys.v.clone()
        k[:, :, place], v[place] = loud, loud
        found = attend(q, Keys(k, v, keys.own, keys.spans))
        for row, own in enumerate(keys.own):
            assert torch.equal(bits(found[row]), bits(quiet[row])) == (place not in own), row


def verified(parents: list[list[int]], prefix: list[int], seed: int) -> tuple[Tensor, KVCache]:
    """Outputs of `attention.verify` for requests with their own pages, and the cache behind it; the operands of request
    i are the same whoever is in the batch with it."""
    page, pages, rows = 4, 24, 12
    trees, parts, table = [], [], []
    cache = KVCache(*(torch.full((1, 8 * (page * pages + rows), 2, 16), torch.nan).bfloat16() for _ in range(2)))
    angle = torch.rand(pages * page + rows, 3, generator=torch.Generator().manual_seed(9))
    for i, (own, length) in enumerate(zip(parents, prefix, strict=True)):
        gen = torch.Generator().manual_seed(seed + 100 * length)
        first = 8 * page * pages + i * rows
        trees.append(Tree.make(own, slots=range(first, first + len(own)), prefix_len=length))
        table.append(list(range(i * pages, (i + 1) * pages)))
        parts.append([torch.randn(len(own), h, 16, generator=gen).bfloat16() for h in (4, 2, 2)])
        for tensor in (cache.k, cache.v):
            here = slice(i * pages * page, i * pages * page + length)
            tensor[0, here] = torch.randn(length, 2, 16, generator=gen).bfloat16()
    batch = build_batch(trees, state_slots=range(len(trees)), page_table=torch.tensor(table), page_size=page)
    q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
    out = torch.full_like(q, torch.nan)
    attention.verify(AttentionOps(q, k, v, angle.cos(), angle.sin()), cache, batch, out, 0)
    return out, cache


@pytest.mark.parametrize("scores", [1, 200, 1 << 20])
def test_requests_together_have_the_bits_that_they_have_alone(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever parts the call is worked on in."""
    trees = [[-1, 0, 0, 1, 3, 2], [-1], [-1, 0, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 0]]
    prefix = [17, 0, 70, 33]
    apart = [verified([tree], [length], seed=1)[0] for tree, length in zip(trees, prefix, strict=True)]
    monkeypatch.setattr(attention, "SCORES", scores)
    together, _ = verified(trees, prefix, seed=1)
    assert not together.isnan().any()
    assert torch.equal(bits(together), bits(torch.cat(apart)))


@pytest.mark.parametrize("function", [torch.exp, torch.log, torch.log1p])
@pytest.mark.parametrize("width", [1, 7, 16, 100, 2000])
def test_a_loop_over_rows_has_the_bits_of_single_calls(function: Callable[[Tensor], Tensor], width: int) -> None:
    x = torch.rand(9, width, generator=torch.Generator().manual_seed(width)) * 8
    want = torch.stack([function(row) for row in x])
    assert torch.equal(bits(rowwise(function, x)), bits(want))
    assert torch.equal(bits(rowwise(function, x.t().contiguous().t())), bits(want))
    in_place(function, x.unbind())
    assert torch.equal(bits(x), bits(want))


def test_a_loop_over_rows_takes_any_function() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(rowwise(lambda row: row + 1, x), x + 1)
    assert rowwise(torch.exp, torch.empty(0, 4)).shape == (0, 4)
