"""Every layer kind: a row has the same bits alone and in any company; the stock calls and broken products do not.

The property is drawn by hypothesis: number of rows, order, and noise rows between them that hold anything. Rounding to
bf16 hides most changes of a last bit in fp32, so what a layer computes inside is also looked at before it rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lumotree import layers
from lumotree.backends.batch import build_batch
from lumotree.backends.protocol import Limits
from lumotree.backends.torch_backend import TorchBackend
from lumotree.invariant import CPU_SIZES, in_tiles, multiply, padded_product, probe_sizes, same_bits
from lumotree.layers import GatedRmsNorm, Linear, Mlp, RmsNorm
from lumotree.mixers import VerifySurfaces
from lumotree.model import HybridModel
from lumotree.model_config import FULL, LINEAR, ModelConfig
from lumotree.random_weights import random_weights
from lumotree.tree import Tree

Layer = Callable[[Tensor], Tensor]
HIDDEN = 60
CONFIG = ModelConfig(
    vocab=50, hidden=HIDDEN, intermediate=72, layer_kinds=(LINEAR, FULL), hk=2, hv=4, dk=8, dv=12,
    q_heads=4, kv_heads=2, head_dim=16, rotary_dim=4, mtp_layers=1, positions=128,
)  # fmt: skip
NOISE = (0.0, 1e30, -3e38, float("inf"), float("nan"), 1e-40)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).to(torch.bfloat16)


def in_one_batch(count: int) -> VerifySurfaces:
    """Every row a request of its own, with an empty prefix: what a mixer does to rows must not depend on the others."""
    trees = [Tree.make([-1], slots=[i]) for i in range(count)]
    table = torch.arange(count).view(count, 1)
    batch = build_batch(trees, state_slots=list(range(count)), page_table=table, page_size=1)
    model, backend = MODEL, TorchBackend()
    pools = model.empty_pools(backend.contract, count, count)
    return VerifySurfaces(backend, pools, batch, model.allocate(backend, Limits(count, count, 1, count, 1)))


def mixer(index: int) -> Layer:
    return lambda x: MODEL.blocks[index](x, in_one_batch(len(x)))


def gated(x: Tensor) -> Tensor:
    heads = x.view(len(x), 4, 15)
    return GatedRmsNorm(1 + 0.1 * bf16(15, seed=3), 1e-6)(heads, heads.flip(1)).flatten(1)


def joined(x: Tensor) -> Tensor:
    return torch.cat(Linear.make([bf16(9, HIDDEN, seed=4), bf16(70, HIDDEN, seed=5)])(x), 1)


MODEL = HybridModel(CONFIG, random_weights(CONFIG))
LAYERS: dict[str, Layer] = {
    "product": Linear.make([bf16(300, HIDDEN, seed=1)]).raw,
    "projections": joined,
    "norm": RmsNorm.make(0.1 * bf16(HIDDEN, seed=2), 1e-6),
    "head norm": lambda x: RmsNorm.make(0.1 * bf16(15), 1e-6)(x.view(len(x), 4, 15)).flatten(1),
    "gated norm": gated,
    "head norm before rounding": lambda x: layers.unit_rms(x.view(len(x), 4, 15), 1e-6).flatten(1),
    "sigmoid before rounding": lambda x: layers.sigmoid(layers.wide(x)),
    "silu before rounding": lambda x: layers.silu(layers.wide(x)),
    "sigmoid gate": lambda x: layers.gated(x, x.flip(1), "sigmoid"),
    "silu gate": lambda x: layers.gated(x, x.flip(1), "silu"),
    "mlp": MODEL.blocks[0].mlp,
    "gdn layer": mixer(0),
    "attention layer": mixer(1),
}


def violation(layer: Layer, x: Tensor, order: list[int], noise: Tensor) -> str | None:
    """None, or what changed: the rows of x, permuted and each followed by noise rows, against each row alone."""
    alone = torch.cat([layer(row[None]) for row in x])
    if not same_bits(layer(x), alone):
        return "together"
    if not same_bits(layer(x[order]), alone[order]):
        return "in another order"
    spread = torch.cat([torch.cat([x[i : i + 1], noise]) for i in order])
    if not same_bits(layer(spread)[:: 1 + len(noise)], alone[order]):
        return "beside noise"
    return None


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), seed=st.integers(0, 9), noise=st.lists(st.sampled_from(NOISE), max_size=2))
def test_a_row_has_the_same_bits_in_any_company(name: str, rows: int, seed: int, noise: list[float]) -> None:
    x = bf16(rows, HIDDEN, seed=seed)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    loud = torch.tensor(noise).view(-1, 1).expand(-1, HIDDEN).to(torch.bfloat16)
    assert violation(LAYERS[name], x, order, loud) is None


def by_count(x: Tensor, weight: Tensor) -> Tensor:
    """A sum whose order depends on the number of rows."""
    total = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1])[:: 1 if len(x) < 4 else -1]:
        total = total + layers.wide(x[:, k, None]) * layers.wide(weight[:, k])
    return total


def by_place(x: Tensor, weight: Tensor) -> Tensor:
    """A sum whose order depends on where a row stands."""
    return torch.cat([by_count(row.expand(1 if i % 2 else 4, -1), weight)[:1] for i, row in enumerate(x)])


def by_neighbour(x: Tensor, weight: Tensor) -> Tensor:
    """Rows share a scale, as in a tile that is quantised together."""
    scale = layers.wide(x).abs().amax().clamp(1e-6, 1e6)
    return F.linear(layers.wide(x) / scale, layers.wide(weight)) * scale


@pytest.mark.parametrize("product", [by_count, by_place, by_neighbour])
def test_the_property_sees_products_that_lack_it(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, weight = bf16(12, HIDDEN), bf16(30, HIDDEN, seed=1)
    loud = torch.full((1, HIDDEN), 3.0, dtype=torch.bfloat16)
    assert violation(lambda rows: product(rows, weight), x, list(range(12))[::-1], loud) is not None


def test_the_stock_product_changes_bits_with_the_number_of_rows() -> None:
    """Some shape must show it, or else the probe must have found all its tile sizes to agree on all these shapes."""
    changed, agreeing = [], []
    for k, n in ((60, 36), (256, 8), (256, 1024), (704, 256), (1024, 64)):
        x, weight = normal(32, k), normal(n, k, seed=1)
        alone = torch.cat([F.linear(row[None], weight) for row in x])
        changed += [
            (k, n, rows) for rows in (2, 5, 8, 16, 32) if not same_bits(F.linear(x[:rows], weight), alone[:rows])
        ]
        agreeing.append(probe_sizes(padded_product, CPU_SIZES, (n, k), torch.float32, torch.device("cpu")) == CPU_SIZES)
        assert same_bits(multiply(x, weight), torch.cat([multiply(row[None], weight) for row in x]))
    assert changed or all(agreeing)


def stock_changes() -> set[str]:
    """Stock calls whose rows change on this machine with the company they are in."""
    changed = set()
    for width in (7, 12, 60, 100):
        x = 3 * normal(33, width)
        for name, call in (("sigmoid", torch.sigmoid), ("silu", F.silu), ("softplus", F.softplus)):
            if not same_bits(call(x), torch.stack([call(row.clone()) for row in x])):
                changed.add(name)
    q, k, v = (normal(1, 2, 33, 64, seed=i) for i in range(3))
    masked = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for row in range(33):
        seen = slice(0, row + 1)
        gathered = F.scaled_dot_product_attention(q[:, :, row : row + 1], k[:, :, seen], v[:, :, seen])
        if not same_bits(masked[:, :, row], gathered[:, :, 0]):
            changed.add("attention")
    return changed


def test_other_stock_calls_change_bits_too() -> None:
    """Which of them do is the machine's business; that none does would make the property above an empty one."""
    assert stock_changes()


# The probe


def tiled(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, int], Tensor]:
    def run(x: Tensor, weight: Tensor, size: int) -> Tensor:
        tile = x.new_zeros((size, x.shape[1]))
        tile[: len(x)] = x
        return product(tile, weight)[: len(x)]

    return run


def probe(product: Callable[[Tensor, Tensor, int], Tensor], sizes: tuple[int, ...]) -> tuple[int, ...]:
    return probe_sizes(product, sizes, (30, HIDDEN), torch.float32, torch.device("cpu"))


def test_the_probe_keeps_sizes_that_agree_and_refuses_the_rest() -> None:
    exact = tiled(lambda x, w: (x[:, None] * w).sum(-1))
    assert probe(exact, (2, 8, 16)) == (2, 8, 16)
    assert probe(tiled(by_count), (2, 8, 16)) == (8, 16)
    assert probe(tiled(by_place), (8, 16)) == (1,)
    assert probe(tiled(by_neighbour), (8, 16)) == (1,)


def test_the_probe_looks_at_every_place_and_at_loud_neighbours() -> None:
    """Products that are wrong at one place only, or only beside an infinity."""

    def one_place(x: Tensor, weight: Tensor) -> Tensor:
        whole = by_count(x, weight)
        whole[6] = by_count(x[6:7], weight)[0]
        return whole

    def leaking(x: Tensor, weight: Tensor) -> Tensor:
        return by_count(x, weight) + 0 * x.sum()

    assert probe(tiled(by_count), (16,)) == (16,)
    assert probe(tiled(one_place), (16,)) == (1,)
    assert all(probe(tiled(leaking), (size,)) == (1,) for size in (4, 12, 16))


def test_rows_one_at_a_time_are_right_whatever_the_product() -> None:
    x, weight = normal(9, HIDDEN), normal(30, HIDDEN, seed=1)
    alone = torch.cat([tiled(by_place)(row[None], weight, 1) for row in x])
    assert same_bits(in_tiles(tiled(by_place), x, weight, (1,)), alone)


def test_tiles_cover_every_number_of_rows() -> None:
    weight, asked = normal(5, HIDDEN), []

    def product(x: Tensor, w: Tensor, size: int) -> Tensor:
        asked.append((len(x), size))
        return padded_product(x, w, size)

    for rows in (0, 1, 8, 9, 32, 33, 70):
        x = normal(rows, HIDDEN, seed=rows)
        torch.testing.assert_close(in_tiles(product, x, weight, (8, 32)), F.linear(x, weight))
    assert asked == [(1, 8), (8, 8), (9, 32), (32, 32), (32, 32), (1, 8), (32, 32), (32, 32), (6, 8)]


# What the layers compute


def test_norms_against_their_formulas_in_float64() -> None:
    x, gate, weight = (normal(*s, seed=i).double() for i, s in enumerate(((7, 4, 15), (7, 4, 15), (15,))))
    unit = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(RmsNorm.make(weight, 1e-5)(x), unit * (1 + weight), rtol=1e-14, atol=1e-14)
    wanted = unit * weight * F.silu(gate)
    torch.testing.assert_close(GatedRmsNorm(weight, 1e-5)(x, gate), wanted, rtol=1e-14, atol=1e-14)


def test_projections_keep_order_and_dtype() -> None:
    x, parts = bf16(5, HIDDEN), [bf16(n, HIDDEN, seed=n) for n in (3, 8, 1)]
    for got, weight in zip(Linear.make(parts)(x), parts, strict=True):
        assert got.dtype == torch.bfloat16 and got.is_contiguous()
        wanted = (x.double() @ weight.double().t()).to(torch.bfloat16)
        torch.testing.assert_close(got, wanted, rtol=2**-8, atol=2**-20)
    weights = {f"mlp.{n}_proj.weight": bf16(9, HIDDEN, seed=i).double() for i, n in enumerate(("gate", "up"))}
    weights["mlp.down_proj.weight"] = bf16(HIDDEN, 9, seed=9).double()
    y, (gate, up, down) = x.double(), weights.values()
    wanted = (F.silu(y @ gate.t()) * (y @ up.t())) @ down.t()
    torch.testing.assert_close(Mlp.make(weights, "mlp.")(y), wanted, rtol=1e-12, atol=1e-12)
