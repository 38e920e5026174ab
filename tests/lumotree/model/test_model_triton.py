"""The model over the Triton backend: on a GPU with the layers' own kernels, elsewhere under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import Batch, Limits
from lumotree.backends.torch_backend import TorchBackend
from lumotree.backends.triton_backend import TritonBackend
from lumotree.invariant import multiply, same_bits
from lumotree.model import HybridModel
from lumotree.model_config import FULL, LINEAR, ModelConfig
from lumotree.random_weights import random_weights
from lumotree.state import Pools
from lumotree.tree import Tree
from lumotree.tree_named import chain, hydra27

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
#: Under the interpreter a row costs milliseconds, so that shape and tree are small there.
CONFIG = ModelConfig(
    vocab=300, hidden=256, intermediate=448, layer_kinds=(LINEAR, LINEAR, FULL), hk=2, hv=8, dk=64, dv=32, q_heads=4,
    kv_heads=2, head_dim=64, rotary_dim=16, mtp_layers=1, positions=128,
) if GPU else ModelConfig(
    vocab=30, hidden=24, intermediate=32, layer_kinds=(LINEAR, FULL), hk=1, hv=2, dk=8, dv=4, q_heads=2, kv_heads=1,
    head_dim=16, rotary_dim=4, mtp_layers=1, positions=64,
)  # fmt: skip
TREE = hydra27() if GPU else Tree.make([-1, 0, 0, 1, 1, 3], active=[True] * 4 + [False] + [True])
PATH = [0, 1, 4, 9, 14] if GPU else [0, 1, 3, 5]
PREFIX, PAGE, PAGES = (40 if GPU else 3), 8, 8
ROOM = PAGE * PAGES


@pytest.fixture(scope="module")
def model() -> HybridModel:
    return HybridModel(CONFIG, random_weights(CONFIG), DEVICE)


def tokens_of(count: int, seed: int) -> Tensor:
    return torch.randint(0, CONFIG.vocab, (count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def batch_of(tree: Tree, prefix: int, committed: bool = False) -> Batch:
    first = prefix if committed else ROOM
    tree = Tree.make(tree.parents, active=tree.active, prefix_len=prefix, slots=range(first, first + tree.n))
    table = torch.arange(PAGES)[None]
    return build_batch([tree], state_slots=[0], page_table=table, page_size=PAGE, device=DEVICE)


class Session:
    """One request on fresh pools."""

    def __init__(self, model: HybridModel) -> None:
        self.model, self.backend = model, TritonBackend()
        self.pools: Pools = model.empty_pools(self.backend.contract, 1, 2 * ROOM)
        self.ws = model.allocate(self.backend, Limits(1, 64, 64, 1, 1))

    def verify(self, tokens: Tensor, batch: Batch) -> Tensor:
        return self.model.verify(tokens, batch, self.pools, self.ws, self.backend).logits

    def publish(self, batch: Batch, path: list[int]) -> None:
        accepted = accepted_paths([path], DEVICE)
        self.model.publish(batch, accepted, self.pools, self.ws, self.backend)

    def prefill(self, tokens: Tensor, chunk: int) -> Tensor:
        logits = []
        for at in range(0, len(tokens), chunk):
            part = tokens[at : at + chunk]
            batch = batch_of(chain(len(part)), at)
            logits.append(self.verify(part, batch))
            self.publish(batch, list(range(len(part))))
        return torch.cat(logits)

    def decode(self, tokens: Tensor, start: int) -> Tensor:
        steps = [
            self.model.step(t[None], batch_of(chain(1), start + i, committed=True), self.pools, self.backend).logits
            for i, t in enumerate(tokens)
        ]
        return torch.cat(steps)

    def surfaces(self, tokens: int) -> list[Tensor]:
        p = self.pools
        return [p.recurrent, p.conv, p.cache.k[:, :tokens], p.cache.v[:, :tokens]]


def test_trees_chunks_and_steps_agree_bit_for_bit(model: HybridModel) -> None:
    prompt, tree_tokens = tokens_of(PREFIX, 1), tokens_of(TREE.n, 2)
    plain, chunked = Session(model), Session(model)
    logits = plain.decode(prompt, 0)
    assert same_bits(logits, chunked.prefill(prompt, max(2, PREFIX // 3)))
    assert all(same_bits(a, b) for a, b in zip(plain.surfaces(PREFIX), chunked.surfaces(PREFIX), strict=True))
    batch = batch_of(TREE, PREFIX)
    verified = chunked.verify(tree_tokens, batch)
    along = plain.decode(tree_tokens[PATH], PREFIX)
    assert same_bits(verified[PATH], along)
    chunked.publish(batch, PATH)
    after = PREFIX + len(PATH)
    assert all(same_bits(a, b) for a, b in zip(plain.surfaces(after), chunked.surfaces(after), strict=True))


def test_logits_are_those_of_the_torch_backend_up_to_rounding(model: HybridModel) -> None:
    """Two sets of kernels round the same tensors at the same places; twelve roundings to bf16 a layer, in each."""
    cpu = HybridModel(CONFIG, random_weights(CONFIG))
    backend = TorchBackend()
    pools, ws = cpu.empty_pools(backend.contract, 1, 2 * ROOM), cpu.allocate(backend, Limits(1, 64, 64, 1, 1))
    tokens = tokens_of(TREE.n, 3)
    batch = build_batch(
        [Tree.make(TREE.parents, active=TREE.active, slots=range(ROOM, ROOM + TREE.n))],
        state_slots=[0], page_table=torch.arange(PAGES)[None], page_size=PAGE,
    )  # fmt: skip
    wanted = cpu.verify(tokens.cpu(), batch, pools, ws, backend).logits[batch.active]
    got = Session(model).verify(tokens, batch_of(TREE, 0)).cpu()[batch.active]
    error = (got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error <= 2 * 12 * len(CONFIG.layer_kinds) * 2.0**-9
    wrong = wanted.roll(1, 0)
    assert (got - wrong).square().mean().sqrt() / wrong.square().mean().sqrt() > 0.5


def test_draft_head(model: HybridModel) -> None:
    head = model.draft_head(TritonBackend())
    tokens, count = tokens_of(TREE.n, 4), len(PATH)
    gen = torch.Generator().manual_seed(5)
    hidden = torch.randn((TREE.n, CONFIG.hidden), generator=gen).to(torch.bfloat16).to(DEVICE)
    tree = head.forward(tokens, hidden, batch_of(TREE, 0), head.empty_cache(2 * ROOM))
    path = head.forward(tokens[PATH], hidden[PATH], batch_of(chain(count), 0), head.empty_cache(2 * ROOM))
    assert same_bits(tree.logits[PATH], path.logits)
    assert same_bits(tree.hidden[PATH], path.hidden)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_the_stock_product_changes_bits_with_the_number_of_rows_on_a_gpu() -> None:
    changed = []
    for k, n in ((256, 300), (448, 256), (1024, 4096), (5120, 5120)):
        gen = torch.Generator().manual_seed(k)
        x, weight = (torch.randn(s, generator=gen).to(torch.bfloat16).to(DEVICE) for s in ((64, k), (n, k)))
        alone = torch.cat([F.linear(row[None], weight) for row in x])
        changed += [(k, n, r) for r in (2, 6, 16, 32, 64) if not same_bits(F.linear(x[:r], weight), alone[:r])]
        for rows in (1, 2, 6, 16, 33, 64):
            assert same_bits(multiply(x[:rows], weight), multiply(x, weight)[:rows])
    assert changed


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_a_captured_verification_replays_its_bits(model: HybridModel) -> None:
    session, tokens = Session(model), tokens_of(TREE.n, 6)
    session.prefill(tokens_of(PREFIX, 1), 20)
    batch = batch_of(TREE, PREFIX)
    eager = session.verify(tokens, batch).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = session.verify(tokens, batch)
    captured.fill_(float("nan"))
    graph.replay()
    assert same_bits(captured[batch.active], eager[batch.active])
