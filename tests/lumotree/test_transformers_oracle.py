"""transformers judges our float64 oracle: same operands, its code, evaluated in float64 and in fp32.

transformers casts to fp32 inside. `InFloat64` makes those casts float64, so that its very own code gives float64
results, which must agree with the oracle to the rounding of float64. In fp32 it must stay within the oracle's bound.
"""

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lumotree.backends import peer_loading
from lumotree.backends.protocol import AttentionOps, ConvOps, GdnOps
from lumotree.contract import Contract
from lumotree.errors import BackendError
from lumotree.reference.oracle import gdn_oracle
from lumotree.reference.oracle_tokens import attention_oracle, conv_oracle
from lumotree.tree import Tree

pytestmark = pytest.mark.peer
HK, HV, DK, DV, W, CHANNELS = 2, 4, 12, 20, 4, 36
U64 = 2.0**-53
TREE = Tree.make([-1, 0, 0, 1, 1, 3, 2], prefix_len=3)
FAMILIES = ["qwen3_5", "qwen3_next"]


@pytest.fixture(scope="module", params=FAMILIES)
def modeling(request):
    try:
        peer_loading.require("transformers")
    except BackendError as missing:
        pytest.skip(str(missing))
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("with fla in the same environment transformers dispatches to it")
    return importlib.import_module(f"transformers.models.{request.param}.modeling_{request.param}")


class InFloat64(TorchFunctionMode):
    """Every fp32 dtype that appears as an argument, and `.float()`, becomes float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args = tuple(wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: wide.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def normal(*shape, seed, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def gdn_case(seed=0):
    """bf16 operands of the tree's rows, fp32 parameters and state `[HV, dv, dk]`; some gates beyond 20."""
    n = TREE.n
    a = normal(n, HV, seed=seed + 3)
    a[2, 1], a[4, 0] = 25.0, -30.0
    shapes = [(n, HK, DK), (n, HK, DK), (n, HV, DV)]
    q, k, v = (normal(*s, seed=seed + i).bfloat16() for i, s in enumerate(shapes))
    b = normal(n, HV, seed=seed + 4).bfloat16()
    ops = GdnOps(q, k, v, a.bfloat16(), b, normal(HV, seed=seed + 5, scale=0.5), normal(HV, seed=seed + 6, scale=0.5))
    return ops, normal(HV, DV, DK, seed=seed + 7)


def rule_over_path(modeling, ops, R0, path, dtype):
    """Output `[HV, dv]` and state `[HV, dv, dk]` of the last row of a path, by transformers' recurrent rule."""
    rule = inspect.unwrap(modeling.torch_recurrent_gated_delta_rule)
    rows = list(path)
    q, k = ops.q[rows].to(dtype), ops.k[rows].to(dtype)
    if "repeat_interleave" not in inspect.getsource(rule):  # older versions leave grouped heads to the caller
        q, k = (x.repeat_interleave(HV // HK, dim=1) for x in (q, k))
    g = -ops.A_log.to(dtype).exp() * F.softplus(ops.a[rows].to(dtype) + ops.dt_bias.to(dtype))
    beta = ops.b[rows].to(dtype).sigmoid()
    out, state = rule(
        q[None], k[None], ops.v[rows].to(dtype)[None], g=g[None], beta=beta[None], initial_state=R0.to(dtype).mT[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert state.dtype == out.dtype == dtype
    return out[0, -1], state[0].mT


def test_gdn_oracle_agrees_in_float64(modeling):
    ops, R0 = gdn_case()
    worst = 0.0
    for truth in gdn_oracle(TREE, R0, ops, Contract()):
        path = TREE.path(truth.row)
        with InFloat64():
            out, state = rule_over_path(modeling, ops, R0, path, torch.float64)
        # A row costs two dot products of dk terms and about a dozen other roundings, and errors never grow.
        tolerance = len(path) * (2 * DK + 16) * U64
        scale = torch.linalg.norm(truth.state) + torch.linalg.norm(ops.v[list(path)].double())
        error = max(float((state - truth.state).abs().max()), float((out - truth.out).abs().max()))
        worst = max(worst, error / float(scale))
        assert error <= tolerance * scale
    print(f"\n{modeling.__name__}: GDN in float64, worst difference {worst:.3g} of the scale (u = {U64:.3g})")


def test_gdn_in_fp32_stays_within_the_oracles_bounds(modeling):
    ops, R0 = gdn_case(seed=20)
    worst = 0.0
    for truth in gdn_oracle(TREE, R0, ops, Contract()):
        out, state = rule_over_path(modeling, ops, R0, TREE.path(truth.row), torch.float32)
        used = torch.linalg.vector_norm(state.double() - truth.state, dim=-1) / truth.state_bound
        worst = max(worst, float(used.max()))
        assert used.max() <= 1
        assert ((out.bfloat16().double() - truth.out).abs() <= truth.out_bound).all()
    print(f"\n{modeling.__name__}: GDN in fp32 uses at most {worst:.3f} of the oracle's state bound")


def test_a_wrong_oracle_would_be_seen(modeling):
    """Power: heads mapped the other way, or beta rounded, are far outside the tolerance above."""
    ops, R0 = gdn_case()
    for variant in (Contract(head_map="tiled"), Contract(beta="bf16")):
        *_, truth = gdn_oracle(TREE, R0, ops, variant)
        with InFloat64():
            _, state = rule_over_path(modeling, ops, R0, TREE.path(truth.row), torch.float64)
        assert (state - truth.state).abs().max() > 1e-5


def conv_over_path(modeling, history, x, weight):
    """Outputs `[rows, D]` and window after a path, by transformers' one-token update (its state holds W inputs)."""
    update = inspect.unwrap(modeling.causal_conv1d_update)
    window = torch.cat([torch.zeros(len(history), 1, dtype=history.dtype), history], dim=1)[None]
    outputs = [update(row[None, :, None], window, weight, None, "silu")[0, :, 0] for row in x]
    return torch.stack(outputs), window[0, :, 1:]


def test_conv_oracle_agrees_in_float64(modeling):
    ops = ConvOps(normal(TREE.n, CHANNELS, seed=1).bfloat16(), normal(CHANNELS, W, seed=2).bfloat16())
    history = normal(CHANNELS, W - 1, seed=3).bfloat16()
    truth = conv_oracle(TREE, history, ops, Contract())
    worst = 0.0
    for i, row in enumerate(truth.rows):
        x = ops.x[list(TREE.path(row))].double()
        outputs, window = conv_over_path(modeling, history.double(), x, ops.weight.double())
        error = (outputs[-1] - truth.out[i]).abs()
        magnitude = torch.cat([history.double(), x.T], 1)[:, -W:].abs().mul(ops.weight.double().abs()).sum(1)
        worst = max(worst, float((error / magnitude).max()))
        assert (error <= (2 * W + 8) * U64 * (1.1 * magnitude + 1e-300)).all()  # the slope of SiLU is below 1.1
        assert torch.equal(window, torch.cat([history.double(), x.T], 1)[:, 1 - W :])
    print(f"\n{modeling.__name__}: conv in float64, worst difference {worst:.3g} of the products' magnitude")


def test_the_conv_of_transformers_in_bf16_rounds_before_silu(modeling):
    """Why its convolution is no backend here: in bf16 the sum is rounded once more, which no variant declares."""
    x, weight = normal(1, CHANNELS, seed=4).bfloat16(), normal(CHANNELS, W, seed=5).bfloat16()
    history = normal(CHANNELS, W - 1, seed=6).bfloat16()
    outputs, _ = conv_over_path(modeling, history, x, weight)
    total = (torch.cat([history, x.T], 1).double() * weight.double()).sum(1)
    assert torch.equal(outputs[0], F.silu(total.bfloat16()))
    assert not torch.equal(outputs[0], (total * torch.sigmoid(total)).bfloat16())


def attention_tables(modeling, head_dim, rotary, positions):
    """cos, sin fp32 `[positions, rotary / 2]` of the family's own rotary embedding, and its full-width ones."""
    family = modeling.__name__.split(".")[-2]
    package = importlib.import_module(f"transformers.models.{family}")
    config_class = package.Qwen3_5TextConfig if family == "qwen3_5" else package.Qwen3NextConfig
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotary / head_dim}
    config = config_class(head_dim=head_dim, rope_parameters=rope, num_hidden_layers=1, hidden_size=32)
    name = "Qwen3_5TextRotaryEmbedding" if family == "qwen3_5" else "Qwen3NextRotaryEmbedding"
    ids = torch.arange(positions)[None]
    if family == "qwen3_5":  # time, height and width positions, equal for text
        ids = ids.expand(3, 1, -1)
    cos, sin = getattr(modeling, name)(config)(torch.zeros(1), ids)
    assert cos.shape == (1, positions, rotary)
    return cos, sin


def test_attention_oracle_agrees_in_float64(modeling):
    q_heads, kv_heads, dim, rotary, prefix = 4, 2, 24, 8, TREE.prefix_len
    cos, sin = attention_tables(modeling, dim, rotary, 16)
    q, k, v = (normal(TREE.n, h, dim, seed=s).bfloat16() for s, h in enumerate((q_heads, kv_heads, kv_heads)))
    K, V = (normal(prefix, kv_heads, dim, seed=s).bfloat16() for s in (7, 8))
    truth = attention_oracle(TREE, AttentionOps(q, k, v, cos[0, :, : rotary // 2], sin[0, :, : rotary // 2]), K, V)
    module = torch.nn.Module()
    module.num_key_value_groups = q_heads // kv_heads
    worst = 0.0
    for i, row in enumerate(truth.rows):
        rows = list(TREE.path(row))
        at = TREE.position[rows]
        turned_q, turned_k = modeling.apply_rotary_pos_emb(
            q[rows].double().transpose(0, 1)[None], k[rows].double().transpose(0, 1)[None],
            cos[:, at].double(), sin[:, at].double(),
        )  # fmt: skip
        assert ((turned_k[0, :, -1].bfloat16().double() - truth.keys[i]).abs() <= truth.keys_bound[i]).all()
        keys = torch.cat([K.double().transpose(0, 1)[None], turned_k.bfloat16().double()], 2)
        values = torch.cat([V, v[rows]]).double().transpose(0, 1)[None]
        with InFloat64():
            out, _ = modeling.eager_attention_forward(
                module.eval(), turned_q[:, :, -1:].bfloat16().double(), keys, values, None, scaling=dim**-0.5
            )
        worst = max(worst, float((out[0, 0] - truth.out[i]).abs().max()))
        # Scores: dk products of size up to |q||k|; softmax and the weighted sum: a few roundings a key.
        reach = float(q[row].double().norm(dim=-1).max() * keys.norm(dim=-1).max()) * dim**-0.5
        tolerance = (2 * (dim + 4) * reach + 4 * len(values[0, 0]) + 16) * U64 * float(values.abs().max())
        assert (out[0, 0] - truth.out[i]).abs().max() <= tolerance
    print(f"\n{modeling.__name__}: attention with RoPE in float64, worst difference {worst:.3g}")


@pytest.mark.parametrize("modeling", ["qwen3_5"], indirect=True)
def test_a_whole_gdn_layer_agrees_in_float64(modeling):
    """Prefill (chunk rule), then single tokens (recurrent rule), against oracle convolution and recurrence.

    Only projections and the gated norm come from the layer, so this also fixes the order of q, k, v, the head map and
    what the cache holds.
    """
    from transformers import DynamicCache
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        hidden_size=32, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=HK,
        linear_num_value_heads=HV, linear_key_head_dim=DK, linear_value_head_dim=DV, linear_conv_kernel_dim=W,
    )  # fmt: skip
    torch.manual_seed(11)
    layer = modeling.Qwen3_5GatedDeltaNet(config, 0).double().eval()
    hidden, prefill = normal(1, 6, 32, seed=12).double(), 3
    cache = DynamicCache(config=config)
    keyword = "cache" if "cache" in inspect.signature(layer.forward).parameters else "cache_params"
    with torch.no_grad(), InFloat64():
        outputs = [layer(hidden[:, :prefill], **{keyword: cache})]
        outputs += [layer(hidden[:, i : i + 1], **{keyword: cache}) for i in range(prefill, hidden.shape[1])]
        got = torch.cat(outputs, 1)[0]

        x = hidden[0]
        chain = Tree.make(list(range(-1, len(x) - 1)))
        mixed, weight = layer.in_proj_qkv(x), layer.conv1d.weight.squeeze(1)
        conv = conv_oracle(chain, torch.zeros(mixed.shape[1], W - 1), ConvOps(mixed, weight), Contract()).out
        q, k, v = conv.split([HK * DK, HK * DK, HV * DV], dim=-1)
        ops = GdnOps(
            q.reshape(-1, HK, DK), k.reshape(-1, HK, DK), v.reshape(-1, HV, DV), layer.in_proj_a(x),
            layer.in_proj_b(x), layer.A_log, layer.dt_bias,
        )  # fmt: skip
        truth = list(gdn_oracle(chain, torch.zeros(HV, DV, DK), ops, Contract()))
        core = layer.norm(torch.cat([t.out for t in truth]), layer.in_proj_z(x).reshape(-1, DV))
        want = layer.out_proj(core.reshape(len(x), -1))
    state = cache.layers[0].recurrent_states[0][0].mT
    window = cache.layers[0].conv_states[0][0]
    print(f"\n{modeling.__name__}: layer in float64, output differs by {(got - want).abs().max():.3g}, "
          f"state by {(state - truth[-1].state).abs().max():.3g}, conv window is {tuple(window.shape)}")  # fmt: skip
    # The chunk rule solves a triangular system of the prefill's rows; everything else is a handful of dot products.
    tolerance = len(x) * (2 * DK + 2 * DV + 32) * U64
    assert (state - truth[-1].state).abs().max() <= tolerance * truth[-1].state.abs().max()
    assert (got - want).abs().max() <= 4 * tolerance * want.abs().max()
    # Not bitwise: a linear layer's bits depend on how many rows it is given at once.
    assert torch.allclose(window[:, -(W - 1) :], mixed[1 - W :].mT, rtol=0, atol=64 * U64 * float(mixed.abs().max()))
