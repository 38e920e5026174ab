"""The draft head: rows of a tree are their own paths in any batch, and only their slots are written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lumotree.backends.batch import build_batch
from lumotree.backends.protocol import Batch
from lumotree.backends.reference import ReferenceBackend
from lumotree.backends.torch_backend import TorchBackend
from lumotree.errors import ContractError
from lumotree.invariant import same_bits
from lumotree.model import HybridModel
from lumotree.model_config import FULL, LINEAR, ModelConfig
from lumotree.mtp import MtpHead
from lumotree.random_weights import random_weights
from lumotree.state import KVCache
from lumotree.tree import Tree
from lumotree.tree_named import chain, hydra27

TINY = ModelConfig(
    vocab=50, hidden=40, intermediate=56, layer_kinds=(LINEAR, FULL), hk=2, hv=4, dk=8, dv=12,
    q_heads=4, kv_heads=2, head_dim=16, rotary_dim=4, mtp_layers=1, positions=64,
)  # fmt: skip
PAGE, PAGES, ROOM = 8, 4, 32


@pytest.fixture(scope="module", params=[TorchBackend, ReferenceBackend])
def head(request: pytest.FixtureRequest) -> MtpHead:
    return HybridModel(TINY, random_weights(TINY)).draft_head(request.param())


def rows_of(count: int, seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (count,), generator=gen), torch.randn((count, 40), generator=gen).to(torch.bfloat16)


def batch_of(trees: list[Tree], prefixes: list[int]) -> Batch:
    """Request i commits to slots 32 i ..; candidates lie behind those of both requests."""
    placed = [
        Tree.make(t.parents, active=t.active, prefix_len=p, slots=[(2 + i) * ROOM + r for r in range(t.n)])
        for i, (t, p) in enumerate(zip(trees, prefixes, strict=True))
    ]
    table = torch.arange(2 * PAGES).view(2, PAGES)[: len(trees)]
    return build_batch(placed, state_slots=list(range(len(trees))), page_table=table, page_size=PAGE)


def committed(head: MtpHead, count: int, seed: int) -> KVCache:
    """A cache whose first `count` entries request 0 has committed, one at a time."""
    cache = head.empty_cache(4 * ROOM)
    for i, (token, hidden) in enumerate(zip(*rows_of(count, seed), strict=True)):
        tree = Tree.make([-1], prefix_len=i, slots=[i])
        batch = build_batch([tree], state_slots=[0], page_table=torch.arange(PAGES)[None], page_size=PAGE)
        head.forward(token[None], hidden[None], batch, cache)
    return cache


def test_a_tree_is_its_paths(head: MtpHead) -> None:
    tree = hydra27()
    tokens, hidden = rows_of(tree.n, 1)
    cache = committed(head, 5, 2)
    before = cache.k.clone()
    out = head.forward(tokens, hidden, batch_of([tree], [5]), cache)
    assert same_bits(cache.k[:, : 2 * ROOM], before[:, : 2 * ROOM])
    for row in (0, 9, 22, 31):
        path = tree.ancestors[row].nonzero()[0]
        alone = head.forward(tokens[path], hidden[path], batch_of([chain(len(path))], [5]), committed(head, 5, 2))
        assert same_bits(alone.logits[-1], out.logits[row]), row
        assert same_bits(alone.hidden[-1], out.hidden[row]), row


def test_a_prefix_in_one_chain_is_the_prefix_one_by_one(head: MtpHead) -> None:
    tokens, hidden = rows_of(9, 3)
    cache = head.empty_cache(4 * ROOM)
    tree = Tree.make(chain(9).parents, slots=range(9))
    batch = build_batch([tree], state_slots=[0], page_table=torch.arange(PAGES)[None], page_size=PAGE)
    head.forward(tokens, hidden, batch, cache)
    other = committed(head, 9, 3)
    assert same_bits(cache.k, other.k)
    assert same_bits(cache.v, other.v)


def test_two_requests_are_two_solo_runs(head: MtpHead) -> None:
    (a, ha), (b, hb) = rows_of(6, 4), rows_of(4, 5)
    trees = [chain(6), Tree.make([-1, 0, 0, 1])]
    both = head.forward(torch.cat([a, b]), torch.cat([ha, hb]), batch_of(trees, [0, 0]), head.empty_cache(4 * ROOM))
    for tree, tokens, hidden, part in ((trees[0], a, ha, slice(0, 6)), (trees[1], b, hb, slice(6, 10))):
        solo = head.forward(tokens, hidden, batch_of([tree], [0]), head.empty_cache(4 * ROOM))
        assert same_bits(solo.logits, both.logits[part])


def test_refusals(head: MtpHead) -> None:
    tokens, hidden = rows_of(3, 6)
    batch, cache = batch_of([chain(3)], [0]), head.empty_cache(4 * ROOM)
    for wrong in (hidden[:2], hidden.float(), hidden[:, :39]):
        with pytest.raises(ContractError, match=r"expected hidden torch\.bfloat16 \[3, 40\]"):
            head.forward(tokens, wrong, batch, cache)
    with pytest.raises(ContractError, match="row 1: token=50"):
        head.forward(torch.tensor([1, 50, 2]), hidden, batch, cache)
    with pytest.raises(ContractError, match="row 2: position=64"):
        far = Tree.make(chain(3).parents, prefix_len=62, slots=range(3))
        table = torch.arange(9)[None]
        head.forward(tokens, hidden, build_batch([far], state_slots=[0], page_table=table, page_size=PAGE), cache)
