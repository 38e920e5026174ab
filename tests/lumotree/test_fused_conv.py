"""The fused convolution has the bits of the kernels that it stands for, and refuses what does not fit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lumotree.backends.batch import accepted_paths, build_batch, flat_slots, replan
from lumotree.backends.protocol import Batch, ConvOps
from lumotree.errors import ContractError
from lumotree.state import KVCache
from lumotree.tree import Tree
from lumotree.verifier.kernels import INTERPRETED, conv, fused_conv, kv
from lumotree.verifier.kernels.bits import bf16_to_f32, f32_to_bf16, sigmoid
from lumotree.verifier.kernels.workspace import AttentionWorkspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHANNELS = (10, 10, 25)
SLOTS, LAYERS, PAGE, PAGES = 6, 3, 4, 6
#: Rows 4 and 6 are inactive; row 7 is a grandchild of row 1 that lies behind its uncles.
TREE = Tree.make([-1, 0, 0, 1, 1, 3, 2, 3], active=[True, True, True, True, False, True, False, True], prefix_len=3)
CHAIN = Tree.make([-1, 0, 1], slots=range(100, 103), prefix_len=0)


def bf16(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).to(DEVICE)


def nan(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)


def batch_of(trees: list[Tree | None]) -> Batch:
    table = torch.arange(len(trees) * PAGES, dtype=torch.int32).reshape(len(trees), PAGES).flip(1).contiguous()
    slots = [-1 if t is None else (2 * i + 1) % SLOTS for i, t in enumerate(trees)]
    return build_batch(trees, state_slots=slots, page_table=table, page_size=PAGE, device=DEVICE)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def operands(rows: int, width: int, packed: bool = True) -> tuple[ConvOps, Tensor]:
    weight = bf16(1, sum(CHANNELS) * width + 1)
    weight = (weight[:-1] if packed else weight[1:]).view(-1, width)
    return ConvOps(bf16(2, rows, sum(CHANNELS)), weight), bf16(3, LAYERS, SLOTS, sum(CHANNELS), width - 1)


def fused(ops: ConvOps, pool: Tensor, batch: Batch, layer: int = 1) -> tuple[Tensor, Tensor]:
    """The three parts side by side, and the record."""
    recorded = nan(LAYERS, batch.rows, sum(CHANNELS))
    parts = (nan(batch.rows, 2, 5), nan(batch.rows, 2, 5), nan(batch.rows, 5, 5))
    fused_conv.verify(ops, pool, batch, recorded, parts, layer)
    return torch.cat([x.flatten(1) for x in parts], 1), recorded


def unfused(ops: ConvOps, pool: Tensor, batch: Batch, layer: int = 1) -> tuple[Tensor, Tensor]:
    recorded, out = nan(LAYERS, batch.rows, sum(CHANNELS)), nan(batch.rows, sum(CHANNELS))
    conv.verify(ops, pool, batch, recorded, out, layer)
    return out, recorded


@pytest.mark.parametrize(("width", "packed"), [(4, True), (4, False), (3, False), (2, True)])
def test_bits_are_those_of_the_convolution_and_a_split(width: int, packed: bool) -> None:
    batch = batch_of([TREE, None, CHAIN])
    ops, pool = operands(batch.rows, width, packed)
    assert conv.tap_words(ops.weight)[1] == packed
    before = bits(pool).clone()
    for mine, theirs in zip(fused(ops, pool, batch), unfused(ops, pool, batch), strict=True):
        assert torch.equal(bits(mine), bits(theirs))
        assert mine.isnan().any() and not mine[..., batch.active, :].isnan().all()
    assert torch.equal(bits(pool), before)
    assert not fused(ops, pool, batch)[0][batch.active].isnan().any()


def test_bits_do_not_depend_on_the_batch_or_on_padding() -> None:
    alone, crowd = batch_of([TREE]), batch_of([CHAIN, None, TREE])
    ops, pool = operands(crowd.rows, 4)
    pool[:, int(alone.state_slot[0])] = pool[:, int(crowd.state_slot[2])]
    mine = replace(ops, x=ops.x[CHAIN.n :].contiguous())
    noisy = ops.x.clone()
    noisy[~crowd.active] = float("nan")
    want = fused(mine, pool, alone)[0]
    for x in (ops.x, noisy):
        assert torch.equal(bits(fused(replace(ops, x=x), pool, crowd)[0][CHAIN.n :]), bits(want))


@triton.jit
def _newest_first(x, weight, history, parent, row, base, channel, ok, D, W, PACKED):  # type: ignore[no-untyped-def]
    """`conv.convolved` with its taps summed in the other order."""
    acc = tl.zeros(channel.shape, tl.float32)
    at = row
    beyond = 0
    for back in tl.static_range(W):
        bits = tl.load(x + at * D + channel, mask=ok & (beyond == 0), other=0)
        place = channel * (W - 1) + tl.where(beyond == 0, 0, W - 1 - beyond)
        old = tl.load(history + place, mask=ok & (beyond > 0), other=0)
        factor = tl.load(weight + channel * W + W - 1 - back, mask=ok, other=0)
        acc += bf16_to_f32(factor) * bf16_to_f32(tl.where(beyond == 0, bits, old))
        above = tl.load(parent + at)
        beyond += (above < 0).to(tl.int32)
        at = tl.where(above < 0, at, base + above)
    return f32_to_bf16(acc * sigmoid(acc)), tl.load(x + row * D + channel, mask=ok, other=0)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel keeps the function that it was compiled with")
def test_another_order_of_the_taps_loses_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of([TREE, CHAIN])
    ops, pool = operands(batch.rows, 4, packed=False)
    # The first and last tap cancel; elsewhere the rounding to bf16 would hide the order of the sum.
    ops.x[:], pool[:] = ops.x[0].clone(), ops.x[0][:, None].clone()
    ops.weight[:, 0], ops.weight[:, 3] = 256, -256
    want, recorded = unfused(ops, pool, batch)
    monkeypatch.setattr(fused_conv, "convolved", _newest_first)
    got, also_recorded = fused(ops, pool, batch)
    assert not torch.equal(bits(got), bits(want)) and torch.equal(bits(also_recorded), bits(recorded))
    assert torch.allclose(got[batch.active], want[batch.active], rtol=2e-2, atol=1e-2)


def test_another_parent_and_another_slot_lose_the_bits() -> None:
    batch = batch_of([TREE, CHAIN])
    ops, pool = operands(batch.rows, 4)
    want = unfused(ops, pool, batch)[0][batch.active]
    parent = batch.parent.clone()
    parent[7] = 2
    for wrong in (replan(batch, parent), replace(batch, state_slot=batch.state_slot.flip(0).contiguous())):
        assert not torch.equal(bits(fused(ops, pool, wrong)[0][batch.active]), bits(want))


class Scene:
    """Something to publish: three layers of histories, two of K and V, candidates in the slots of later positions."""

    def __init__(self, head_dim: int = 20) -> None:
        table = torch.arange(2 * PAGES, dtype=torch.int32).reshape(2, PAGES).flip(1).contiguous()
        order = [torch.arange(6, 14).flip(0).tolist(), [2, 0, 1]]
        trees = [
            Tree.make(t.parents, active=t.active, prefix_len=p, slots=flat_slots(table, PAGE, i, order[i]).numpy())
            for i, (t, p) in enumerate([(TREE, 6), (CHAIN, 0)])
        ]
        table = torch.cat([table[:1], torch.full((1, PAGES), -1, dtype=torch.int32), table[1:]])
        self.batch = build_batch(
            [trees[0], None, trees[1]], state_slots=[4, -1, 0], page_table=table, page_size=PAGE, device=DEVICE
        )
        self.pool, self.recorded = bf16(3, LAYERS, SLOTS, 45, 3), bf16(4, LAYERS, self.batch.rows, 45)
        shape = (2, 2 * PAGES * PAGE, 2, head_dim)
        self.cache = KVCache(bf16(5, *shape), bf16(6, *shape))
        moved = (2, 3, 8, 2, head_dim)
        self.scratch = AttentionWorkspace(
            *(torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(2)), nan(*moved), nan(*moved)
        )

    def tensors(self) -> list[Tensor]:
        return [bits(x) for x in (self.pool, self.cache.k, self.cache.v)]

    def fused(self, paths: list[list[int]], histories: list[int], moves: list[int]) -> list[Tensor]:
        accepted = accepted_paths(paths, DEVICE)
        fused_conv.publish(
            self.batch, accepted, fused_conv.Histories(self.pool, self.recorded, histories),
            fused_conv.Moves(self.cache, moves),
        )  # fmt: skip
        return self.tensors()

    def unfused(self, paths: list[list[int]], histories: list[int], moves: list[int]) -> list[Tensor]:
        accepted = accepted_paths(paths, DEVICE)
        conv.publish(self.pool, self.batch, accepted, self.recorded, histories)
        kv.publish(self.cache, self.batch, accepted, self.scratch, moves)
        return self.tensors()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 1, 3, 7], []])
@pytest.mark.parametrize(("histories", "moves"), [([0, 1, 2], [0, 1]), ([2, 0], [1])])
def test_publication_has_the_bits_of_three_launches(path: list[int], histories: list[int], moves: list[int]) -> None:
    paths = [path, [], [0, 1, 2]]
    assert same(Scene().fused(paths, histories, moves), Scene().unfused(paths, histories, moves))


def test_rows_wider_than_a_block_move_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_conv, "MOVED", 32)
    monkeypatch.setattr(fused_conv, "CHANNELS", 16)
    paths = [[0, 1, 3, 5], [], [0]]
    assert same(Scene(33).fused(paths, [0, 1, 2], [0, 1]), Scene(33).unfused(paths, [0, 1, 2], [0, 1]))


def test_publication_of_another_path_or_layer_shows() -> None:
    want = Scene().unfused([[0, 1, 3, 7], [], [0]], [0, 1, 2], [0, 1])
    assert not same(Scene().fused([[0, 1, 3, 5], [], [0]], [0, 1, 2], [0, 1]), want)
    assert not same(Scene().fused([[0, 1, 3, 7], [], [0]], [0, 1], [0, 1]), want)
    assert not same(Scene().fused([[0, 1, 3, 7], [], [0]], [0, 1, 2], [0]), want)


class Counting:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


def test_all_layers_and_both_surfaces_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(fused_conv.publish_rows)
    monkeypatch.setattr(fused_conv, "publish_rows", counting)
    Scene().fused([[0, 1], [], [0]], [0, 1, 2], [0, 1])
    assert counting.launches == 1
    Scene().fused([[0, 1], [], [0]], [0, 2], [0, 1])
    assert counting.launches == 3


def test_tensors_that_do_not_fit_are_refused() -> None:
    batch = batch_of([CHAIN])
    ops, pool = operands(3, 4)
    recorded = nan(LAYERS, 3, 45)
    parts = (nan(3, 10), nan(3, 10), nan(3, 25))
    wrong = {
        r"q, k and v of 45 channels in all, got 10 \+ 10 \+ 20; give them": (parts[0], parts[1], nan(3, 20)),
        r"expected k with 3 rows, got \[2, 10\]": (parts[0], nan(2, 10), parts[2]),
        "expected contiguous torch.bfloat16, got v torch.float32": (*parts[:2], parts[2].float()),
    }
    for message, given in wrong.items():
        with pytest.raises(ContractError, match=message):
            fused_conv.verify(ops, pool, batch, recorded, given, 0)
    with pytest.raises(ContractError, match=r"layer=3 does not exist; allowed: 0\.\.2"):
        fused_conv.verify(ops, pool, batch, recorded, parts, 3)
    with pytest.raises(ContractError, match="rows=3 is above the limit; allowed: at most 2"):
        fused_conv.verify(ops, pool, batch, recorded[:, :2].contiguous(), parts, 0)
    with pytest.raises(ContractError, match=r"expected x \[3, 45\], got \[2, 45\]"):
        fused_conv.verify(replace(ops, x=ops.x[:2]), pool, batch, recorded, parts, 0)


def test_publication_of_nothing_or_of_layers_that_are_not_there_is_refused() -> None:
    scene = Scene()
    accepted = accepted_paths([[0], [], [0]], DEVICE)
    with pytest.raises(ContractError, match="expected histories, moves or both, got neither"):
        fused_conv.publish(scene.batch, accepted)
    with pytest.raises(ContractError, match="conv: layer=3 does not exist"):
        scene.fused([[0], [], [0]], [3], [0])
    with pytest.raises(ContractError, match="kv: layer=2 does not exist"):
        scene.fused([[0], [], [0]], [0], [2])
