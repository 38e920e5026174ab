"""Every relation holds on the built-in backends and is broken by a defect that breaks it and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.metamorphic import RELATIONS
from lumotree.backends.loader import load_backend
from lumotree.backends.protocol import BackendBase, Batch
from lumotree.backends.reference import ReferenceBackend, RowMath
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.errors import InputError
from lumotree.reference.gdn import gates, gdn_step

SEEDS = range(3)


def up(out: Tensor, rows: Any) -> None:
    """Some rows of an output, a little larger."""
    out[rows] = (out[rows].float() * 1.02 + 0.01).bfloat16()


class VerifyDiffers(TorchBackend):
    """Verification computes outputs as its own one-token step does not."""

    def gdn_verify(self, ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        super().gdn_verify(ops, pool, batch, ws, out, layer)
        up(out, batch.active)


class SiblingsCounted(TorchBackend):
    """A row that has a sibling is computed another way."""

    def gdn_verify(self, ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        super().gdn_verify(ops, pool, batch, ws, out, layer)
        key = batch.parent + 1000 * batch.row_request
        up(out, ((key[:, None] == key).sum(-1) > 1) & (batch.parent >= 0))


class FirstChild(TorchBackend):
    """A row that is not its parent's first child is computed another way."""

    def conv_verify(self, ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        super().conv_verify(ops, pool, batch, ws, out, layer)
        key = (batch.parent + 1000 * batch.row_request).tolist()
        up(out, [row for row, k in enumerate(key) if k in key[:row]])


class SharedScale(TorchBackend):
    """Values of a batch share a scale that the largest of them sets."""

    def attention_verify(self, ops: Any, cache: Any, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        super().attention_verify(ops, cache, batch, ws, out, layer)
        if float(ops.v.abs().max()) > 30:
            up(out, batch.active)


class Companions(TorchBackend):
    """A batch of several requests takes another kernel."""

    def gdn_verify(self, ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        super().gdn_verify(ops, pool, batch, ws, out, layer)
        if batch.requests > 1:
            up(out, batch.active)


class SlotParity(TorchBackend):
    """The state of an odd slot is read from elsewhere."""

    def gdn_verify(self, ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        super().gdn_verify(ops, pool, batch, ws, out, layer)
        up(out, batch.state_slot[batch.row_request.long()] % 2 == 1)

    def native_step(self, ops: Any, pools: Any, batch: Batch, out: Any, layer: int) -> None:
        super().native_step(ops, pools, batch, out, layer)
        up(out.gdn, batch.state_slot[batch.row_request.long()] % 2 == 1)


class SecondChunk(TorchBackend):
    """The second verification on a workspace computes another way."""

    def allocate(self, *args: Any) -> Any:
        self.calls = 0
        return super().allocate(*args)

    def conv_verify(self, ops: Any, pool: Tensor, batch: Batch, ws: Any, out: Tensor, layer: int) -> None:
        super().conv_verify(ops, pool, batch, ws, out, layer)
        self.calls += 1
        if self.calls > 1:
            up(out, batch.active)


def closed_gate(R: Tensor, row: Any, contract: Contract) -> tuple[Tensor, Tensor]:
    """A gate of exactly 0 is taken for a small one."""
    decay, _ = gates(row, contract)
    return gdn_step(torch.where((decay == 1)[:, None, None], 0.99 * R, R), row, contract)


class OneLayout(TorchBackend):
    """A pool declared [K, V] is read and written as [V, K]; export keeps to the declaration."""

    def _as_vk(self, method: str, *args: Any) -> None:
        declared, self.contract = self.contract, replace(self.contract, layout="VK")
        try:
            getattr(TorchBackend, method)(self, *args)
        finally:
            self.contract = declared

    def gdn_verify(self, *args: Any) -> None:
        self._as_vk("gdn_verify", *args)

    def gdn_publish(self, *args: Any) -> None:
        self._as_vk("gdn_publish", *args)

    def native_step(self, *args: Any) -> None:
        self._as_vk("native_step", *args)


class Consumed(TorchBackend):
    """Publication uses up something outside the workspace: the second one of a verification is another."""

    def gdn_verify(self, *args: Any) -> None:
        super().gdn_verify(*args)
        self.left = 1

    def gdn_publish(self, pool: Tensor, batch: Batch, *rest: Any) -> None:
        super().gdn_publish(pool, batch, *rest)
        if not self.left:
            pool[:, batch.state_slot.long()] *= 1.01
        self.left = 0


BROKEN = {
    "chain": VerifyDiffers(),
    "sibling_added": SiblingsCounted(),
    "siblings_reordered": FirstChild(),
    "non_ancestors": SharedScale(),
    "alone": Companions(),
    "permuted": SlotParity(),
    "chunk_split": SecondChunk(),
    "ungated": ReferenceBackend(math=RowMath(gdn_step=closed_gate)),
    "layouts": OneLayout(),
    "replay_twice": Consumed(),
}


def broken_by(backend: Any) -> set[str]:
    """Names of the relations that a backend breaks on any seed."""
    return {
        name
        for name, relation in RELATIONS.items()
        if not relation.why_not(backend) and any(relation.run(backend, seed) for seed in SEEDS)
    }


def test_every_relation_has_a_defect_that_breaks_it() -> None:
    assert BROKEN.keys() == RELATIONS.keys()


@pytest.mark.parametrize("name", BROKEN)
def test_a_relation_is_broken_by_its_own_defect_alone(name: str) -> None:
    assert broken_by(BROKEN[name]) == {name}


@pytest.mark.parametrize("name", ["torch", "reference", "bank", "split_k", "sqrt_norm", "kv_layout", "wy"])
def test_built_in_backends_keep_every_relation(name: str) -> None:
    backend = load_backend(name)
    assert [r.name for r in RELATIONS.values() if r.why_not(backend)] == []
    assert broken_by(backend) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "sibling_added", "siblings_reordered", "alone", "ungated", "replay_twice"])
def test_triton_keeps_the_relations_that_its_interpreter_shows_in_seconds(name: str) -> None:
    assert RELATIONS[name].run(load_backend("triton"), 1) == []


def test_triton_can_be_asked_all_relations_but_the_layouts() -> None:
    assert [r.name for r in RELATIONS.values() if r.why_not(load_backend("triton"))] == ["layouts"]


@pytest.mark.parametrize(
    "contract",
    [
        Contract(beta="bf16", norm="bf16"),
        Contract(state_dtype=torch.bfloat16, carry="bf16"),
        Contract(head_map="tiled", softplus="log_exp"),
    ],
    ids=["bf16 gates", "bf16 state", "tiled"],
)
def test_declared_variants_keep_every_relation(contract: Contract) -> None:
    assert broken_by(ReferenceBackend(contract)) == set()


def test_a_finding_names_surface_place_values_and_the_command_that_shows_it_again() -> None:
    found = RELATIONS["chain"].run(VerifyDiffers(), 1, name="mine:Kernel")[0]
    assert (found.check, found.case, found.layer, found.request) == ("gdn.chain", "relation/chain/1", 0, 0)
    assert found.reproduce == "lumotree-audit fuzz --backend mine:Kernel --relation chain --seed 1"
    assert isinstance(found.got, float) and found.allowed and found.row is not None


@pytest.mark.parametrize(
    ("name", "backend", "message"),
    [
        ("permuted", ReferenceBackend(Contract(trees=False)), "relation permuted: the contract takes no trees"),
        ("chain", ReferenceBackend(Contract(max_rows=4)), "chain: the contract takes 4 rows, the relation needs 6"),
        ("layouts", load_backend("triton"), "layouts: the backend cannot be made with the other"),
        ("ungated", BackendBase(), "relation ungated: the backend has none of gdn"),
        (
            "chunk_split",
            ReferenceBackend(Contract(state_dtype=torch.bfloat16, claims="algebra")),
            "relation chunk_split: a bf16 pool behind an fp32 carry rounds where a chunk ends",
        ),
    ],
)  # fmt: skip
def test_a_relation_that_says_nothing_about_a_backend_is_refused(name: str, backend: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RELATIONS[name].run(backend, 0)
