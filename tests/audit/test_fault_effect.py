"""A fault is without effect only if a kernel does the same with it, its workspace and its own memory included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from audit import fault_effect
from audit.fault_cases import ladder
from audit.fault_effect import digest, same_with_and_without
from audit.fault_matrix import Cases, Plan, _along, audit_fault
from audit.fault_report import to_report
from audit.render.matrix import print_matrix
from faults import BLIND, CATALOGUE, EVERY, Fault
from lumotree.backends.bank import Bank, BankBackend
from lumotree.backends.protocol import Accepted, Batch
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.mechanisms.snapshot import SnapshotChainBackend


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_effect, "RELATIONS", ["chain", "permuted"])
    monkeypatch.setattr(fault_effect, "PROGRAMS", ["plain_between"])


SPECS = [next(ladder(1))]
SKIPPED = CATALOGUE["parent_skipped.gdn"]


class MiddleBank(BankBackend):
    """What it publishes depends on the distance of the last two accepted rows in the buffer."""

    def gdn_publish(self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Bank, layers: Sequence[int]) -> None:
        super().gdn_publish(pool, batch, accepted, ws, layers)
        for request, length in enumerate(accepted.length.tolist()):
            if length > 1:
                before, last = (int(batch.cu_rows[request]) + accepted.rows[request, length - 2 : length]).tolist()
                pool[list(layers), batch.state_slot[request]] += 1e-3 * (last - before)


class CountingBank(BankBackend):
    """Keeps count of the rows that were accepted, which nobody reads."""

    def __init__(self, contract: Contract | None = None) -> None:
        super().__init__(contract)
        self.rows = 0

    def gdn_publish(self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Bank, layers: Sequence[int]) -> None:
        self.rows += int(accepted.length.sum())
        super().gdn_publish(pool, batch, accepted, ws, layers)


class NotingBank(BankBackend):
    """Leaves the number of accepted rows in the workspace."""

    def gdn_publish(self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Bank, layers: Sequence[int]) -> None:
        super().gdn_publish(pool, batch, accepted, ws, layers)
        ws.conv[0, 0, 0, 0] = float(accepted.length.sum())


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        (BankBackend(), SKIPPED),
        (BankBackend(), CATALOGUE["parent_skipped.conv"]),
        (BankBackend(), BLIND["first_decay_twice.gdn"]),
        (SnapshotChainBackend(), BLIND["first_decay_twice.gdn"]),
    ],
    ids=lambda x: getattr(x, "id", getattr(x, "name", "")),
)
def test_a_kernel_that_copies_a_kept_state_does_the_same_with_a_fault_of_the_path_before_it(
    backend: Any, fault: Fault
) -> None:
    assert same_with_and_without(backend, fault, SPECS[: backend.contract.trees], 1) > 30


@pytest.mark.parametrize(
    "backend", [TorchBackend(), MiddleBank(), CountingBank(), NotingBank()], ids=lambda b: type(b).__name__
)
def test_a_kernel_that_reads_the_path_does_not(backend: Any) -> None:
    assert same_with_and_without(backend, SKIPPED, SPECS, 1) == 0


class LongReplay(BankBackend):
    """A bank for short paths; of a path of more than eight rows it also reads the middle."""

    def gdn_publish(self, pool: Tensor, batch: Batch, accepted: Accepted, ws: Bank, layers: Sequence[int]) -> None:
        super().gdn_publish(pool, batch, accepted, ws, layers)
        for request, length in enumerate(accepted.length.tolist()):
            if length > 8:
                pool[list(layers), batch.state_slot[request]] += accepted.rows[request, :length].sum()


def test_a_kernel_that_reads_only_long_paths_is_asked_a_long_path() -> None:
    fault = replace(SKIPPED, id="parent_skipped.gdn")
    assert same_with_and_without(LongReplay(), fault, SPECS, 1)
    assert not same_with_and_without(LongReplay(), fault, [*SPECS, _along(SPECS[0], 20)], 1)


def test_nothing_is_shown_for_a_kernel_that_cannot_be_copied() -> None:
    bank = BankBackend()
    bank.stream = (n for n in ())  # type: ignore[attr-defined]
    assert same_with_and_without(bank, SKIPPED, SPECS, 1) == 0


def test_a_fault_that_a_bank_does_not_read_is_equivalent_there_and_the_run_passes() -> None:
    backend = BankBackend()
    row = audit_fault(backend, SKIPPED, Cases(SPECS, backend.contract), Plan("bank", full=True))
    assert row.state == "Equivalent" and not row.missed and not row.rates
    assert row.note.startswith(SKIPPED.unread) and "the same bits behind each of" in row.note
    assert set(row.checks.values()) == {"Equivalent"}
    report = to_report([row], Plan("bank"), "lumotree-audit faults", 1.0)
    assert report.exit_code == 0 and report.checks[0].note == (
        "without effect on this kernel, with proof: parent_skipped.gdn"
    )
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_matrix([row], console)
    assert SKIPPED.unread in console.export_text()


def test_it_stays_missed_where_the_kernel_reads_it_and_where_the_catalogue_has_no_proof() -> None:
    counting = CountingBank()
    row = audit_fault(counting, SKIPPED, Cases(SPECS, counting.contract), Plan("bank"))
    assert row.state == "Missed" and row.missed and to_report([row], Plan("bank"), "", 1.0).exit_code == 1
    unproven = replace(SKIPPED, unread="")
    assert audit_fault(BankBackend(), unproven, Cases(SPECS, counting.contract), Plan("bank")).state == "Missed"


def test_on_a_kernel_that_replays_the_same_fault_is_caught() -> None:
    row = audit_fault(TorchBackend(), SKIPPED, Cases(SPECS, Contract()), Plan("torch"))
    assert row.state == "Caught" and not row.note


def test_the_catalogue_has_a_proof_for_three_faults_only() -> None:
    assert [f.id for f in EVERY.values() if f.unread] == [
        "parent_skipped.gdn", "parent_skipped.conv", "first_decay_twice.gdn",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        ({"n": 1}, {"n": 2}),
        ([None, "a"], [None, "b"]),
        ({"x": torch.ones(1)}, {"y": torch.ones(1)}),
    ],
    ids=["sign of zero", "dtype", "shape", "number", "word", "name"],
)
def test_a_digest_tells_nests_apart_by_every_bit_and_plain_value(a: Any, b: Any) -> None:
    assert digest(a) != digest(b) and digest(a) == digest(a)


def test_a_digest_goes_into_objects_and_ends_in_one_that_holds_itself() -> None:
    bank, same = (Bank(None, torch.ones(2), torch.zeros(2)) for _ in range(2))  # type: ignore[arg-type]
    assert digest(bank) == digest(same)
    bank.conv[1] = 1
    assert digest(bank) != digest(same)
    ring: list[Any] = [1]
    ring.append(ring)
    assert digest(ring) == digest(ring)
