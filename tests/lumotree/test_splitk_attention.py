"""Split-K attention: bits that depend on a row's own operands and path alone, errors inside the derived bound."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lumotree.backends.batch import build_batch, flat_slots
from lumotree.backends.protocol import AttentionOps, Batch, Limits, StepOps, StepOut
from lumotree.backends.splitk_backend import SplitKAttentionBackend
from lumotree.backends.triton_backend import TritonBackend
from lumotree.contract import DIMS_27B, DIMS_TINY, Contract, Dims
from lumotree.errors import BackendError, ContractError
from lumotree.reference.oracle_tokens import attention_oracle
from lumotree.state import KVCache, Pools
from lumotree.tree import Tree
from lumotree.verifier.kernels import INTERPRETED, launch, splitk_launch
from lumotree.verifier.kernels.splitk import ancestor_of_rank, count_bits, place_of_bit
from lumotree.verifier.kernels.splitk_launch import SplitScratch, SplitShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIMS = Dims(1, 1, 8, 8, 8, 2, 1, 24, 8)
POSITIONS = 600
SMALL = SplitShape(32, 16, 16)
#: A card also takes shapes whose products go through other instructions.
SHAPES = [SMALL] if INTERPRETED else [SMALL, SplitShape(128, 64, 64), SplitShape(128, 32, 128, warps=8)]
TREE = [-1, 0, 0, 1, 3]


@dataclass
class Request:
    """A request whose numbers follow from its seed, wherever it stands in a batch."""

    tree: Tree
    prefix_k: Tensor
    prefix_v: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def request(parents: Sequence[int], prefix: int, seed: int, idle: Sequence[int] = ()) -> Request:
    gen = torch.Generator().manual_seed(seed)
    active = np.ones(len(parents), bool)
    active[list(idle)] = False

    def draw(*shape: int) -> Tensor:
        return torch.randn((*shape, DIMS.head_dim), generator=gen).to(torch.bfloat16).to(DEVICE)

    kv, n = DIMS.kv_heads, len(parents)
    tree = Tree.make(parents, active=active, prefix_len=prefix)
    return Request(tree, draw(prefix, kv), draw(prefix, kv), draw(n, DIMS.q_heads), draw(n, kv), draw(n, kv))


@dataclass
class Scene:
    requests: list[Request | None]
    batch: Batch
    ops: AttentionOps
    cache: KVCache


def tables() -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(99)
    angle = torch.rand((POSITIONS, DIMS.rotary_dim // 2), generator=gen) * 6
    return angle.cos().to(DEVICE), angle.sin().to(DEVICE)


def scene(requests: Sequence[Request | None], page: int = 4, seed: int = 0) -> Scene:
    """Shuffled pages, candidates on free slots, NaN wherever nothing lives."""
    rng = np.random.default_rng(seed)
    live = [r for r in requests if r is not None]
    width = max(-(-(r.tree.prefix_len + r.tree.n) // page) for r in live)
    pages = rng.permutation(len(requests) * width + -(-sum(r.tree.n for r in live) // page))
    table = torch.as_tensor(pages[: len(requests) * width].reshape(len(requests), width).astype(np.int32))
    free = [int(p) * page + i for p in pages[len(requests) * width :] for i in range(page)]
    free = rng.permutation(free).tolist()
    cache = KVCache(*(torch.full((1, len(pages) * page, DIMS.kv_heads, DIMS.head_dim), float("nan"),
                                 dtype=torch.bfloat16, device=DEVICE) for _ in "kv"))  # fmt: skip
    trees = []
    for i, r in enumerate(requests):
        if r is None:
            trees.append(None)
            continue
        t = r.tree
        slots = [free.pop() for _ in range(t.n)]
        trees.append(Tree.make(t.parents, active=t.active, slots=slots, prefix_len=t.prefix_len))
        where = flat_slots(table, page, i, range(t.prefix_len)).to(DEVICE)
        cache.k[0, where], cache.v[0, where] = r.prefix_k, r.prefix_v
    batch = build_batch(
        trees, state_slots=[-1 if r is None else i for i, r in enumerate(requests)], page_table=table, page_size=page,
        device=DEVICE,
    )  # fmt: skip
    ops = AttentionOps(*(torch.cat([getattr(r, n) for r in live]).clone() for n in "qkv"), *tables())
    for x in (ops.q, ops.k, ops.v):
        x[~batch.active] = float("nan")
    return Scene(list(requests), batch, ops, cache)


def verify(s: Scene, backend: SplitKAttentionBackend, slack: int = 0) -> Tensor:
    rows = s.batch.rows + slack
    ws = backend.allocate(DIMS, Limits(s.batch.requests + slack, rows, 4, 8, 1), DEVICE)
    for f in fields(ws.split):
        x = getattr(ws.split, f.name)
        x.fill_(float("nan") if x.is_floating_point() else 0x7FFFFFF)
    out = torch.full((s.batch.rows, DIMS.q_heads, DIMS.head_dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    backend.attention_verify(s.ops, s.cache, s.batch, ws, out, 0)
    return out


def rows_of(s: Scene, out: Tensor, index: int) -> Tensor:
    """Outputs of the active rows of one request."""
    lo, hi = s.batch.cu_rows[index : index + 2].tolist()
    return out[lo:hi][s.batch.active[lo:hi]]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def native(s: Scene, backend: SplitKAttentionBackend, index: int, row: int) -> Tensor:
    """One token on a cache whose committed positions hold the row's ancestors, as decoding leaves them."""
    batch, found = s.batch, s.requests[index]
    assert found is not None
    tree, base = found.tree, int(batch.cu_rows[index])
    path = [int(r) for r in tree.path(row)]
    cache = KVCache(s.cache.k.clone(), s.cache.v.clone())
    table = batch.page_table.cpu()
    where = flat_slots(table, batch.page_size, index, range(tree.prefix_len, tree.prefix_len + len(path)))
    for ancestor, to in zip(path[:-1], where[:-1], strict=True):
        slot = int(batch.row_slot[base + ancestor])
        cache.k[0, to], cache.v[0, to] = s.cache.k[0, slot], s.cache.v[0, slot]
    step = build_batch(
        [Tree.make([-1], slots=[int(where[-1])], prefix_len=tree.prefix_len + len(path) - 1)], state_slots=[0],
        page_table=table[index : index + 1], page_size=batch.page_size, device=DEVICE,
    )  # fmt: skip
    at = slice(base + row, base + row + 1)
    ops = replace(s.ops, q=s.ops.q[at], k=s.ops.k[at], v=s.ops.v[at])
    out = torch.full((1, DIMS.q_heads, DIMS.head_dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    none = torch.zeros((1, 1, 1), device=DEVICE)
    backend.native_step(StepOps(attention=ops), Pools(none, none, cache), step, StepOut(attention=out), 0)
    return out[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("probs", ["fp32", "bf16"])
def test_rows_have_the_bits_of_the_chain_across_blocks_and_splits(shape: SplitShape, probs: str) -> None:
    # Ancestors become prefix behind a split's edge, behind a block's edge, and from an empty prefix.
    backend = SplitKAttentionBackend(Contract(graph_safe=True, probs=probs), shape)
    edges = (2 * shape.split - 2, 0) if probs == "fp32" else (shape.split + shape.keys - 2,)
    s = scene([request(TREE, p, i, idle=(2,)) for i, p in enumerate(edges)])
    out = verify(s, backend)
    for index, rows in enumerate([(0, 4), (3,)][: len(edges)]):
        for row in rows:
            at = int(s.batch.cu_rows[index]) + row
            assert same_bits(out[at], native(s, backend, index, row)), (index, row)


#: A path through two words of the mask; all other rows are idle.
WIDE = [-1, *[0] * 39]
WIDE[34], WIDE[36], WIDE[38] = 2, 34, 36
OTHERS = tuple(r for r in range(40) if r not in (0, 2, 34, 36, 38))


def test_ancestors_in_several_words_pass_a_splits_edge() -> None:
    backend = SplitKAttentionBackend(shape=SplitShape(16, 16, 16))
    s = scene([request(WIDE, 14, 5, idle=OTHERS)])
    out = verify(s, backend)
    for row in (34, 38):
        assert same_bits(out[row], native(s, backend, 0, row)), row


def test_bits_do_not_depend_on_neighbours_padding_slots_or_the_workspace() -> None:
    backend = SplitKAttentionBackend(shape=SMALL)
    mine, other = request(TREE, 40, 1), request([-1, 0], 33, 2)
    alone = scene([mine])
    want = rows_of(alone, verify(alone, backend), 0)
    for index, batch in ((1, [other, mine, None]), (34, [*[None] * 34, mine, other])):
        s = scene(batch, page=16, seed=index + 7)
        assert same_bits(rows_of(s, verify(s, backend, slack=3), index), want), index


def test_bits_do_not_depend_on_the_other_rows() -> None:
    # One path in a crowd: other tiles, other places in a tile, other neighbours, another number of rows.
    backend = SplitKAttentionBackend(shape=SMALL)
    crowd = request(WIDE, 40, 6, idle=OTHERS[4:])
    path = [0, 2, 34, 36, 38]
    few = Request(
        Tree.make([-1, 0, 1, 2, 3], prefix_len=40), crowd.prefix_k, crowd.prefix_v,
        *(getattr(crowd, n)[path] for n in "qkv"),
    )  # fmt: skip
    assert same_bits(verify(scene([crowd]), backend)[path], verify(scene([few]), backend))


def test_the_number_of_programs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SplitKAttentionBackend(shape=SMALL)
    s = scene([request(TREE[:3], 40, 1), request([-1], 3, 2)])
    want = verify(s, backend)
    monkeypatch.setattr(splitk_launch, "_programs", lambda shape, device: 7)
    assert same_bits(verify(s, backend), want)


def test_a_split_length_that_follows_the_batch_changes_bits() -> None:
    """Negative control: the comparisons above see a kernel that cuts by the size of its batch."""

    class CutsByBatch(SplitKAttentionBackend):
        def attention_verify(self, ops, cache, batch, ws, out, layer):  # type: ignore[no-untyped-def]
            self.shape = SplitShape(32 if batch.requests == 1 else 16, 16, 16)
            super().attention_verify(ops, cache, batch, ws, out, layer)

    # Weights rounded to bf16 are rounded relative to their split's largest score.
    backend = CutsByBatch(Contract(graph_safe=True, probs="bf16"), SplitShape(16, 16, 16))
    mine, other = request([-1, 0], 70, 1), request([-1], 9, 2)
    alone, both = scene([mine]), scene([mine, other])
    a, b = rows_of(alone, verify(alone, backend), 0), rows_of(both, verify(both, backend), 0)
    assert not same_bits(a, b)
    assert torch.allclose(a.float(), b.float(), atol=0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_stay_inside_the_derived_bound_and_grow_when_weights_are_rounded(shape: SplitShape) -> None:
    r = request(TREE[:3], 2 * shape.split + 11, 8)
    r.prefix_k.mul_(3)  # weights from nearly nothing to nearly all
    distance = {}
    for probs in ("fp32", "bf16"):
        out = verify(scene([r]), SplitKAttentionBackend(Contract(graph_safe=True, probs=probs), shape)).double()
        truth = attention_oracle(r.tree, AttentionOps(r.q, r.k, r.v, *tables()), r.prefix_k, r.prefix_v, probs)
        assert ((out - truth.out).abs() <= truth.bound).all(), probs
        distance[probs] = (out - truth.out).square().mean().item()
    assert distance["fp32"] < distance["bf16"]


@triton.jit
def _bits_kernel(words, count, ranks, sizes, found, N: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, N)
    tl.store(found + lane, ancestor_of_rank(words, count, tl.load(ranks + lane)))
    word = tl.load(words).to(tl.uint32, bitcast=True)
    tl.store(sizes, count_bits(word))
    tl.store(sizes + 1, place_of_bit(word, count_bits(word) - 1))


def test_ancestors_are_the_set_bits_in_order() -> None:
    rng = np.random.default_rng(0)
    for density in (0.05, 0.5, 1.0):
        bits = rng.random(96) < density
        bits[[0, 31, 95]] = True
        words = np.packbits(bits, bitorder="little").view(np.int32).copy()
        ranks = torch.arange(-8, 120, dtype=torch.int32, device=DEVICE)
        found, sizes = torch.zeros_like(ranks), torch.zeros(2, dtype=torch.int32, device=DEVICE)
        _bits_kernel[(1,)](torch.as_tensor(words).to(DEVICE), 3, ranks, sizes, found, N=128)
        want = np.flatnonzero(bits).tolist()
        assert found.tolist() == [-1] * 8 + want + [-1] * (120 - len(want))
        assert sizes.tolist() == [int(bits[:32].sum()), 31]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": 100}, r"expected split to be a power of two >= 1, got 100"),
        ({"keys": 8}, r"expected keys to be a power of two >= 16, got 8"),
        ({"rows": 24}, r"expected rows to be a power of two >= 16, got 24"),
        ({"split": 16, "keys": 32}, r"expected split >= keys=32, got split=16"),
        ({"stages": 0}, r"expected stages to be an integer >= 1, got 0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        SplitShape(**wrong)


def test_models_that_do_not_fit_are_refused_before_anything_is_allocated() -> None:
    limits = Limits(1, 4, 4, 2, 1)
    with pytest.raises(ContractError, match="head_dim=257 is above the limit; allowed: at most 256"):
        SplitKAttentionBackend().allocate(replace(DIMS_TINY, head_dim=257), limits, torch.device("cpu"))
    big = SplitKAttentionBackend(shape=SplitShape(rows=256, keys=128))
    with pytest.raises(BackendError, match=r"need 256 KiB of shared memory; allowed: at most 227 KiB; use fewer rows"):
        big.allocate(replace(DIMS_TINY, head_dim=256), limits, torch.device("cpu"))


def test_batches_that_do_not_fit_the_workspace_are_refused() -> None:
    backend = SplitKAttentionBackend(shape=SMALL, max_keys=32)
    s = scene([request([-1, 0, 1], 10, 1)])
    out = torch.zeros_like(s.ops.q)
    good = backend.allocate(DIMS, Limits(1, 3, 4, 8, 1), DEVICE)

    def attend(batch: Batch, split: SplitScratch) -> None:
        backend.attention_verify(s.ops, s.cache, batch, replace(good, split=split), out, 0)

    attend(s.batch, good.split)
    far = replace(s.batch, page_table=torch.zeros((1, 40), dtype=torch.int32, device=DEVICE))
    with pytest.raises(ContractError, match=r"keys=163, above the limit; allowed: at most \d+; .* larger max_keys"):
        attend(far, good.split)
    with pytest.raises(ContractError, match="expected page_size >= 1, got page_size=0"):
        attend(replace(s.batch, page_size=0), good.split)
    with pytest.raises(ContractError, match="workspace: rows=3 is above the limit; allowed: at most 2"):
        attend(s.batch, replace(good.split, keys=good.split.keys[:2]))
    with pytest.raises(ContractError, match="workspace: requests=1 is above the limit; allowed: at most 0"):
        attend(s.batch, replace(good.split, items=good.split.items[:0]))
    with pytest.raises(ContractError, match="rows of a request=3 is above the limit; allowed: at most 0"):
        attend(s.batch, replace(good.split, mask=good.split.mask[:, :0]))
    with pytest.raises(ContractError, match=r"expected q \[3, 1, 24\], got \[3, 2, 24\]"):
        attend(s.batch, replace(good.split, query=good.split.query[:, :1]))


def test_candidates_behind_a_page_table_that_fills_the_workspace_are_not_lost() -> None:
    """max_keys committed keys and a path of all rows behind them, as the limits allow."""
    s = scene([request([-1, *range(9)], 30, 1)])
    filled = replace(s, batch=replace(s.batch, page_table=s.batch.page_table[:, :8].contiguous()))
    exact = SplitKAttentionBackend(shape=SMALL, max_keys=8 * s.batch.page_size)
    assert same_bits(verify(filled, exact), verify(s, SplitKAttentionBackend(shape=SMALL)))


def test_a_workspace_that_the_card_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 80 << 30))
    monkeypatch.setattr(TritonBackend, "allocate", lambda self, dims, limits, device: None)
    backend = SplitKAttentionBackend(shape=SplitShape(), max_keys=1 << 17)
    with pytest.raises(BackendError, match="split-K attention workspace: expected 98 MiB of free memory on cuda:0"):
        backend.allocate(DIMS_27B, Limits(1, 32, 12, 2, 1), torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_uses_run_one_binary(shape: SplitShape) -> None:
    backend = SplitKAttentionBackend(shape=shape)
    s = scene([request(TREE, 70, 1), request([-1, *[0] * 40], 3, 2)])
    verify(s, backend)
    native(s, backend, 0, 4)
    assert len(backend.binaries["attention"]) == len(backend.binaries["combine"]) == 1


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")
def test_a_captured_graph_serves_other_trees_and_lengths() -> None:
    backend = SplitKAttentionBackend(shape=SMALL)
    first, other = scene([request(TREE, 70, 1)]), scene([request([-1, 0, 0, 2, 2], 68, 2)], seed=3)
    ws = backend.allocate(DIMS, Limits(1, 5, 4, 8, 1), DEVICE)
    out = torch.zeros_like(first.ops.q)
    backend.attention_verify(first.ops, first.cache, first.batch, ws, out, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.attention_verify(first.ops, first.cache, first.batch, ws, out, 0)
    for mine, theirs in ((first.batch, other.batch), (first.ops, other.ops), (first.cache, other.cache)):
        for f in fields(mine):  # type: ignore[arg-type]
            if isinstance(getattr(mine, f.name), Tensor):
                getattr(mine, f.name).copy_(getattr(theirs, f.name))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, verify(other, backend))


def test_tiles_need_no_more_than_they_say() -> None:
    assert SplitShape().shared_bytes(256) == 2 * (128 + 2 * 64) * 256
    assert SplitShape().splits(1025) == 2
    assert launch.MAX_HEAD_DIM > splitk_launch.MAX_HEAD_DIM
