"""The whole model: trees, chains, chunked prefill and one-token steps give a token the same bits, on every surface."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lumotree.backends.bank import BankBackend
from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import Accepted, Batch, Limits
from lumotree.backends.reference import ReferenceBackend
from lumotree.backends.torch_backend import TorchBackend
from lumotree.errors import ContractError
from lumotree.invariant import same_bits
from lumotree.model import HybridModel
from lumotree.model_config import FULL, LINEAR, ModelConfig
from lumotree.model_types import Forward
from lumotree.random_weights import random_weights
from lumotree.state import Pools
from lumotree.tree import Tree
from lumotree.tree_named import chain, hydra27, star

TINY = ModelConfig(
    vocab=50, hidden=40, intermediate=56, layer_kinds=(LINEAR, FULL, LINEAR), hk=2, hv=4, dk=8, dv=12,
    q_heads=4, kv_heads=2, head_dim=16, rotary_dim=4, mtp_layers=1, positions=128,
)  # fmt: skip
PAGE, PAGES, REQUESTS = 8, 12, 3
ROOM = PAGE * PAGES
BACKENDS = [TorchBackend, BankBackend, ReferenceBackend]


@pytest.fixture(scope="module")
def model() -> HybridModel:
    return HybridModel(TINY, random_weights(TINY))


def tokens_of(seed: int, count: int) -> Tensor:
    return torch.randint(0, TINY.vocab, (count,), generator=torch.Generator().manual_seed(seed))


def batch_of(trees: list[Tree | None], prefixes: list[int]) -> Batch:
    """Request i has committed slots i * ROOM ..; candidates lie behind all requests' committed slots."""
    placed: list[Tree | None] = []
    for i, (tree, prefix) in enumerate(zip(trees, prefixes, strict=True)):
        slots = [(REQUESTS + i) * ROOM + r for r in range(tree.n)] if tree is not None else []
        placed.append(
            None if tree is None else Tree.make(tree.parents, active=tree.active, prefix_len=prefix, slots=slots)
        )
    table = torch.arange(REQUESTS * PAGES).view(REQUESTS, PAGES)[: len(trees)]
    slots = [-1 if t is None else i for i, t in enumerate(trees)]
    return build_batch(placed, state_slots=slots, page_table=table, page_size=PAGE)


def step_batch(positions: list[int]) -> Batch:
    trees = [Tree.make([-1], prefix_len=p, slots=[i * ROOM + p]) for i, p in enumerate(positions)]
    table = torch.arange(REQUESTS * PAGES).view(REQUESTS, PAGES)[: len(trees)]
    return build_batch(trees, state_slots=list(range(len(trees))), page_table=table, page_size=PAGE)


@dataclass
class Session:
    """A model with a backend and its pools."""

    model: HybridModel
    backend: object
    pools: Pools
    ws: object

    @staticmethod
    def make(model: HybridModel, backend: object) -> Session:
        pools = model.empty_pools(backend.contract, REQUESTS, 2 * REQUESTS * ROOM)  # type: ignore[attr-defined]
        return Session(model, backend, pools, model.allocate(backend, Limits(REQUESTS, 128, 64, REQUESTS, 1)))

    def verify(self, tokens: Tensor, batch: Batch) -> Forward:
        return self.model.verify(tokens, batch, self.pools, self.ws, self.backend)

    def publish(self, batch: Batch, accepted: Accepted) -> None:
        self.model.publish(batch, accepted, self.pools, self.ws, self.backend)

    def prefill(self, tokens: Tensor, chunk: int) -> list[Tensor]:
        """Request 0 alone, in chains; returns the logits of every row."""
        logits = []
        for at in range(0, len(tokens), chunk):
            part = tokens[at : at + chunk]
            batch = batch_of([chain(len(part))], [at])
            logits += [*self.verify(part, batch).logits]
            self.publish(batch, accepted_paths([range(len(part))]))
        return logits

    def decode(self, tokens: Tensor, start: int = 0) -> list[Tensor]:
        """Request 0 alone, token by token, through the backend's native step."""
        return [
            self.model.step(t[None], step_batch([start + i]), self.pools, self.backend).logits[0]
            for i, t in enumerate(tokens)
        ]

    def surfaces(self, tokens: int) -> dict[str, Tensor]:
        """What request 0 has committed."""
        p = self.pools
        return {"R": p.recurrent[:, 0], "C": p.conv[:, 0], "K": p.cache.k[:, :tokens], "V": p.cache.v[:, :tokens]}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert {name for name in a if not same_bits(a[name], b[name])} == set()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 5, 13])
def test_chunked_prefill_is_one_token_decoding(model: HybridModel, backend: type, chunk: int) -> None:
    tokens = tokens_of(1, 13)
    one, other = Session.make(model, backend()), Session.make(model, backend())
    for expected, got in zip(one.decode(tokens), other.prefill(tokens, chunk), strict=True):
        assert same_bits(expected, got)
    assert_same(one.surfaces(13), other.surfaces(13))


def test_a_product_that_depends_on_the_number_of_rows_is_seen(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the order of a sum changes with the number of rows, as in a library's own product.

    Logits are fp32 and show it; between layers, rounding to bf16 hides such a change in all but a few of 10,000 values.
    """

    def by_rows(x: Tensor, weight: Tensor) -> Tensor:
        total = torch.zeros(len(x), len(weight))
        for k in range(x.shape[1])[:: 1 if len(x) == 1 else -1]:
            total = total + x[:, k, None] * weight[:, k]
        return total

    monkeypatch.setattr("lumotree.layers.multiply", by_rows)
    tokens = tokens_of(1, 13)
    one, other = Session.make(model, TorchBackend()), Session.make(model, TorchBackend())
    pairs = list(zip(one.decode(tokens), other.prefill(tokens, 13), strict=True))
    assert not all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_of_a_tree_is_its_own_path_decoded(model: HybridModel, backend: type) -> None:
    tree, prompt = hydra27(), tokens_of(2, 7)
    tree_tokens = tokens_of(3, tree.n)
    session = Session.make(model, backend())
    session.prefill(prompt, 7)
    forward = session.verify(tree_tokens, batch_of([tree], [7]))
    for row in (0, 4, 14, 22, 31):
        path = tree.ancestors[row].nonzero()[0].tolist()
        plain = Session.make(model, backend())
        plain.prefill(prompt, 7)
        assert same_bits(plain.decode(tree_tokens[path], 7)[-1], forward.logits[row]), row
        batch = batch_of([tree], [7])
        other = Session.make(model, backend())
        other.prefill(prompt, 7)
        other.verify(tree_tokens, batch)
        other.publish(batch, accepted_paths([path]))
        assert_same(plain.surfaces(7 + len(path)), other.surfaces(7 + len(path)))


def test_a_batch_is_its_solo_runs(model: HybridModel) -> None:
    trees: list[Tree | None] = [hydra27(), None, star(5)]
    tokens = [tokens_of(10 + i, 0 if t is None else t.n) for i, t in enumerate(trees)]
    session = Session.make(model, TorchBackend())
    together = session.verify(torch.cat(tokens), batch_of(trees, [0, 0, 0]))
    solo = Session.make(model, TorchBackend())
    first = solo.verify(tokens[0], batch_of([trees[0]], [0]))
    alone = solo.verify(tokens[2], batch_of([trees[2]], [0]))
    active = torch.from_numpy(hydra27().active.copy())
    assert same_bits(together.logits[:32][active], first.logits[active])
    assert same_bits(together.logits[32:], alone.logits)
    assert same_bits(together.hidden[32:], alone.hidden)


def test_inactive_rows_may_hold_anything(model: HybridModel) -> None:
    tree = hydra27()
    tokens = tokens_of(4, tree.n)
    active = torch.from_numpy(tree.active.copy())
    noisy = torch.where(active, tokens, torch.tensor(-7))
    logits = [Session.make(model, TorchBackend()).verify(t, batch_of([tree], [0])).logits for t in (tokens, noisy)]
    assert same_bits(logits[0][active], logits[1][active])


def test_verification_leaves_the_committed_state_alone(model: HybridModel) -> None:
    session = Session.make(model, TorchBackend())
    session.prefill(tokens_of(5, 9), 9)
    before = {name: value.clone() for name, value in session.surfaces(9).items()}
    session.verify(tokens_of(6, 32), batch_of([hydra27()], [9]))
    assert_same(before, session.surfaces(9))


@pytest.mark.parametrize(("value", "named"), [(-1, "token=-1"), (50, "token=50")])
def test_a_token_outside_the_vocabulary(model: HybridModel, value: int, named: str) -> None:
    tokens = tokens_of(7, 6)
    tokens[3] = value
    session = Session.make(model, TorchBackend())
    with pytest.raises(ContractError, match=rf"row 3: {named}; allowed: 0\.\.49"):
        session.verify(tokens, batch_of([chain(6)], [0]))
    with pytest.raises(ContractError, match=rf"row 0: {named}"):
        session.model.step(tokens[3:4], step_batch([0]), session.pools, session.backend)


def test_other_refusals(model: HybridModel) -> None:
    session, batch = Session.make(model, TorchBackend()), batch_of([chain(6)], [0])
    with pytest.raises(ContractError, match=r"expected int64 \[6\]"):
        session.verify(tokens_of(1, 5), batch)
    with pytest.raises(ContractError, match="expected one row a request"):
        model.step(tokens_of(1, 6), batch, session.pools, session.backend)
    short = HybridModel(replace(TINY, positions=4), random_weights(TINY))
    with pytest.raises(ContractError, match=r"row 4: position=4; allowed: 0\.\.3"):
        short.verify(tokens_of(1, 6), batch, session.pools, session.ws, session.backend)
    full = replace(TINY, dtype=torch.float32)
    fp32 = HybridModel(full, random_weights(full))
    with pytest.raises(ContractError, match=r"conv_verify x: expected torch\.bfloat16, got dtype=torch\.float32"):
        Session.make(fp32, TorchBackend()).verify(tokens_of(1, 6), batch)
    headless = replace(TINY, mtp_layers=0)
    with pytest.raises(ContractError, match="this model has none"):
        HybridModel(headless, random_weights(headless)).draft_head()
