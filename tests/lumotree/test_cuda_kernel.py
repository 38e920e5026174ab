"""The CUDA kernel against its own one-token chain and float64; emulated where there is no GPU."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.cuda_backend import CudaBackend
from lumotree.backends.protocol import GdnOps, Limits
from lumotree.contract import DIMS_27B, Dims
from lumotree.errors import BackendError, ContractError
from lumotree.tree import Tree
from lumotree.tree_named import named
from lumotree.verifier.cuda import build, gdn
from lumotree.verifier.cuda.build import Spec, Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and shutil.which("g++") is None, reason="the emulation needs a C++ compiler"
)
SMALL = Dims(1, 3, 8, 12, 20, 2, 1, 16, 4)
LAYER = 1


class Case:
    """Random operands and states for trees; slot 0 and the other layer are poisoned."""

    def __init__(self, dims: Dims, trees: list[Tree | None]) -> None:
        gen = torch.Generator().manual_seed(7)
        self.dims, live = dims, [t for t in trees if t is not None]
        sizes = 0
        self.trees: list[Tree | None] = []
        for t in trees:
            if t is not None:
                t = Tree.make(t.parents, active=t.active, slots=range(sizes, sizes + t.n), num_slots=9999)
                sizes += t.n
            self.trees.append(t)
        self.table = torch.arange(len(trees) * 90, dtype=torch.int32).reshape(len(trees), 90)
        slots = [i + 1 if t is not None else -1 for i, t in enumerate(trees)]
        self.batch = build_batch(self.trees, state_slots=slots, page_table=self.table, page_size=16, device=DEVICE)
        rows = self.batch.rows

        def bf16(*shape: int) -> Tensor:
            x = torch.randn(rows, *shape, generator=gen).to(torch.bfloat16).to(DEVICE)
            x[~self.batch.active] = float("nan")
            return x

        rates = [torch.randn(dims.hv, generator=gen).to(DEVICE) for _ in range(2)]
        self.ops = GdnOps(
            bf16(dims.hk, dims.dk), bf16(dims.hk, dims.dk), bf16(dims.hv, dims.dv), bf16(dims.hv), bf16(dims.hv), *rates
        )  # fmt: skip
        self.pool = torch.full((2, len(trees) + 2, dims.hv, dims.dv, dims.dk), float("nan"), device=DEVICE)
        for slot in slots:
            if slot > 0:
                self.pool[LAYER, slot] = torch.randn(self.pool.shape[2:], generator=gen).to(DEVICE)
        self.backend = CudaBackend()
        longest = max([t.n for t in live], default=1)
        self.ws = self.backend.allocate(dims, Limits(len(trees), rows, longest, len(trees) + 2, 2), DEVICE)
        self.out = torch.full((rows, dims.hv, dims.dv), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        self.backend.gdn_verify(self.ops, self.pool, self.batch, self.ws, self.out, LAYER)

    def first(self, request: int) -> int:
        return int(self.batch.cu_rows[request])

    def chain(self, request: int, path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Outputs and pool after decoding a path token by token with the native step."""
        pool, outs = self.pool.clone(), []
        for row in path:
            at = self.first(request) + row
            one = build_batch(
                [Tree.make([-1])], state_slots=[request + 1], page_table=self.table[:1], page_size=16, device=DEVICE
            )
            rows = {name: getattr(self.ops, name)[at : at + 1].contiguous() for name in "qkvab"}
            out = torch.zeros((1, self.dims.hv, self.dims.dv), dtype=torch.bfloat16, device=DEVICE)
            gdn.native(replace(self.ops, **rows), pool, one, out, LAYER)
            outs.append(out[0])
        return torch.stack(outs), pool

    def published(self, request: int, path: tuple[int, ...]) -> Tensor:
        pool = self.pool.clone()
        paths = [path if i == request else () for i in range(len(self.trees))]
        self.backend.gdn_publish(pool, self.batch, accepted_paths(paths, DEVICE), self.ws, [LAYER])
        return pool


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def assert_bitwise(case: Case, leaves: int = 99) -> None:
    for request, tree in enumerate(case.trees):
        if tree is None:
            continue
        for leaf in tree.leaves[-leaves:]:
            path = tree.path(leaf)
            outs, pool = case.chain(request, path)
            assert torch.equal(bits(outs), bits(case.out[[case.first(request) + r for r in path]]))
            assert torch.equal(bits(case.published(request, path)), bits(pool))


def test_every_path_of_hydra27_has_the_bits_of_the_chain() -> None:
    case = Case(SMALL, [named("hydra27")])
    assert_bitwise(case)
    assert case.out[~case.batch.active].isnan().all()
    assert case.ws.gdn.cut.numel() == 0


@pytest.mark.parametrize(
    ("dims", "trees", "leaves"),
    [
        (replace(SMALL, hk=2, hv=6, dk=12, dv=20), ["comb:5", None, "binary:3", "chain:1"], 2),
        (replace(SMALL, hk=1, hv=2, dk=60, dv=36), ["hydra27"], 1),
        (replace(SMALL, hk=1, hv=1, dk=128, dv=50), ["mtp5"], 1),
        (replace(SMALL, hk=1, hv=1, dk=130, dv=8), ["star:4"], 1),
        (replace(SMALL, hk=1, hv=1, dk=10, dv=6), ["comb:3"], 1),
        (replace(SMALL, hk=2, hv=4, dk=8, dv=100), [None, "comb:5", "chain:18", "mtp5"], 1),
        (replace(SMALL, hk=1, hv=1, dk=8, dv=400), ["chain:17"], 1),
    ],
)
def test_sizes_and_batches(dims: Dims, trees: list[str | None], leaves: int) -> None:
    assert_bitwise(Case(dims, [None if t is None else named(t) for t in trees]), leaves)


def test_trees_beyond_one_stage_and_beyond_the_stack() -> None:
    case = Case(replace(SMALL, hv=1, dv=4), [named("binary:6"), named("comb:9")])
    many = DEVICE.type == "cpu"  # where two blocks are a large grid, whose stack is shorter
    assert case.ws.gdn.cut.shape[0] == case.batch.rows // (11 if many else 47)
    assert_bitwise(case, 3)
    assert_bitwise(Case(replace(SMALL, hv=1, dv=4), [named("chain:70")]))


def test_against_float64() -> None:
    case = Case(SMALL, [named("hydra27")])
    ops, tree = case.ops, case.trees[0]
    assert tree is not None
    k, q = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (ops.k, ops.q))
    softplus = torch.nn.functional.softplus(ops.a.double() + ops.dt_bias.double())
    decay, beta = (-ops.A_log.double().exp() * softplus).exp(), ops.b.double().sigmoid()
    states: dict[int, Tensor] = {-1: case.pool[LAYER, 1].double()}
    for row in tree.active_rows:
        state = decay[row][:, None, None] * states[int(tree.parents[row])]
        u = beta[row][:, None] * (ops.v[row].double() - (state * k[row]).sum(-1))
        states[row] = state + u[:, :, None] * k[row]
        want = (states[row] * q[row] * SMALL.dk**-0.5).sum(-1)
        torch.testing.assert_close(case.out[row].double(), want, rtol=2**-8, atol=2e-6)
    path = tree.path(tree.leaves[-1])
    torch.testing.assert_close(case.published(0, path)[LAYER, 1].double(), states[path[-1]], rtol=1e-5, atol=2e-6)


def test_nothing_accepted_changes_nothing() -> None:
    case = Case(SMALL, [named("mtp5"), None])
    assert torch.equal(bits(case.published(0, ())), bits(case.pool))


def test_every_tile_of_the_table_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = [named("comb:5"), None, named("chain:18")]
    path, results = tuple(range(18)), []
    for use in ("verify", "verify_many"):
        monkeypatch.setitem(gdn._TILES, "verify_many", gdn._TILES[use])
        gdn.spec.cache_clear()
        case = Case(replace(SMALL, hk=1, hv=2, dk=8, dv=28), trees)
        results.append((bits(case.out[case.batch.active]), bits(case.published(2, path)), bits(case.ws.gdn.v)))
    gdn.spec.cache_clear()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("dv", "parts"), [(128, 1), (20, 1), (400, 2)])
def test_parts_cover_a_key_head(dv: int, parts: int) -> None:
    found = gdn.spec("publish", 2, 2, 128, dv, True, DEVICE)
    assert found.parts == 2 * parts
    assert found.tile.part * parts * found.tile.slabs * found.tile.warps * 4 >= dv


def test_operands_that_start_anywhere() -> None:
    case = Case(replace(SMALL, hk=1, hv=1, dk=16, dv=8), [named("mtp5")])
    out, want = torch.zeros_like(case.out), case.out.clone()
    shifted = torch.empty(case.ops.k.numel() + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(case.ops.k.shape)
    shifted.copy_(case.ops.k)
    case.backend.gdn_verify(replace(case.ops, k=shifted), case.pool, case.batch, case.ws, out, LAYER)
    assert torch.equal(bits(out), bits(want))


def test_a_block_that_does_not_fit_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn, "shared_limit", lambda device: 20_000)
    with pytest.raises(BackendError, match=r"needs \d+ bytes of shared memory; this card allows 20000"):
        gdn.spec.__wrapped__("verify", 1, 1, 256, 256, True, DEVICE)


def test_fewer_pending_states_on_a_card_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn, "shared_limit", lambda device: 100_000)
    assert gdn.spec.__wrapped__("verify", 16, 48, 128, 128, True, DEVICE).tile.stack < 3


def test_too_large_a_key_is_refused() -> None:
    with pytest.raises(ContractError, match=r"dk=300 is above the limit"):
        CudaBackend().allocate(replace(DIMS_27B, dk=300), Limits(1, 32, 12, 2, 1), DEVICE)


def test_without_a_host_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BackendError, match=r"emulation on the CPU needs g\+\+ or clang\+\+"):
        build.EmulatedKernel(Spec("verify", 1, 1, 8, 4, Tile(3, 4, 3, 32), False))


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(BackendError, match=r"cuda-bindings is missing .* install lumotree-audit\[cuda\]"):
        build.compile_cubin(Spec("verify", 1, 1, 8, 4, Tile(3, 4, 3, 32), False), "sm_90")


def test_without_the_runtime_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setattr(build, "_bindings", lambda part: SimpleNamespace(nvrtcCreateProgram=missing))
    with pytest.raises(BackendError, match=r"NVRTC, the run-time compiler, is missing \(libnvrtc"):
        build.compile_cubin(Spec("verify", 1, 1, 8, 4, Tile(3, 4, 3, 32), False), "sm_90")


def test_a_failed_driver_call_says_what_was_tried() -> None:
    with pytest.raises(BackendError, match=r"could not launch gdn_walk: 700"):
        build._ask("launch gdn_walk", (700,))


def test_an_old_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(BackendError, match=r"Tesla T4 has compute capability 7\.5; expected at least 8\.0"):
        build.check_card(0)


def test_a_slot_beyond_two_to_the_31_elements(tmp_path: Path) -> None:
    """On a CPU the pool is a sparse file, of which only the slot's pages exist; on a card it is 8.6 GB."""
    case = Case(replace(SMALL, hk=1, hv=1, dk=8, dv=4), [named("mtp5")])
    slot, elements = 2**26 + 5, 32
    (tmp_path / "pool").touch()
    count = (slot + 2) * elements
    if DEVICE.type == "cuda":
        far = torch.empty(count, device=DEVICE)
    else:
        far = torch.from_file(str(tmp_path / "pool"), shared=True, size=count, dtype=torch.float32)
    far = far.view(1, slot + 2, 1, 4, 8)
    far[0, slot] = case.pool[LAYER, 1]
    batch = replace(case.batch, state_slot=torch.tensor([slot], dtype=torch.int32, device=DEVICE))
    out = torch.zeros_like(case.out)
    ws = case.backend.allocate(case.dims, Limits(1, 6, 6, slot + 2, 1), DEVICE)
    case.backend.gdn_verify(case.ops, far, batch, ws, out, 0)
    assert torch.equal(bits(out), bits(case.out))
    path = tuple(range(6))
    case.backend.gdn_publish(far, batch, accepted_paths([path], DEVICE), ws, [0])
    assert torch.equal(bits(far[0, slot]), bits(case.published(0, path)[LAYER, 1]))
