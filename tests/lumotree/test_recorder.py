"""The recorder reads and never disturbs; what it cannot record whole it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lumotree.backends.batch import accepted_paths, build_batch
from lumotree.backends.protocol import Limits
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Dims
from lumotree.errors import RecordError
from lumotree.record_file import read_record
from lumotree.recorder import CycleRecorder, Recorder
from lumotree.state import empty_pools
from lumotree.tree import Tree

DIMS = Dims(1, 1, 2, 2, 6, 1, 1, 4, 2)


class Small:
    """One live request of three rows and one padding request on zeroed pools."""

    def __init__(self, folder: Path) -> None:
        self.backend = TorchBackend()
        self.recorder = Recorder(folder, self.backend.contract, DIMS, "torch")
        self.pools = empty_pools(DIMS, self.backend.contract, 3, 12, "cpu")
        self.ws = self.backend.allocate(DIMS, Limits(2, 3, 3, 3, 1), torch.device("cpu"))
        tree = Tree.make((-1, 0, 0), slots=(8, 9, 10), prefix_len=2)
        table = torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32)
        self.batch = build_batch([tree, None], state_slots=[1, -1], page_table=table, page_size=4)

    def begin(self, names: Any = ("r", "")) -> CycleRecorder:
        return self.recorder.begin(self.batch, torch.arange(3), self.pools, self.ws, self.backend, names)

    def end(self, cycle: CycleRecorder) -> Path:
        return cycle.end(accepted_paths([(0, 2), ()]), torch.tensor([5, -1]), torch.tensor([4, 0]))


def test_a_cycle_without_operands_has_its_states_and_nothing_else(tmp_path: Path) -> None:
    small = Small(tmp_path)
    cycle = small.begin()
    cycle.verified()
    record = read_record(small.end(cycle))
    assert record.requests == ("r", "") and record.sequence == 0 and record.previous == ""
    assert [record.has(group) for group in ("before", "history", "untouched", "gdn", "hidden")] == [True] * 3 + [
        False
    ] * 2
    assert record.tensors["path.rows"].tolist() == [[0, 2], [-1, -1]]
    assert record.tensors["opening.k"].shape == (1, 2, 1, 4) and record.tensors["committed.k"].shape == (1, 2, 1, 4)


def test_files_follow_each_other_and_a_request_opens_once(tmp_path: Path) -> None:
    small = Small(tmp_path)
    records = []
    for _ in range(2):
        cycle = small.begin()
        cycle.verified()
        records.append(read_record(small.end(cycle)))
    assert [r.sequence for r in records] == [0, 1] and records[1].previous == records[0].content
    assert [r.tensors["opening.new"].tolist() for r in records] == [[True, False], [False, False]]


def test_recording_changes_nothing(tmp_path: Path) -> None:
    small = Small(tmp_path)
    before = {name: pool.clone() for name, pool in small.pools.tensors().items()}
    cycle = small.begin()
    cycle.verified()
    small.end(cycle)
    assert all(torch.equal(pool, before[name]) for name, pool in small.pools.tensors().items())


@pytest.mark.parametrize("names", [("r", "s"), ("", ""), ("r",)])
def test_names_that_do_not_fit_the_batch_are_refused(names: Any, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="one name for each live request"):
        Small(tmp_path).begin(names)


def test_end_before_verified_is_refused(tmp_path: Path) -> None:
    small = Small(tmp_path)
    with pytest.raises(RecordError, match="before verified"):
        small.end(small.begin())


def test_a_layer_left_out_is_refused(tmp_path: Path) -> None:
    from lumotree.backends.protocol import ConvOps

    small = Small(tmp_path)
    cycle = small.begin()
    x = torch.zeros((3, 6), dtype=torch.bfloat16)
    cycle.operands("conv", 1, ConvOps(x, torch.zeros((6, 4), dtype=torch.bfloat16)), x)
    cycle.verified()
    with pytest.raises(RecordError, match="layer 0 was not recorded"):
        small.end(cycle)


def test_half_a_group_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    small = Small(tmp_path)
    cycle = small.begin()
    cycle.verified(hidden=torch.zeros((3, 4), dtype=torch.bfloat16))
    with pytest.raises(RecordError, match=r"expected a tensor 'hidden\.before'"):
        small.end(cycle)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_cycles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cycle-000004.safetensors").touch()
    with pytest.raises(RecordError, match=r"expected an empty folder, found cycle-000004\.safetensors"):
        Small(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="cannot be made"):
        Small(tmp_path / "file" / "below")


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(tmp_path)
    cycle = small.begin()
    cycle.verified()

    def refuse(source: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RecordError, match="cycle 0 not written: disk full"):
        small.end(cycle)
    assert not list(tmp_path.iterdir())
