"""All kernels of a backend on pools of any size; on a card also behind 2^31 elements, and under compute-sanitizer:

compute-sanitizer --report-api-errors no python -m pytest -q -m gpu -k every_tile tests/lumotree/test_every_kernel.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lumotree.backends.loader import load_backend
from lumotree.contract import DIMS_27B, DIMS_TINY
from lumotree.tree import Tree
from lumotree.tree_named import named
from lumotree.verifier.cuda import gdn

from .every_kernel import EveryKernel, Place, same_bits

DIMS = replace(DIMS_TINY, layers=2)
LARGE = replace(DIMS_27B, layers=2)
#: The head sizes and the ratio of heads of the 27B shape over a smaller grid.
NARROW = replace(DIMS_27B, hk=1, hv=3, conv_channels=1100, q_heads=6, kv_heads=1, layers=2)
NEAR = Place((1, 0), slots=3, conv_slots=3, first_page=0, pages=40)
LIMIT = 2**31
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def scene(name: str, place: Place, dims: Any = DIMS, trees: Any = None, prefix: int = 20) -> EveryKernel:
    trees = trees or [named("mtp5"), named("comb:2")]
    return EveryKernel(load_backend(name), dims, trees, prefix, place, "cuda" if torch.cuda.is_available() else "cpu")


def test_where_requests_live_changes_no_bit() -> None:
    near, far = scene("torch", NEAR), scene("torch", Place((4, 2), slots=7, conv_slots=6, first_page=9, pages=60))
    assert same_bits(near.run(), far.run()) and same_bits(near.touched(), far.touched())
    assert near.rest_is_filled() and far.rest_is_filled()


@pytest.mark.parametrize("part", ["states", "histories", "keys", "outputs"])
def test_a_write_elsewhere_or_another_bit_is_seen(part: str) -> None:
    near, far = scene("torch", NEAR), scene("torch", NEAR)
    outputs, others = near.run(), far.run()
    if part == "outputs":
        others[0][0, 0] += 1
        assert not same_bits(outputs, others)
        return
    pool = {"states": far.pools.recurrent, "histories": far.pools.conv, "keys": far.pools.cache.k}[part]
    pool[1, -1] = 0.0
    assert not far.rest_is_filled()


def beyond(what: str) -> Place:
    """Pools of which one reaches beyond 2^31 elements: a slot behind them in layer 0, and one whose layer 1 is."""
    states = LIMIT // (LARGE.hv * LARGE.dv * LARGE.dk) + 40
    pages = LIMIT // (16 * LARGE.kv_heads * LARGE.head_dim) + 40
    if what == "states":
        return Place((states - 3, 2), states, states, 0, 40)
    return Place((1, 0), 3, 3, pages - 36, pages)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("what", ["states", "keys"])
def test_offsets_beyond_two_to_the_31_elements_change_no_bit(name: str, what: str) -> None:
    trees = [named("hydra27"), named("comb:5")]
    near = scene(name, NEAR, LARGE, trees, 200)
    wanted = near.run(), [x.clone() for x in near.touched()]
    del near
    far = scene(name, beyond(what), LARGE, trees, 200)
    assert max(x.numel() for x in (far.pools.recurrent, far.pools.cache.k)) > LIMIT
    assert same_bits(far.run(), wanted[0]) and same_bits(far.touched(), wanted[1])
    assert far.rest_is_filled()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("trees", [("hydra27",), ("binary:5",), ("hydra27", "comb:5")], ids=",".join)
def test_every_tile_of_every_kernel_runs(name: str, trees: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if len(trees) > 1:  # the tile of large grids
        monkeypatch.setattr(gdn, "multiprocessors", lambda device: 1)
    chosen: list[Tree] = [named(tree) for tree in trees]
    place = Place(tuple(range(len(trees))), len(trees), len(trees), 0, 12 * len(trees))
    whole = scene(name, place, NARROW, chosen, 40)
    whole.run()
    torch.cuda.synchronize()
    assert all(bool(x.isfinite().all()) for x in whole.touched())
