"""Every built-in torch backend against its own one-token chain, on all surfaces: bits where it claims them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lumotree.backends.bank import BankBackend
from lumotree.backends.batch import accepted_paths, build_batch, flat_slots
from lumotree.backends.protocol import AttentionOps, Batch, ConvOps, GdnOps, Limits, StepOps, StepOut
from lumotree.backends.reference import ReferenceBackend
from lumotree.backends.torch_backend import TorchBackend
from lumotree.backends.variants import KVLayoutBackend, SplitKBackend, SqrtNormBackend, WYBackend
from lumotree.contract import DIMS_27B, DIMS_TINY, Contract, Dims
from lumotree.errors import ContractError
from lumotree.state import Pools, empty_pools
from lumotree.tree import Tree
from lumotree.tree_named import chain, comb, complete_binary, hydra27, star
from lumotree.verifier import gdn

PAGE, PAGES, SLOTS = 4, 12, 6
DK60 = replace(DIMS_TINY, hk=1, hv=3, dk=60, dv=7, head_dim=10, rotary_dim=6, name="dk60")
SMALL = replace(DIMS_TINY, layers=2)
BITWISE = [TorchBackend, BankBackend, SqrtNormBackend, KVLayoutBackend]
BACKENDS = [*BITWISE, SplitKBackend, WYBackend]
TREES = {"hydra27": hydra27(), "star": star(5), "comb": comb(9), "binary": complete_binary(3), "chain": chain(6)}


@dataclass
class World:
    """A backend, its pools before verification, a batch and everybody's operands."""

    backend: Any
    dims: Dims
    trees: list[Tree | None]
    pools: Pools
    batch: Batch
    ops: StepOps
    ws: Any


def placed(tree: Tree, request: int, prefix: int) -> Tree:
    """Candidates in slots that are also committed slots of the next positions, in another order."""
    slots = [request * PAGE * PAGES + prefix + (5 * r + 3) % 37 % (PAGE * PAGES - prefix) for r in range(tree.n)]
    return Tree.make(tree.parents, active=tree.active, prefix_len=prefix, slots=slots)


def bf16(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=gen).to(torch.bfloat16)


def make_world(backend: Any, trees: Sequence[Tree | None], dims: Dims = SMALL, first: int = 0) -> World:
    """Request i is the same whatever the others are: it is number `first + i` of an endless list."""
    placed_trees = [None if t is None else placed(t, first + i, 3 + 2 * (first + i)) for i, t in enumerate(trees)]
    table = torch.stack([torch.arange(PAGES) + (first + i) * PAGES for i in range(len(trees))])
    slots = [-1 if t is None else (5 - 2 * (first + i)) % SLOTS for i, t in enumerate(trees)]
    batch = build_batch(placed_trees, state_slots=slots, page_table=table, page_size=PAGE)
    pools = empty_pools(dims, backend.contract, SLOTS, 4 * PAGE * PAGES, "cpu")
    gen = torch.Generator().manual_seed(1)
    for x in pools.tensors().values():
        x.copy_(torch.randn(x.shape, generator=gen))
    parts = [make_ops(dims, t.n, 100 + first + i) for i, t in enumerate(trees) if t is not None]
    ops = concatenated(parts)
    ws = backend.allocate(dims, Limits(len(trees), batch.rows, 16, SLOTS, dims.layers), torch.device("cpu"))
    return World(backend, dims, placed_trees, pools, batch, ops, ws)


def make_ops(dims: Dims, rows: int, seed: int) -> StepOps:
    fixed, gen = torch.Generator().manual_seed(2), torch.Generator().manual_seed(seed)
    d = dims
    gdn = GdnOps(
        bf16(gen, rows, d.hk, d.dk), bf16(gen, rows, d.hk, d.dk), bf16(gen, rows, d.hv, d.dv), bf16(gen, rows, d.hv),
        bf16(gen, rows, d.hv), torch.randn(d.hv, generator=fixed), torch.randn(d.hv, generator=fixed),
    )  # fmt: skip
    conv = ConvOps(bf16(gen, rows, d.conv_channels), bf16(fixed, d.conv_channels, d.conv_width))
    angle = torch.rand((PAGE * PAGES, d.rotary_dim // 2), generator=fixed) * 6
    kv = (rows, d.kv_heads, d.head_dim)
    attention = AttentionOps(
        bf16(gen, rows, d.q_heads, d.head_dim), bf16(gen, *kv), bf16(gen, *kv), angle.cos(), angle.sin()
    )
    return StepOps(gdn, conv, attention)


SHARED = {"A_log", "dt_bias", "weight", "cos", "sin"}


def concatenated(parts: Sequence[StepOps]) -> StepOps:
    def join(name: str) -> Any:
        groups = [getattr(p, name) for p in parts]
        values = {f.name: [getattr(g, f.name) for g in groups] for f in fields(groups[0])}
        return type(groups[0])(**{n: v[0] if n in SHARED else torch.cat(v) for n, v in values.items()})

    return StepOps(join("gdn"), join("conv"), join("attention"))


def one_row(group: Any, row: int) -> Any:
    parts = {f.name: getattr(group, f.name) for f in fields(group)}
    return replace(group, **{n: x[row : row + 1] for n, x in parts.items() if n not in SHARED})


def new_out(dims: Dims, rows: int) -> StepOut:
    shapes = ((dims.hv, dims.dv), (dims.conv_channels,), (dims.q_heads, dims.head_dim))
    return StepOut(*(torch.full((rows, *s), torch.nan, dtype=torch.bfloat16) for s in shapes))


def clone(pools: Pools) -> Pools:
    cache = replace(pools.cache, k=pools.cache.k.clone(), v=pools.cache.v.clone())
    return Pools(pools.recurrent.clone(), pools.conv.clone(), cache)


def same_bits(a: Tensor, b: Tensor) -> bool:
    view = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(view), b.contiguous().view(view))


def verify(world: World, pools: Pools, layer: int = 0) -> StepOut:
    out, be, ops = new_out(world.dims, world.batch.rows), world.backend, world.ops
    be.gdn_verify(ops.gdn, pools.recurrent, world.batch, world.ws, out.gdn, layer)
    be.conv_verify(ops.conv, pools.conv, world.batch, world.ws, out.conv, layer)
    be.attention_verify(ops.attention, pools.cache, world.batch, world.ws, out.attention, layer)
    return out


def publish(world: World, pools: Pools, paths: Sequence[Sequence[int]], layers: Sequence[int] = (0,)) -> None:
    accepted = accepted_paths(paths)
    world.backend.gdn_publish(pools.recurrent, world.batch, accepted, world.ws, layers)
    world.backend.conv_publish(pools.conv, world.batch, accepted, world.ws, layers)
    world.backend.kv_publish(pools.cache, world.batch, accepted, world.ws, layers)


def native(world: World, pools: Pools, request: int, row: int, layer: int = 0) -> StepOut:
    """One native step of a tree's row on `pools`, in place."""
    tree, batch = world.trees[request], world.batch
    assert tree is not None
    position = int(tree.position[row])
    slot = int(flat_slots(batch.page_table, PAGE, request, [position]))
    step = build_batch(
        [Tree.make([-1], slots=[slot], prefix_len=position)], state_slots=[int(batch.state_slot[request])],
        page_table=batch.page_table[request : request + 1], page_size=PAGE,
    )  # fmt: skip
    at = int(batch.cu_rows[request]) + row
    out = new_out(world.dims, 1)
    ops = StepOps(*(one_row(g, at) for g in (world.ops.gdn, world.ops.conv, world.ops.attention)))
    world.backend.native_step(ops, pools, step, out, layer)
    return out


def native_tree(world: World, request: int, layer: int = 0) -> tuple[dict[int, Pools], dict[int, StepOut]]:
    """Pools and outputs after each active row, each one native step from its parent's pools."""
    tree = world.trees[request]
    assert tree is not None
    after: dict[int, Pools] = {}
    outs: dict[int, StepOut] = {}
    for row in tree.active_rows:
        after[row] = clone(world.pools if row == 0 else after[int(tree.parents[row])])
        outs[row] = native(world, after[row], request, row, layer)
    return after, outs


def expected(world: World, before: Pools, request: int, path: Sequence[int], end: Pools) -> Pools:
    """`before` with the state slot and the new committed positions that the native chain left."""
    pools, tree = clone(before), world.trees[request]
    assert tree is not None
    slot = int(world.batch.state_slot[request])
    pools.recurrent[:, slot], pools.conv[:, slot] = end.recurrent[:, slot], end.conv[:, slot]
    positions = range(tree.prefix_len, tree.prefix_len + len(path))
    at = flat_slots(world.batch.page_table, PAGE, request, positions)
    pools.cache.k[:, at], pools.cache.v[:, at] = end.cache.k[:, at], end.cache.v[:, at]
    return pools


def assert_same_pools(a: Pools, b: Pools) -> None:
    for name, x in a.tensors().items():
        assert same_bits(x, b.tensors()[name]), name


def outputs(out: StepOut) -> dict[str, Tensor]:
    return {f.name: getattr(out, f.name) for f in fields(out)}


def assert_bitwise(world: World, layer: int = 0) -> None:
    """Outputs of every active row, and the pools after publishing every path, equal the native chain's bits."""
    verified = clone(world.pools)
    out = verify(world, verified, layer)
    for request, tree in enumerate(world.trees):
        if tree is None:
            continue
        after, outs = native_tree(world, request, layer)
        lo = int(world.batch.cu_rows[request])
        for row, path in tree.paths().items():
            for name, value in outputs(outs[row]).items():
                assert same_bits(outputs(out)[name][lo + row], value[0]), (name, row)
            pools = clone(verified)
            publish(world, pools, [path if i == request else () for i in range(len(world.trees))], (layer,))
            assert_same_pools(pools, expected(world, verified, request, path, after[row]))


@pytest.mark.parametrize("dims", [SMALL, DK60], ids=lambda d: d.name)
@pytest.mark.parametrize("tree", TREES)
def test_tree_and_every_published_path_equal_the_native_chain(tree: str, dims: Dims) -> None:
    assert_bitwise(make_world(TorchBackend(), [TREES[tree]], dims))


@pytest.mark.parametrize("backend", [BankBackend, SqrtNormBackend, KVLayoutBackend])
def test_other_bitwise_backends_equal_their_own_chain(backend: type[Any]) -> None:
    assert_bitwise(make_world(backend(), [comb(7), None, complete_binary(2)]), layer=1)


CONTRACTS = [
    Contract(layout="KV", head_map="tiled", beta="bf16", norm="bf16", conv="bf16_product", softplus="log_exp"),
    Contract(carry="bf16"),
    Contract(carry="bf16", state_dtype=torch.bfloat16),
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=["forms", "carry", "bf16_pool"])
@pytest.mark.parametrize("backend", [TorchBackend, BankBackend])
def test_contract_variants_stay_bitwise_and_change_bits(backend: type[Any], contract: Contract) -> None:
    world = make_world(backend(contract), [comb(7)])
    assert_bitwise(world)
    plain = make_world(backend(), [comb(7)])
    if contract.layout == "KV":
        plain.pools.recurrent.copy_(world.pools.recurrent.transpose(-1, -2))
    else:
        plain.pools.recurrent.copy_(world.pools.recurrent)
    changed = verify(world, clone(world.pools)).gdn, verify(plain, clone(plain.pools)).gdn
    assert not torch.equal(*changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_of_three_equals_each_alone(backend: type[Any]) -> None:
    trees = [hydra27(), star(4), comb(6)]
    together = make_world(backend(), trees)
    pools = clone(together.pools)
    out = verify(together, pools)
    paths = [hydra27().path(31), (0, 2), (0,)]
    publish(together, pools, paths)
    for i, tree in enumerate(trees):
        solo = make_world(backend(), [tree], first=i)
        own = clone(solo.pools)
        alone = verify(solo, own)
        lo, active = int(together.batch.cu_rows[i]), list(tree.active_rows)
        if backend is not WYBackend:
            for name, value in outputs(alone).items():
                assert same_bits(value[active], outputs(out)[name][lo : lo + tree.n][active]), (i, name)
        publish(solo, own, [paths[i]])
        slot = int(solo.batch.state_slot[0])
        at = slice(i * PAGE * PAGES, (i + 1) * PAGE * PAGES)
        assert same_bits(own.recurrent[0, slot], pools.recurrent[0, slot])
        assert same_bits(own.conv[0, slot], pools.conv[0, slot])
        assert same_bits(own.cache.k[0, at], pools.cache.k[0, at])
        assert same_bits(own.cache.v[0, at], pools.cache.v[0, at])


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_reads_pools_only_and_ignores_inactive_rows(backend: type[Any]) -> None:
    world = make_world(backend(), [hydra27(), None])
    before, after = clone(world.pools), clone(world.pools)
    out = verify(world, after)
    assert same_bits(before.recurrent, after.recurrent) and same_bits(before.conv, after.conv)
    candidates = world.batch.row_slot.long()
    for a, b in ((before.cache.k, after.cache.k), (before.cache.v, after.cache.v)):
        a[0, candidates] = b[0, candidates]
        assert same_bits(a, b)
    idle = ~world.batch.active
    for group in (world.ops.gdn, world.ops.conv, world.ops.attention):
        for f in fields(group):  # type: ignore[arg-type]
            if f.name not in SHARED:
                getattr(group, f.name)[idle] = torch.nan
    poisoned = verify(world, clone(world.pools))
    for name, value in outputs(out).items():
        assert same_bits(value[~idle], outputs(poisoned)[name][~idle]), name
        assert not value[~idle].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_path_is_a_no_op_and_layers_may_be_any_subset(backend: type[Any]) -> None:
    world = make_world(backend(), [comb(5), star(3)])
    pools = clone(world.pools)
    verify(world, pools, 0)
    verify(world, pools, 1)
    still = clone(pools)
    publish(world, pools, [(), ()], (0, 1))
    publish(world, pools, [(0,), (0,)], ())
    assert_same_pools(pools, still)
    publish(world, pools, [(), (0, 2)], (1,))
    assert same_bits(pools.recurrent[0], still.recurrent[0])
    assert not same_bits(pools.recurrent[1], still.recurrent[1])
    live = int(world.batch.state_slot[0])
    assert same_bits(pools.recurrent[1, live], still.recurrent[1, live])


@pytest.mark.parametrize("backend", [TorchBackend, *BACKENDS[2:]])
def test_outputs_are_close_to_the_reference(backend: type[Any]) -> None:
    world = make_world(backend(), [hydra27(), comb(5)], DK60)
    reference = make_world(ReferenceBackend(world.backend.contract), world.trees, DK60)
    ours, theirs = clone(world.pools), clone(world.pools)
    out, truth = verify(world, ours), verify(reference, theirs)
    active = world.batch.active
    for name, value in outputs(out).items():
        torch.testing.assert_close(value[active], outputs(truth)[name][active], rtol=0.01, atol=2e-3)
    for w, pools in ((world, ours), (reference, theirs)):
        publish(w, pools, [hydra27().path(31), comb(5).path(4)])
    torch.testing.assert_close(ours.recurrent, theirs.recurrent, rtol=1e-5, atol=1e-5)
    assert same_bits(ours.conv, theirs.conv) and same_bits(ours.cache.k, theirs.cache.k)


@pytest.mark.parametrize("backend", [SplitKBackend, WYBackend])
def test_algebraic_controls_differ_from_their_native_bits(backend: type[Any]) -> None:
    # bf16 outputs hide most differences in fp32, so this takes the outputs of a large layer
    world, plain = (make_world(b, [hydra27()], DIMS_27B) for b in (backend(), TorchBackend()))
    active = world.batch.active
    ours, theirs = verify(world, clone(world.pools)).gdn, verify(plain, clone(plain.pools)).gdn
    assert ours is not None and theirs is not None
    assert not same_bits(ours[active], theirs[active])
    assert world.backend.contract.claims == "algebra"


@pytest.mark.parametrize("backend", [TorchBackend, BankBackend])
def test_bits_at_the_dims_of_a_27b_layer(backend: type[Any]) -> None:
    assert_bitwise(make_world(backend(), [comb(4)], DIMS_27B))


@pytest.mark.parametrize("backend", [TorchBackend, BankBackend])
def test_one_level_plan_has_the_same_bits(backend: type[Any]) -> None:
    world = make_world(backend(), [hydra27()])
    whole = build_batch(
        world.trees, state_slots=world.batch.state_slot.tolist(), page_table=world.batch.page_table, page_size=PAGE,
        levels="one",
    )  # fmt: skip
    many = verify(world, clone(world.pools)).gdn
    one = verify(replace(world, batch=whole), clone(world.pools)).gdn
    assert many is not None and one is not None and same_bits(many, one)


def test_tile_size_and_threads_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(TorchBackend(), [hydra27(), comb(4)], replace(DIMS_27B, hk=2, hv=6, conv_channels=70))
    active, path = world.batch.active, hydra27().path(31)
    results = []
    threads = torch.get_num_threads()
    for tile, count in ((64, 1), (1, 1), (64, 2)):
        monkeypatch.setattr(gdn, "TILE", tile)
        torch.set_num_threads(count)
        pools = clone(world.pools)
        out = verify(world, pools)
        publish(world, pools, [path, (0,)])
        results.append((out, pools))
    torch.set_num_threads(threads)
    for out, pools in results[1:]:
        assert_same_pools(pools, results[0][1])
        for name, value in outputs(out).items():
            assert same_bits(value[active], outputs(results[0][0])[name][active]), name


@pytest.mark.parametrize(
    ("backend", "contract", "words"),
    [
        (TorchBackend, Contract(graph_safe=True), "graph_safe"),
        (WYBackend, Contract(claims="algebra", carry="bf16"), "carry='fp32'"),
        (WYBackend, Contract(), "claims='algebra'"),
    ],
)
def test_contracts_that_cannot_be_kept_are_refused(backend: type[Any], contract: Contract, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        backend(contract)


def test_workspace_refuses_what_it_has_no_room_for() -> None:
    world = make_world(TorchBackend(), [comb(5)])
    with pytest.raises(ContractError, match="layer=2"):
        verify(world, clone(world.pools), layer=2)
    world.ws = world.backend.allocate(world.dims, Limits(1, 3, 8, SLOTS, 2), torch.device("cpu"))
    with pytest.raises(ContractError, match="rows=3"):
        verify(world, clone(world.pools))
    world = make_world(TorchBackend(), [comb(5)])
    world.ops = replace(world.ops, gdn=replace(world.ops.gdn, k=world.ops.gdn.k.float()))  # type: ignore[union-attr,type-var]
    with pytest.raises(ContractError, match="gdn_verify k: expected torch"):
        verify(world, clone(world.pools))
