"""Adapters of installed peers against a plain float64 recurrence, the oracle's bounds and their own native chain.

Shapes are tiny: Triton's interpreter takes milliseconds for each program and step. Run in an environment that has
the peer (see `lumotree.backends.peer_loading.INSTALL`); `-s` prints the worst differences.
"""

import importlib
from dataclasses import dataclass, replace

import pytest
import torch

from lumotree.backends import peer_loading
from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import ConvOps, GdnOps, Limits, StepOps, StepOut, covered_surfaces
from lumotree.contract import Dims
from lumotree.errors import BackendError, ContractError
from lumotree.reference.oracle import gdn_oracle, published
from lumotree.reference.oracle_tokens import conv_oracle
from lumotree.state import canonical_state, empty_pools
from lumotree.tree import Tree
from lumotree.tree_named import hydra27

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIMS = Dims(2, 4, 12, 10, 40, 4, 2, 24, 8, layers=2)  # K != V, HV != HK, no power of two among 12, 10, 40
LAYER = 1
MODULES = {
    "sglang": "sglang:SglangBackend",
    "tokenspeed": "tokenspeed:TokenspeedBackend",
    "tokenspeed-replay": "tokenspeed:TokenspeedReplayBackend",
    "transformers": "transformers_native:TransformersBackend",
    "fla": "fla:FlaBackend",
}


def make(peer, *args):
    """The adapter, or a skip with the reason."""
    module, name = MODULES[peer].split(":")
    try:
        peer_loading.require(peer.split("-")[0])
    except BackendError as missing:
        pytest.skip(str(missing))
    return getattr(importlib.import_module(f"lumotree.backends.{module}"), name)(*args)


@pytest.fixture(scope="module", params=MODULES)
def backend(request):
    return make(request.param)


@pytest.fixture(scope="module")
def sglang():
    return make("sglang")


@dataclass
class Case:
    """A ragged batch: trees (None = padding), pool slots, operands of all rows."""

    trees: list
    slots: list
    batch: object
    gdn: GdnOps
    conv: ConvOps

    def first_row(self, request):
        return int(self.batch.cu_rows[request])

    def live(self):
        return [(i, t) for i, t in enumerate(self.trees) if t is not None]


def make_case(seed=0, trees=None):
    trees = trees or [
        Tree.make([-1, 0, 0, 1, 1, 3, 4], active=[row not in (3, 5) for row in range(7)], prefix_len=3),
        None,
        Tree.make([-1, 0, 1, 0], prefix_len=5, slots=[20, 21, 22, 23]),
    ]
    slots = [[2, -1, 4, 0][i] if t is not None else -1 for i, t in enumerate(trees)]
    table = torch.arange(len(trees) * 4, dtype=torch.int32).reshape(-1, 4)
    batch = build_batch(trees, state_slots=slots, page_table=table, page_size=4, device=DEVICE)
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g) * scale).bfloat16().to(DEVICE)

    rows, hk, hv, dk, dv = batch.rows, DIMS.hk, DIMS.hv, DIMS.dk, DIMS.dv
    gdn = GdnOps(
        normal(rows, hk, dk), normal(rows, hk, dk), normal(rows, hv, dv), normal(rows, hv), normal(rows, hv),
        (torch.randn(hv, generator=g) * 0.5).to(DEVICE), (torch.randn(hv, generator=g) * 0.5).to(DEVICE),
    )  # fmt: skip
    conv = ConvOps(normal(rows, DIMS.conv_channels), normal(DIMS.conv_channels, DIMS.conv_width, scale=0.5))
    poison = ~batch.active
    for tensor in (gdn.q, gdn.k, gdn.v, gdn.a, gdn.b, conv.x):
        tensor[poison] = torch.nan
    return Case(trees, slots, batch, gdn, conv)


def make_pools(backend, case, seed=1):
    """Random committed state in the case's slots, NaN everywhere else."""
    pools = empty_pools(DIMS, backend.contract, 6, 64, DEVICE)
    g = torch.Generator().manual_seed(seed)
    for tensor in (pools.recurrent, pools.conv):
        values = torch.randn(tensor.shape, generator=g).to(DEVICE, tensor.dtype)
        tensor.fill_(torch.nan)
        for slot in case.slots:
            if slot >= 0:
                tensor[:, slot] = values[:, slot]
    return pools


def clone_pools(pools):
    return replace(pools, recurrent=pools.recurrent.clone(), conv=pools.conv.clone())


def same_bits(x, y):
    kind = {4: torch.int32, 2: torch.int16}[x.element_size()]
    return torch.equal(x.contiguous().view(kind), y.contiguous().view(kind))


def verify(backend, case, pools, surface="gdn"):
    """Workspace and outputs of one verification; outputs start as NaN."""
    limits = Limits(len(case.trees) + 1, case.batch.rows + 3, 8, 6, DIMS.layers)
    ws = backend.allocate(DIMS, limits, torch.device(DEVICE))
    if surface == "gdn":
        out = torch.full_like(case.gdn.v, torch.nan)
        backend.gdn_verify(case.gdn, pools.recurrent, case.batch, ws, out, LAYER)
    else:
        out = torch.full_like(case.conv.x, torch.nan)
        backend.conv_verify(case.conv, pools.conv, case.batch, ws, out, LAYER)
    return ws, out


def native_step(backend, case, pools, request, row, layer=LAYER):
    """(GDN output, conv output) of one of the backend's own one-token steps; `pools` advanced in place."""
    g, at = case.gdn, [case.first_row(request) + row]
    step = build_batch(
        [Tree.make([-1], prefix_len=int(case.trees[request].position[row]))], state_slots=[case.slots[request]],
        page_table=torch.arange(4, dtype=torch.int32)[None], page_size=4, device=DEVICE,
    )  # fmt: skip
    gdn = GdnOps(g.q[at], g.k[at], g.v[at], g.a[at], g.b[at], g.A_log, g.dt_bias)
    out = StepOut(torch.full_like(gdn.v, torch.nan), torch.full_like(case.conv.x[at], torch.nan))
    conv = ConvOps(case.conv.x[at], case.conv.weight) if backend.conv_verify else None
    backend.native_step(StepOps(gdn, conv), pools, step, out, layer)
    return out.gdn[0], out.conv[0]


def native_chains(backend, case, pools, request):
    """Active row -> (pools after its path, GDN output, conv output); a path's head is computed once."""
    tree, done = case.trees[request], {}
    for row in tree.active_rows:
        after = clone_pools(done[tree.parents[row]][0] if row else pools)
        done[row] = (after, *native_step(backend, case, after, request, row))
    return done


def publish_path(backend, case, pools, ws, request, path, surface="gdn"):
    """A copy of the pools in which one request has accepted `path`."""
    after = clone_pools(pools)
    accepted = accepted_paths([path if i == request else [] for i in range(len(case.trees))], DEVICE)
    if surface == "gdn":
        backend.gdn_publish(after.recurrent, case.batch, accepted, ws, [LAYER])
    else:
        backend.conv_publish(after.conv, case.batch, accepted, ws, [LAYER])
    return after


def plain_path(case, request, path, R, contract):
    """Contract section 2 in float64, from the rounded inputs; R `[HV, dv, dk]`. Yields (state, output)."""
    g, first = case.gdn, case.first_row(request)
    for row in (first + r for r in path):
        q, k = g.q[row].double(), g.k[row].double()
        k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * DIMS.dk**-0.5
        heads = DIMS.key_head(contract.head_map)
        x = g.a[row].double() + g.dt_bias.double()
        decay = torch.exp(-g.A_log.double().exp() * torch.where(x > 20, x, torch.log1p(x.exp())))
        beta = torch.sigmoid(g.b[row].double())
        if contract.beta == "bf16":
            beta = beta.bfloat16().double()
        R = decay[:, None, None] * R
        u = beta[:, None] * (g.v[row].double() - (R * k[heads][:, None]).sum(-1))
        R = R + u[:, :, None] * k[heads][:, None]
        yield R, (R * q[heads][:, None]).sum(-1)


def test_it_covers_what_the_peer_has(backend):
    conv = backend.name == "sglang"
    assert covered_surfaces(backend) == {"gdn": (True, True), "conv": (conv, conv), "attention": (False, False)}
    assert not backend.contract.graph_safe


def test_outputs_and_states_match_a_plain_float64_recurrence(backend):
    case = make_case()
    pools = make_pools(backend, case)
    worst_out = worst_state = 0.0
    ws, out = verify(backend, case, pools)
    for request, tree in case.live():
        for path in tree.paths().values():
            after = publish_path(backend, case, pools, ws, request, path)
            R = canonical_state(pools, backend.contract, case.slots[request], LAYER).recurrent.double()
            *_, (R, o) = plain_path(case, request, path, R, backend.contract)
            got = canonical_state(after, backend.contract, case.slots[request], LAYER).recurrent.double()
            worst_state = max(worst_state, float(torch.linalg.norm(got - R) / torch.linalg.norm(R)))
            error = (out[case.first_row(request) + path[-1]].double() - o).abs()
            worst_out = max(worst_out, float((error / (2.0**-8 * o.abs() + 1e-6)).max()))
    print(f"\n{backend.name}: state relative L2 {worst_state:.3g}; |output - o| <= {worst_out:.4f} (2^-8 |o| + 1e-6)")
    assert worst_state < 3e-7
    assert worst_out <= 1.0  # bf16 rounds within 2^-9 relative of its binade's top, 2^-8 of its bottom


def test_outputs_and_states_stay_within_the_oracles_bounds(backend):
    case = make_case(seed=5)
    pools = make_pools(backend, case)
    ws, out = verify(backend, case, pools)
    used = 0.0
    for request, tree in case.live():
        first = case.first_row(request)
        rows = slice(first, first + tree.n)
        g = case.gdn
        ops = GdnOps(g.q[rows], g.k[rows], g.v[rows], g.a[rows], g.b[rows], g.A_log, g.dt_bias)
        R0 = canonical_state(pools, backend.contract, case.slots[request], LAYER).recurrent
        for truth in gdn_oracle(tree, R0, ops, backend.contract):
            after = publish_path(backend, case, pools, ws, request, tree.path(truth.row))
            state, bound = published(truth, backend.contract)
            got = canonical_state(after, backend.contract, case.slots[request], LAYER).recurrent.double()
            fraction = torch.linalg.vector_norm(got - state, dim=-1) / bound
            used = max(used, float(fraction.max()))
            assert fraction.max() <= 1
            assert ((out[first + truth.row].double() - truth.out).abs() <= truth.out_bound).all()
    print(f"\n{backend.name}: at most {used:.3f} of the oracle's state bound")


def test_tree_outputs_and_published_states_are_bitwise_the_native_chain(backend):
    case = make_case(seed=2)
    pools = make_pools(backend, case)
    ws, out = verify(backend, case, pools)
    for request, tree in case.live():
        for row, (chain, output, _) in native_chains(backend, case, pools, request).items():
            after = publish_path(backend, case, pools, ws, request, tree.path(row))
            assert same_bits(output, out[case.first_row(request) + row])
            assert same_bits(chain.recurrent, after.recurrent)  # the whole pool: other slots and layers too


@pytest.mark.parametrize("peer", [peer for peer in MODULES if peer != "tokenspeed-replay"])
def test_the_published_27_candidate_tree_is_bitwise_the_native_chain(peer):
    backend = make(peer)
    case = make_case(seed=12, trees=[hydra27(prefix_len=2)])
    pools = make_pools(backend, case)
    ws, out = verify(backend, case, pools)
    chains = native_chains(backend, case, pools, 0)
    assert len(chains) == 28
    for row, (chain, output, _) in chains.items():
        assert same_bits(output, out[row])
        after = publish_path(backend, case, pools, ws, 0, case.trees[0].path(row))
        assert same_bits(chain.recurrent, after.recurrent)


def test_all_requests_and_layers_publish_at_once(backend):
    case = make_case(seed=13)
    pools = make_pools(backend, case)
    chain, paths = clone_pools(pools), [(0, 1, 4), (), (0, 3)]
    ws, out = verify(backend, case, pools)
    backend.gdn_verify(case.gdn, pools.recurrent, case.batch, ws, out, 0)
    backend.gdn_publish(pools.recurrent, case.batch, accepted_paths(paths, DEVICE), ws, [0, 1])
    for request, path in enumerate(paths):
        for row in path:
            for layer in (0, 1):
                native_step(backend, case, chain, request, row, layer)
    assert same_bits(pools.recurrent, chain.recurrent)


def test_verification_reads_and_empty_paths_leave_the_pools_alone(backend):
    case = make_case(seed=3)
    pools = make_pools(backend, case)
    before = clone_pools(pools)
    for surface in ("gdn", "conv") if backend.conv_verify else ("gdn",):
        ws, _ = verify(backend, case, pools, surface)
        pool = pools.recurrent if surface == "gdn" else pools.conv
        publish = backend.gdn_publish if surface == "gdn" else backend.conv_publish
        publish(pool, case.batch, accepted_paths([[], [], []], DEVICE), ws, range(DIMS.layers))
    assert same_bits(pools.recurrent, before.recurrent)
    assert same_bits(pools.conv, before.conv)


def test_inactive_rows_and_other_requests_cannot_matter(backend):
    case = make_case(seed=4)
    pools = make_pools(backend, case)
    _, together = verify(backend, case, pools)
    assert together[case.batch.active].isfinite().all()
    for request, tree in case.live():
        first = case.first_row(request)
        rows = slice(first, first + tree.n)
        g = case.gdn
        alone = make_case(trees=[tree])
        alone.slots = [case.slots[request]]
        alone.batch = build_batch([tree], state_slots=alone.slots, page_table=torch.arange(4)[None], page_size=4,
                                  device=DEVICE)  # fmt: skip
        fill = {name: getattr(g, name)[rows].nan_to_num(nan=7.0) for name in ("q", "k", "v", "a", "b")}
        alone.gdn = GdnOps(**fill, A_log=g.A_log, dt_bias=g.dt_bias)
        _, single = verify(backend, alone, pools)
        active = torch.tensor(tree.active, device=DEVICE)
        assert same_bits(single[active], together[rows][active])


def test_a_batch_of_padding_alone_is_a_no_op(backend):
    case = make_case(trees=[None, None])
    pools = make_pools(backend, case)
    ws, out = verify(backend, case, pools)
    backend.gdn_publish(pools.recurrent, case.batch, accepted_paths([[], []], DEVICE), ws, [LAYER])
    step = StepOps(gdn=case.gdn, conv=case.conv)
    backend.native_step(step, pools, case.batch, StepOut(gdn=out, conv=torch.zeros_like(case.conv.x)), LAYER)
    assert pools.recurrent.isnan().all()


def test_the_declared_beta_rounding_is_the_one_it_has(backend):
    """The other variant is a thousand times farther away, so a wrong declaration would be seen."""
    case = make_case(seed=6, trees=[Tree.make([-1])])
    pools = make_pools(backend, case)
    R = canonical_state(pools, backend.contract, case.slots[0], LAYER).recurrent.double()
    native_step(backend, case, pools, 0, 0)
    got = canonical_state(pools, backend.contract, case.slots[0], LAYER).recurrent.double()
    error = {}
    for beta in ("fp32", "bf16"):
        ((truth, _),) = plain_path(case, 0, [0], R, replace(backend.contract, beta=beta))
        error[beta] = float(torch.linalg.norm(got - truth) / torch.linalg.norm(truth))
    print(f"\n{backend.name}: state relative L2 under beta fp32 {error['fp32']:.3g}, bf16 {error['bf16']:.3g}")
    declared = error.pop(backend.contract.beta)
    assert declared < 3e-7
    assert min(error.values()) > 100 * declared


# sglang alone: bf16 pools and the convolution


def test_sglang_with_a_bf16_pool_is_bitwise_its_native_chain():
    contract = make("sglang").contract
    backend = make("sglang", replace(contract, state_dtype=torch.bfloat16, carry="bf16"))
    with pytest.raises(ContractError, match="arithmetic is fixed"):
        make("sglang", replace(contract, beta="bf16"))
    test_tree_outputs_and_published_states_are_bitwise_the_native_chain(backend)
    test_outputs_and_states_stay_within_the_oracles_bounds(backend)


def test_sglang_conv_publishes_the_window_of_the_path(sglang):
    case = make_case(seed=8)
    pools = make_pools(sglang, case)
    ws, _ = verify(sglang, case, pools, "conv")
    for request, tree in case.live():
        for path in tree.paths().values():
            after = publish_path(sglang, case, pools, ws, request, path, "conv")
            slot, first = case.slots[request], case.first_row(request)
            inputs = torch.cat([pools.conv[LAYER, slot], case.conv.x[[first + r for r in path]].T], dim=1)
            want = pools.conv.clone()
            want[LAYER, slot] = inputs[:, 1 - DIMS.conv_width :]
            assert same_bits(after.conv, want)


def test_sglang_conv_outputs_match_the_oracle_and_decode(sglang):
    case = make_case(seed=9)
    pools = make_pools(sglang, case)
    _, out = verify(sglang, case, pools, "conv")
    rows_equal = rows_seen = other = values = 0
    for request, tree in case.live():
        first = case.first_row(request)
        ops = ConvOps(case.conv.x[first : first + tree.n], case.conv.weight)
        history = pools.conv[LAYER, case.slots[request]]
        truth = conv_oracle(tree, history, ops, sglang.contract)
        got = out[[first + r for r in truth.rows]].double()
        assert ((got - truth.out).abs() <= truth.bound).all()
        fp32 = conv_oracle(tree, history, ops, replace(sglang.contract, conv="fp32"))
        other += int((fp32.out.float().bfloat16().double() != got).sum())
        values += got.numel()
        assert torch.equal(truth.out.float().bfloat16().double(), got)
        for row, (_, _, output) in native_chains(sglang, case, pools, request).items():
            rows_equal += same_bits(output, out[first + row])
            rows_seen += 1
    print(f"\nsglang conv: {rows_equal} of {rows_seen} rows bitwise decode; {other} of {values} not fp32 products")
    assert rows_equal == rows_seen
    assert other > values // 10


def test_sglang_conv_sums_taps_newest_first_in_a_tree_and_oldest_first_in_decode(sglang):
    """Constructed: history 0, -1, 1 and a tiny newest input. (tiny + 1) - 1 loses it, (-1 + 1) + tiny keeps it."""
    case = make_case(trees=[Tree.make([-1])])
    pools = make_pools(sglang, case)
    pools.conv[LAYER, case.slots[0]] = torch.tensor([0.0, -1.0, 1.0]).bfloat16().to(DEVICE)
    case.conv.x.fill_(2.0**-30)
    case.conv.weight.fill_(1.0)
    _, out = verify(sglang, case, pools, "conv")
    _, decode = native_step(sglang, case, pools, 0, 0)
    assert out[0].unique().tolist() == [0.0]
    assert decode.unique().tolist() == [2.0**-31]
    assert (sglang.contract.claim("gdn"), sglang.contract.claim("conv")) == ("bitwise", "algebra")
