"""The reference backend on batches of trees: topology, publication, and what must stay untouched."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from lumotree.backends.batch import accepted_paths, build_batch, flat_slots
from lumotree.backends.protocol import AttentionOps, ConvOps, GdnOps, Limits, StepOps, StepOut
from lumotree.backends.reference import ReferenceBackend, ReferenceWorkspace
from lumotree.contract import DIMS_TINY, Contract
from lumotree.errors import PathError
from lumotree.reference.attention import attention_step
from lumotree.reference.oracle import gdn_oracle, published
from lumotree.state import Pools, empty_pools
from lumotree.tree import Tree

DIMS = dataclasses.replace(DIMS_TINY, layers=2)
PAGE, PAGES, SLOTS, FLAT = 4, 8, 5, 96
LAYER = 1
PARENTS = ([-1, 0, 0, 1, 1, 3, 4], [-1, 0, 1, 2])
ACTIVE = ([True, True, True, True, False, True, False], [True] * 4)
PREFIX, STATE_SLOTS = (6, 3), (3, -1, 1)
VARIANTS = [
    Contract(),
    Contract(layout="KV", norm="sqrt", head_map="tiled"),
    Contract(state_dtype=torch.bfloat16, carry="bf16", beta="bf16", norm="bf16", conv="bf16_product",
             softplus="log_exp"),
]  # fmt: skip


class Case:
    """Two live requests around a padding one, poisoned where nothing may be read."""

    def __init__(self, contract: Contract, seed: int = 0) -> None:
        self.backend, self.g = ReferenceBackend(contract), torch.Generator().manual_seed(seed)
        self.pools = empty_pools(DIMS, contract, SLOTS, FLAT, "cpu")
        for name, tensor in self.pools.tensors().items():
            tensor.copy_(self.normal(*tensor.shape) if name in ("recurrent", "conv") else torch.nan)
        table = torch.full((3, PAGES), -1, dtype=torch.int32)
        table[0, :4], table[2, :3] = torch.tensor([7, 2, 9, 4]), torch.tensor([1, 11, 5])
        self.table = table
        # The first candidate of request 0 lies where its second row belongs: source and destination overlap.
        slots0 = [int(flat_slots(table, PAGE, 0, [7])), 60, 61, int(flat_slots(table, PAGE, 0, [6])), 62, 63, 64]
        self.trees = [
            Tree.make(PARENTS[0], active=ACTIVE[0], slots=slots0, prefix_len=PREFIX[0]),
            None,
            Tree.make(PARENTS[1], active=ACTIVE[1], slots=[70, 72, 71, 75], prefix_len=PREFIX[1]),
        ]
        self.batch = build_batch(self.trees, state_slots=STATE_SLOTS, page_table=table, page_size=PAGE)
        for request, length in ((0, PREFIX[0]), (2, PREFIX[1])):
            at = flat_slots(table, PAGE, request, range(length))
            for cache in (self.pools.cache.k, self.pools.cache.v):
                cache[:, at] = self.normal(2, length, DIMS.kv_heads, DIMS.head_dim).bfloat16()
        self.gdn, self.conv, self.attention = self._operands()
        limits = Limits(3, self.batch.rows, 4, SLOTS, DIMS.layers)
        self.ws: ReferenceWorkspace = self.backend.allocate(DIMS, limits, torch.device("cpu"))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.g)

    def _operands(self) -> tuple[GdnOps, ConvOps, AttentionOps]:
        t, d = self.batch.rows, DIMS

        def rows(*shape: int) -> Tensor:
            x = self.normal(t, *shape).bfloat16()
            x[~self.batch.active] = torch.nan
            return x

        gdn = GdnOps(
            rows(d.hk, d.dk), rows(d.hk, d.dk), rows(d.hv, d.dv), rows(d.hv), rows(d.hv), self.normal(d.hv),
            self.normal(d.hv),
        )  # fmt: skip
        conv = ConvOps(rows(d.conv_channels), self.normal(d.conv_channels, d.conv_width).bfloat16())
        angle = torch.arange(32)[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1])
        heads = (d.q_heads, d.head_dim), (d.kv_heads, d.head_dim), (d.kv_heads, d.head_dim)
        return gdn, conv, AttentionOps(*(rows(*s) for s in heads), angle.cos(), angle.sin())

    def outputs(self, rows: int) -> StepOut:
        """NaN-filled outputs."""
        shapes = (DIMS.hv, DIMS.dv), (DIMS.conv_channels,), (DIMS.q_heads, DIMS.head_dim)
        return StepOut(*(torch.full((rows, *s), torch.nan, dtype=torch.bfloat16) for s in shapes))

    def verify(self) -> StepOut:
        out, pools, b = self.outputs(self.batch.rows), self.pools, self.backend
        b.gdn_verify(self.gdn, pools.recurrent, self.batch, self.ws, out.gdn, LAYER)
        b.conv_verify(self.conv, pools.conv, self.batch, self.ws, out.conv, LAYER)
        b.attention_verify(self.attention, pools.cache, self.batch, self.ws, out.attention, LAYER)
        return out

    def publish(self, paths: list[list[int]]) -> None:
        accepted, pools, b = accepted_paths(paths), self.pools, self.backend
        b.gdn_publish(pools.recurrent, self.batch, accepted, self.ws, [LAYER])
        b.conv_publish(pools.conv, self.batch, accepted, self.ws, [LAYER])
        b.kv_publish(pools.cache, self.batch, accepted, self.ws, [LAYER])

    def native(self, request: int, path: list[int], pools: Pools) -> list[StepOut]:
        """Plain decoding of a path: one-row batches whose KV goes straight to the committed slot."""
        outs, start = [], int(self.batch.cu_rows[request])
        for depth, row in enumerate(path):
            out, length = self.outputs(1), int(self.batch.prefix_len[request]) + depth
            slot = int(flat_slots(self.table, PAGE, request, [length]))
            tree = Tree.make([-1], slots=[slot], prefix_len=length)
            batch = build_batch(
                [tree], state_slots=[STATE_SLOTS[request]], page_table=self.table[request : request + 1], page_size=PAGE
            )
            at = [start + row]
            self.backend.native_step(self._rows(at), pools, batch, out, LAYER)
            outs.append(out)
        return outs

    def _rows(self, at: list[int]) -> StepOps:
        g, a = self.gdn, self.attention
        return StepOps(
            GdnOps(g.q[at], g.k[at], g.v[at], g.a[at], g.b[at], g.A_log, g.dt_bias),
            ConvOps(self.conv.x[at], self.conv.weight),
            AttentionOps(a.q[at], a.k[at], a.v[at], a.cos, a.sin),
        )


def _clone(pools: Pools) -> Pools:
    copies = {name: x.clone() for name, x in pools.tensors().items()}
    cache = dataclasses.replace(pools.cache, k=copies["k"], v=copies["v"])
    return Pools(copies["recurrent"], copies["conv"], cache)


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, NaN included."""
    return bool(np.array_equal(a.contiguous().view(torch.uint8).numpy(), b.contiguous().view(torch.uint8).numpy()))


def _paths(tree: Tree) -> list[list[int]]:
    return [list(tree.path(r)) for r in tree.active_rows]


@pytest.mark.parametrize("contract", VARIANTS, ids=["plain", "KV", "bf16"])
def test_outputs_and_published_state_equal_plain_decoding(contract: Contract) -> None:
    for first, second in itertools.zip_longest(_paths(Case(contract).trees[0]), _paths(Case(contract).trees[2])):
        case = Case(contract)
        second = second or [0]
        native = _clone(case.pools)
        out = case.verify()
        case.publish([first, [], second])
        for request, path in ((0, first), (2, second)):
            start = int(case.batch.cu_rows[request])
            for row, plain in zip(path, case.native(request, path, native), strict=True):
                for name in ("gdn", "conv", "attention"):
                    assert _same(getattr(out, name)[start + row], getattr(plain, name)[0]), (name, row)
            at = flat_slots(case.table, PAGE, request, range(PREFIX[0 if request == 0 else 1] + len(path)))
            for name in ("k", "v"):
                got, want = case.pools.tensors()[name], native.tensors()[name]
                assert _same(got[:, at], want[:, at]), (name, path)
        assert _same(case.pools.recurrent, native.recurrent) and _same(case.pools.conv, native.conv)


@pytest.mark.parametrize("contract", VARIANTS, ids=["plain", "KV", "bf16"])
def test_verify_writes_candidate_kv_of_active_rows_and_nothing_else(contract: Contract) -> None:
    case = Case(contract)
    before, operands = _clone(case.pools), [x.clone() for x in dataclasses.astuple(case.gdn)]
    out = case.verify()
    after = case.pools.tensors()
    assert _same(after["recurrent"], before.recurrent) and _same(after["conv"], before.conv)
    written = case.batch.row_slot[case.batch.active].long()
    for name in ("k", "v"):
        assert after[name][LAYER, written].isfinite().all()
        after[name][LAYER, written] = before.tensors()[name][LAYER, written]
        assert _same(after[name], before.tensors()[name])
    for tensor in dataclasses.astuple(out):
        assert tensor[case.batch.active].isfinite().all() and tensor[~case.batch.active].isnan().all()
    assert all(_same(x, y) for x, y in zip(dataclasses.astuple(case.gdn), operands, strict=True))


def test_outputs_follow_the_oracle_on_every_request() -> None:
    contract = VARIANTS[1]
    case = Case(contract)
    out = case.verify()
    case.publish([[0, 1, 3, 5], [], [0, 1, 2]])
    for request, last in ((0, 5), (2, 2)):
        start, tree = int(case.batch.cu_rows[request]), case.trees[request]
        rows = slice(start, start + tree.n)
        g = case.gdn
        ops = GdnOps(g.q[rows], g.k[rows], g.v[rows], g.a[rows], g.b[rows], g.A_log, g.dt_bias)
        fresh = Case(contract)
        R0 = fresh.backend.export(fresh.pools, fresh.ws, STATE_SLOTS[request], LAYER).recurrent
        for truth in gdn_oracle(tree, R0, ops, contract):
            assert ((out.gdn[start + truth.row].double() - truth.out).abs() <= truth.out_bound).all()
            if truth.row == last:
                value, bound = published(truth, contract)
                state = case.backend.export(case.pools, case.ws, STATE_SLOTS[request], LAYER).recurrent
                assert (torch.linalg.vector_norm(state.double() - value, dim=-1) <= bound).all()


def test_empty_path_and_padding_touch_nothing() -> None:
    case = Case(Contract())
    case.verify()
    before = _clone(case.pools)
    case.publish([[], [], []])
    assert all(_same(x, before.tensors()[name]) for name, x in case.pools.tensors().items())
    case.publish([[], [], [0, 1]])
    assert not _same(case.pools.recurrent[LAYER, 1], before.recurrent[LAYER, 1])
    for slot in (0, 2, 3, 4):
        assert _same(case.pools.recurrent[:, slot], before.recurrent[:, slot])
        assert _same(case.pools.conv[:, slot], before.conv[:, slot])
    assert _same(case.pools.recurrent[0], before.recurrent[0])
    padding = build_batch([None], state_slots=[-1], page_table=case.table[1:2], page_size=PAGE)
    snapshot = _clone(case.pools)
    case.backend.native_step(case._rows([0]), case.pools, padding, case.outputs(1), LAYER)
    assert all(_same(x, snapshot.tensors()[name]) for name, x in case.pools.tensors().items())


def test_empty_path_is_refused_where_it_is_not_declared() -> None:
    case = Case(Contract(empty_path=False))
    case.verify()
    with pytest.raises(PathError, match="request 0 accepts no row"):
        case.publish([[], [], [0]])


def test_kv_moves_although_source_and_destination_overlap() -> None:
    case = Case(Contract())
    case.verify()
    k = case.pools.cache.k[LAYER]
    sources = [k[int(case.batch.row_slot[r])].clone() for r in (0, 1, 3)]
    case.publish([[0, 1, 3], [], []])
    for depth, want in enumerate(sources):
        assert _same(k[int(flat_slots(case.table, PAGE, 0, [PREFIX[0] + depth]))], want)


def test_attention_sees_ancestors_in_position_order_and_no_sibling() -> None:
    case = Case(Contract())
    out, a = case.verify(), case.attention
    at = flat_slots(case.table, PAGE, 0, range(PREFIX[0]))
    K, V = case.pools.cache.k[LAYER, at], case.pools.cache.v[LAYER, at]
    for depth, row in enumerate([0, 1, 3, 5]):
        want, key = attention_step(a.q[row], a.k[row], a.v[row], K, V, PREFIX[0] + depth, a.cos, a.sin)
        assert _same(out.attention[row], want)
        K, V = torch.cat([K, key[None]]), torch.cat([V, a.v[row][None]])


@pytest.mark.parametrize("seed", range(3))
def test_workspace_can_be_copied_and_put_back(seed: int) -> None:
    case = Case(Contract(), seed)
    case.verify()
    kept, pools = [x.clone() for x in dataclasses.astuple(case.ws)], _clone(case.pools)
    case.publish([[0, 1], [], [0]])
    once = case.pools.recurrent.clone()
    for tensor, saved in zip(dataclasses.astuple(case.ws), kept, strict=True):
        assert _same(tensor, saved)
    case.pools.recurrent.copy_(pools.recurrent)
    case.publish([[0, 1], [], [0]])
    assert _same(case.pools.recurrent, once)
