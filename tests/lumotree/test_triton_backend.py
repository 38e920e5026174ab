"""TritonBackend against its own one-token chain, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lumotree.backends.batch import accepted_paths, build_batch, flat_slots
from lumotree.backends.protocol import Accepted, AttentionOps, Batch, ConvOps, GdnOps, Limits, StepOps, StepOut
from lumotree.backends.triton_backend import TritonBackend
from lumotree.contract import DIMS_TINY, Dims
from lumotree.errors import ContractError
from lumotree.state import Pools, empty_pools
from lumotree.tree import Tree
from lumotree.verifier.kernels import INTERPRETED, gdn
from lumotree.verifier.kernels.bits import row_sum, sigmoid, softplus
from lumotree.verifier.kernels.workspace import TritonWorkspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, PAGES, FLAT, SLOTS, POSITIONS = 4, 8, 128, 5, 48
BACKEND = TritonBackend()


@dataclass
class Case:
    dims: Dims
    trees: list[Tree | None]
    pools: Pools
    batch: Batch
    ops: StepOps
    out: StepOut
    ws: TritonWorkspace


def _bf16(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=gen).to(torch.bfloat16).to(DEVICE)


def _ops(dims: Dims, rows: int, gen: torch.Generator) -> StepOps:
    recurrent = GdnOps(
        _bf16(gen, rows, dims.hk, dims.dk), _bf16(gen, rows, dims.hk, dims.dk), _bf16(gen, rows, dims.hv, dims.dv),
        _bf16(gen, rows, dims.hv), _bf16(gen, rows, dims.hv),
        torch.randn(dims.hv, generator=gen).to(DEVICE), torch.randn(dims.hv, generator=gen).to(DEVICE),
    )  # fmt: skip
    angle = torch.rand((POSITIONS, dims.rotary_dim // 2), generator=gen) * 6
    attention = AttentionOps(
        _bf16(gen, rows, dims.q_heads, dims.head_dim), _bf16(gen, rows, dims.kv_heads, dims.head_dim),
        _bf16(gen, rows, dims.kv_heads, dims.head_dim), angle.cos().to(DEVICE), angle.sin().to(DEVICE),
    )  # fmt: skip
    weight = _bf16(gen, dims.conv_channels, dims.conv_width)
    return StepOps(recurrent, ConvOps(_bf16(gen, rows, dims.conv_channels), weight), attention)


def _out(dims: Dims, rows: int) -> StepOut:
    def nan(*shape: int) -> Tensor:
        return torch.full((rows, *shape), float("nan"), dtype=torch.bfloat16, device=DEVICE)

    return StepOut(nan(dims.hv, dims.dv), nan(dims.conv_channels), nan(dims.q_heads, dims.head_dim))


def _poisoned_pools(dims: Dims, gen: torch.Generator, batch: Batch) -> Pools:
    """Random where a live request reads, NaN elsewhere."""
    pools = empty_pools(dims, BACKEND.contract, SLOTS, FLAT, DEVICE)
    for x in pools.tensors().values():
        x.fill_(float("nan"))
    for i, slot in enumerate(batch.state_slot.tolist()):
        if slot >= 0:
            pools.recurrent[:, slot] = torch.randn(pools.recurrent[:, slot].shape, generator=gen).to(DEVICE)
            pools.conv[:, slot] = _bf16(gen, *pools.conv[:, slot].shape)
            at = flat_slots(batch.page_table, PAGE, i, list(range(int(batch.prefix_len[i]))))
            for cache in (pools.cache.k, pools.cache.v):
                cache[:, at] = _bf16(gen, *cache[:, at].shape)
    return pools


def make_case(trees: Sequence[Tree | None], dims: Dims = DIMS_TINY, seed: int = 0) -> Case:
    gen = torch.Generator().manual_seed(seed)
    table = torch.arange(len(trees) * PAGES, dtype=torch.int32).reshape(len(trees), PAGES).flip(1).contiguous()
    slots = [-1 if t is None else 2 * i % SLOTS for i, t in enumerate(trees)]
    batch = build_batch(trees, state_slots=slots, page_table=table, page_size=PAGE, device=DEVICE)
    ops = _ops(dims, batch.rows, gen)
    idle = ~batch.active
    for group, names in ((ops.gdn, "qkvab"), (ops.conv, "x"), (ops.attention, "qkv")):
        for name in names:
            getattr(group, name)[idle] = float("nan")
    ws = BACKEND.allocate(dims, Limits(len(trees), batch.rows, 16, SLOTS, dims.layers), DEVICE)
    pools = _poisoned_pools(dims, gen, batch)
    return Case(dims, list(trees), pools, batch, ops, _out(dims, batch.rows), ws)


def clone(pools: Pools) -> Pools:
    cache = replace(pools.cache, k=pools.cache.k.clone(), v=pools.cache.v.clone())
    return Pools(pools.recurrent.clone(), pools.conv.clone(), cache)


def same_bits(a: Tensor, b: Tensor) -> bool:
    view = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(view), b.contiguous().view(view))


def verify(case: Case, layer: int = 0) -> None:
    ops, out = case.ops, case.out
    BACKEND.gdn_verify(ops.gdn, case.pools.recurrent, case.batch, case.ws, out.gdn, layer)  # type: ignore[arg-type]
    BACKEND.conv_verify(ops.conv, case.pools.conv, case.batch, case.ws, out.conv, layer)  # type: ignore[arg-type]
    BACKEND.attention_verify(ops.attention, case.pools.cache, case.batch, case.ws, out.attention, layer)  # type: ignore[arg-type]


def publish_accepted(case: Case, accepted: Accepted, layers: Sequence[int] = (0,)) -> None:
    BACKEND.gdn_publish(case.pools.recurrent, case.batch, accepted, case.ws, layers)
    BACKEND.conv_publish(case.pools.conv, case.batch, accepted, case.ws, layers)
    BACKEND.kv_publish(case.pools.cache, case.batch, accepted, case.ws, layers)


def publish(case: Case, paths: Sequence[Sequence[int]], layers: Sequence[int] = (0,)) -> None:
    publish_accepted(case, accepted_paths(paths, DEVICE), layers)


def _rows_of(group: Any, row: int) -> Any:
    shared = {"A_log", "dt_bias", "weight", "cos", "sin"}
    parts = {f.name: getattr(group, f.name) for f in fields(group)}
    return replace(group, **{n: x[row : row + 1] for n, x in parts.items() if n not in shared})


def native(case: Case, pools: Pools, request: int, row: int, layer: int = 0) -> StepOut:
    """One native step of tree row `row` on `pools`, in place."""
    tree, batch = case.trees[request], case.batch
    assert tree is not None
    position = int(tree.position[row])
    slot = int(flat_slots(batch.page_table, PAGE, request, [position]))
    step = build_batch(
        [Tree.make([-1], slots=[slot], prefix_len=position)], state_slots=[int(batch.state_slot[request])],
        page_table=batch.page_table[request : request + 1], page_size=PAGE, device=DEVICE,
    )  # fmt: skip
    at = int(batch.cu_rows[request]) + row
    ops = StepOps(_rows_of(case.ops.gdn, at), _rows_of(case.ops.conv, at), _rows_of(case.ops.attention, at))
    out = _out(case.dims, 1)
    BACKEND.native_step(ops, pools, step, out, layer)
    return out


def chain(case: Case, start: Pools, request: int, layer: int = 0) -> tuple[dict[int, Pools], dict[int, StepOut]]:
    """Pools and outputs after each active row of a request's tree, each from its parent's pools."""
    tree = case.trees[request]
    assert tree is not None
    after: dict[int, Pools] = {}
    outs: dict[int, StepOut] = {}
    for row in map(int, np.flatnonzero(tree.active)):
        after[row] = clone(start if row == 0 else after[int(tree.parents[row])])
        outs[row] = native(case, after[row], request, row, layer)
    return after, outs


def expected(case: Case, before: Pools, chains: dict[int, dict[int, Pools]], paths: Sequence[Sequence[int]]) -> Pools:
    """`before` with each request's slot and new committed positions as its native chain left them."""
    pools = clone(before)
    for i, path in enumerate(paths):
        if path:
            tree, end = case.trees[i], chains[i][path[-1]]
            slot = int(case.batch.state_slot[i])
            pools.recurrent[:, slot], pools.conv[:, slot] = end.recurrent[:, slot], end.conv[:, slot]
            assert tree is not None
            at = flat_slots(case.batch.page_table, PAGE, i, [tree.prefix_len + t for t in range(len(path))])
            pools.cache.k[:, at], pools.cache.v[:, at] = end.cache.k[:, at], end.cache.v[:, at]
    return pools


def assert_same_pools(a: Pools, b: Pools) -> None:
    for name, x in a.tensors().items():
        assert same_bits(x, b.tensors()[name]), name


def paths_of(tree: Tree | None) -> list[list[int]]:
    return [[]] if tree is None else [list(map(int, tree.path(int(r)))) for r in np.flatnonzero(tree.active)]


def check_everything(case: Case) -> None:
    """Outputs of all active rows, and the pools after every accepted path, have the native chain's bits."""
    start = clone(case.pools)
    chains: dict[int, dict[int, Pools]] = {}
    verify(case)
    for i, tree in enumerate(case.trees):
        if tree is None:
            continue
        chains[i], outs = chain(case, start, i)
        for row, native_out in outs.items():
            at = int(case.batch.cu_rows[i]) + row
            for f in fields(native_out):
                assert same_bits(getattr(case.out, f.name)[at : at + 1], getattr(native_out, f.name)), (i, row, f.name)
    untouched = clone(case.pools)
    assert same_bits(untouched.recurrent, start.recurrent) and same_bits(untouched.conv, start.conv)
    every = [paths_of(t) for t in case.trees]
    for n in range(max(map(len, every))):
        chosen = [paths[n % len(paths)] for paths in every]
        for x, y in zip(case.pools.tensors().values(), untouched.tensors().values(), strict=True):
            x.copy_(y)
        publish(case, chosen)
        assert_same_pools(case.pools, expected(case, untouched, chains, chosen))


def tree(parents: Sequence[int], prefix: int, first_slot: int, idle: Sequence[int] = ()) -> Tree:
    active = np.ones(len(parents), bool)
    active[list(idle)] = False
    slots = first_slot + np.arange(len(parents))[::-1].copy()
    return Tree.make(parents, active=active, slots=slots, prefix_len=prefix)


HYDRA_LIKE = [-1, 0, 0, 1, 1, 2, 3, 3]


def test_two_trees_and_a_padding_request() -> None:
    # Prefix 14 puts the rows on both sides of a block of 16 keys; rows 5 and 7 are padding.
    check_everything(make_case([tree(HYDRA_LIKE, 14, 100, (5, 7)), None, tree([-1, 0, 0], 0, 110)]))


def test_comb_with_other_sizes() -> None:
    dims = Dims(1, 2, 60, 40, 20, 2, 1, 16, 16, conv_width=3)
    check_everything(make_case([tree([-1, 0, 0, 1, 1, 3, 3], 3, 100)], dims, seed=1))


def test_kv_moves_may_overlap() -> None:
    # Candidate slots are committed positions in reverse order: each move reads what another one writes.
    table = torch.arange(PAGES, dtype=torch.int32).flip(0)[None].contiguous()
    slots = flat_slots(table, PAGE, 0, [5, 6, 4]).numpy()
    check_everything(make_case([Tree.make([-1, 0, 1], slots=slots, prefix_len=4)]))


def test_empty_paths_change_nothing() -> None:
    case = make_case([tree([-1, 0], 2, 100), None])
    verify(case)
    before = clone(case.pools)
    publish(case, [[], []])
    assert_same_pools(case.pools, before)


def test_layers_are_kept_apart() -> None:
    dims = replace(DIMS_TINY, layers=3, hk=1, hv=2, q_heads=2, kv_heads=1)
    case = make_case([tree([-1, 0], 2, 100)], dims)
    start = clone(case.pools)
    verify(case, 0)
    verify(case, 2)
    before = clone(case.pools)
    publish(case, [[0, 1]], layers=[2, 0])
    want = clone(start)
    for layer in (0, 2):
        for row in (0, 1):
            native(case, want, 0, row, layer)
    at = flat_slots(case.batch.page_table, PAGE, 0, [2, 3])
    assert same_bits(case.pools.recurrent, want.recurrent) and same_bits(case.pools.conv, want.conv)
    for name in ("k", "v"):
        old = getattr(before.cache, name)
        old[:, at] = getattr(want.cache, name)[:, at]
        assert same_bits(getattr(case.pools.cache, name), old)


def test_native_step_of_several_requests_with_padding() -> None:
    case = make_case([tree([-1], 2, 2 * PAGES * PAGE), None, tree([-1], 5, 3 * PAGES * PAGE)])
    together, apart = clone(case.pools), clone(case.pools)
    BACKEND.native_step(case.ops, together, case.batch, case.out, 0)
    for request in (0, 2):
        at = int(case.batch.cu_rows[request])
        out = native(case, apart, request, 0)
        for f in fields(out):
            assert same_bits(getattr(case.out, f.name)[at : at + 1], getattr(out, f.name)), f.name
    assert same_bits(together.recurrent, apart.recurrent) and same_bits(together.conv, apart.conv)


@triton.jit
def _update_with_split_sum(state, k, v, a, b, a_log, dt_bias):  # type: ignore[no-untyped-def]
    """`gdn.gdn_update` with the sum over keys in two halves."""
    k = k * tl.rsqrt(row_sum(k * k, 0) + 1e-6)
    state = tl.exp(-tl.exp(a_log) * softplus(a + dt_bias)) * state
    low = (tl.arange(0, k.shape[0]) < k.shape[0] // 2)[None, :]
    product = state * k[None, :]
    seen = row_sum(tl.where(low, product, 0.0), 1) + row_sum(tl.where(low, 0.0, product), 1)
    u = sigmoid(b) * (v - seen)
    return state + u[:, None] * k[None, :]


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel keeps the function that it was compiled with")
def test_split_reduction_loses_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the comparison sees a replay whose sum over keys is split in two."""
    case = make_case([tree([-1, 0, 1], 2, 100)], replace(DIMS_TINY, hk=1, hv=2, dk=60, q_heads=1, kv_heads=1))
    want = clone(case.pools)
    verify(case)
    for row in (0, 1, 2):
        native(case, want, 0, row)
    monkeypatch.setattr(gdn, "gdn_update", _update_with_split_sum)
    BACKEND.gdn_publish(case.pools.recurrent, case.batch, accepted_paths([[0, 1, 2]], DEVICE), case.ws, [0])
    assert not same_bits(case.pools.recurrent, want.recurrent)
    assert torch.allclose(case.pools.recurrent[0, 0], want.recurrent[0, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_all_uses_run_one_binary() -> None:
    case = make_case([tree(HYDRA_LIKE, 14, 100), tree([-1, 0, 0], 0, 110)])
    BACKEND.binaries = {"gdn": set(), "attention": set()}
    check_everything(case)
    assert {name: len(hashes) for name, hashes in BACKEND.binaries.items()} == {"gdn": 1, "attention": 1}


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")
def test_a_captured_graph_serves_other_trees() -> None:
    case, other = (make_case([tree(p, 2, 100)], seed=7) for p in ([-1, 0, 1, 1, 3], [-1, 0, 0, 2, 2]))
    accepted, other_path = accepted_paths([[0, 1, 3]], DEVICE), accepted_paths([[0, 2]], DEVICE, longest=3)

    def step(c: Case, path: Accepted) -> None:
        verify(c)
        publish_accepted(c, path)

    start = clone(case.pools)
    step(case, accepted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(case, accepted)
    for x, y in zip(case.pools.tensors().values(), start.tensors().values(), strict=True):
        x.copy_(y)
    for mine, theirs in ((case.batch, other.batch), (case.batch.plan, other.batch.plan), (accepted, other_path)):
        for f in fields(mine):  # type: ignore[arg-type]
            if isinstance(getattr(mine, f.name), Tensor):
                getattr(mine, f.name).copy_(getattr(theirs, f.name))
    graph.replay()
    torch.cuda.synchronize()
    step(other, other_path)
    assert_same_pools(case.pools, other.pools)
    for f in fields(case.out):
        assert same_bits(getattr(case.out, f.name), getattr(other.out, f.name)), f.name


def test_gdn_step_against_float64() -> None:
    case = make_case([tree([-1], 2, 100)])
    start = clone(case.pools)
    out = native(case, case.pools, 0, 0)
    g = case.ops.gdn
    assert g is not None and out.gdn is not None
    q, k, v, a, b = (getattr(g, n)[0].double() for n in ("q", "k", "v", "a", "b"))
    group = case.dims.hv // case.dims.hk
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = q.repeat_interleave(group, 0) * case.dims.dk**-0.5, k.repeat_interleave(group, 0)
    decay = torch.exp(-g.A_log.double().exp() * torch.nn.functional.softplus(a + g.dt_bias.double()))
    state = decay[:, None, None] * start.recurrent[0, 0].double()
    u = b.sigmoid()[:, None] * (v - (state * k[:, None]).sum(-1))
    state = state + u[:, :, None] * k[:, None]
    assert torch.allclose(case.pools.recurrent[0, 0].double(), state, rtol=1e-5, atol=1e-6)
    assert torch.allclose(out.gdn[0].double(), (state * q[:, None]).sum(-1), rtol=1e-2, atol=1e-3)


def test_conv_and_attention_against_torch() -> None:
    case = make_case([tree([-1], 5, 100)])
    start = clone(case.pools)
    out = native(case, case.pools, 0, 0)
    conv, att = case.ops.conv, case.ops.attention
    assert conv is not None and att is not None and out.conv is not None and out.attention is not None
    window = torch.cat([start.conv[0, 0], conv.x[0][:, None]], 1).double()
    want = torch.nn.functional.silu((window * conv.weight.double()).sum(1))
    assert torch.allclose(out.conv[0].double(), want, rtol=1e-2, atol=1e-3)

    half = case.dims.rotary_dim // 2
    q = att.q[0].float()
    c, s = att.cos[5], att.sin[5]
    q1, q2 = q[:, :half].clone(), q[:, half : 2 * half].clone()
    q[:, :half], q[:, half : 2 * half] = q1 * c - q2 * s, q2 * c + q1 * s
    at = flat_slots(case.batch.page_table, PAGE, 0, list(range(6)))
    group = case.dims.q_heads // case.dims.kv_heads
    keys, values = (x[0, at].double().repeat_interleave(group, 1) for x in (case.pools.cache.k, case.pools.cache.v))
    score = torch.einsum("hd,nhd->hn", q.to(torch.bfloat16).double(), keys) * case.dims.head_dim**-0.5
    want = torch.einsum("hn,nhd->hd", score.softmax(-1), values)
    assert torch.allclose(out.attention[0].double(), want, rtol=1e-2, atol=1e-3)


def test_batches_above_the_limits_are_refused() -> None:
    case = make_case([tree([-1, 0, 1], 0, 100)])
    small = BACKEND.allocate(case.dims, Limits(1, 2, 16, SLOTS, 1), DEVICE)
    with pytest.raises(ContractError, match="rows=3 is above the limit; allowed: at most 2"):
        BACKEND.conv_verify(case.ops.conv, case.pools.conv, case.batch, small, case.out.conv, 0)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="path=17 is above the limit"):
        publish(case, [[0] * 17])


def test_wrong_tensors_are_refused() -> None:
    case = make_case([tree([-1, 0], 0, 100)])
    good = case.ops.gdn
    assert good is not None and case.out.gdn is not None
    wrong = {
        "v torch.float32": replace(good, v=good.v.float()),
        r"expected a \[2, 6\], got \[1, 6\]": replace(good, a=good.a[:1]),
        "strides": replace(good, q=good.q.transpose(0, 1).contiguous().transpose(0, 1)),
    }
    for message, ops in wrong.items():
        with pytest.raises(ContractError, match=message):
            BACKEND.gdn_verify(ops, case.pools.recurrent, case.batch, case.ws, case.out.gdn, 0)
    with pytest.raises(ContractError, match=r"layer=1 does not exist; allowed: 0\.\.0"):
        BACKEND.gdn_verify(good, case.pools.recurrent, case.batch, case.ws, case.out.gdn, 1)
