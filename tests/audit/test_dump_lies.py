"""Recordings that are whole, hash right and tell of one wrong thing, or leave out what would show it: none passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audit import dump_controls
from audit.dump import DumpOptions, judge_dump
from audit.dump_controls import Controls
from audit.dump_judge import JUDGED_GROUPS, DumpJudge
from audit.report import Report
from faults import Faulty
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.errors import RecordError
from lumotree.record_file import CycleRecord, read_record, write_record

from .dump_engine import Engine

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lies") / "clean"
    Engine(folder).run(2)
    return folder


@pytest.fixture
def told(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "told"))


def rewrite(folder: Path, change: Callable[[CycleRecord], CycleRecord]) -> None:
    """Tell every cycle anew, chained by hashes that fit."""
    previous = ""
    for path in sorted(folder.iterdir()):
        _, previous = write_record(replace(change(read_record(path)), previous=previous), folder)


def edit(folder: Path, sequence: int, change: Callable[[Tensors], Tensors]) -> None:
    def one(record: CycleRecord) -> CycleRecord:
        own = record.sequence == sequence
        return replace(record, tensors={**record.tensors, **change(record.tensors)}) if own else record

    rewrite(folder, one)


def judged(folder: Path, backend: str | None = None) -> Report:
    return judge_dump(DumpOptions(str(folder), backend))


@pytest.mark.parametrize("sequence", [0, 1])
@pytest.mark.parametrize("group", JUDGED_GROUPS)
def test_a_cycle_that_leaves_out_what_others_record_is_no_pass(group: str, sequence: int, told: Path) -> None:
    def without(record: CycleRecord) -> CycleRecord:
        kept = {n: x for n, x in record.tensors.items() if n.partition(".")[0] != group}
        return replace(record, tensors=kept) if record.sequence == sequence else record

    rewrite(told, without)
    report = judged(told, "none")
    assert report.verdict == "INCONCLUSIVE"
    assert any(f"cycle {sequence} was recorded without {group}" in reason for reason in report.reasons)


@pytest.mark.parametrize(("name", "value"), [("contract", Contract(norm="sqrt")), ("backend", "another:Kernel")])
def test_what_a_recording_is_of_may_not_change_on_the_way(name: str, value: Any, told: Path) -> None:
    rewrite(told, lambda r: replace(r, **{name: value}) if r.sequence else r)
    with pytest.raises(RecordError, match=f"cycle 1: {name} is"):
        judged(told, "none")


def test_requests_that_are_new_in_every_cycle_show_no_continuation(told: Path) -> None:
    def renamed(record: CycleRecord) -> CycleRecord:
        if record.sequence == 0:
            return record
        held = DumpJudge(None)
        held.judge(read_record(told / "cycle-000000.safetensors"))
        opening = {f"opening.{n}": torch.cat([getattr(held.ledger.held[r], n) for r in "ab"], 1) for n in "kv"}
        drafted = [held.ledger.held[r].drafter for r in "ab"]
        opening |= {f"drafter.opening_{n}": torch.cat([d[i] for d in drafted if d]) for i, n in enumerate("kv")}
        opening["opening.new"] = torch.ones(2, dtype=torch.bool)
        return replace(record, requests=("c", "d"), tensors={**record.tensors, **opening})

    rewrite(told, renamed)
    report = judged(told)
    assert report.verdict == "INCONCLUSIVE" and "no request was recorded in two cycles" in report.reasons[0]
    assert not [c for c in report.checks if c.id.endswith(".before")]  # nothing is compared with itself


@pytest.mark.parametrize("names", [("", "b"), ("a", "a")])
def test_a_live_slot_without_a_name_of_its_own_is_refused(names: tuple[str, str], told: Path) -> None:
    rewrite(told, lambda r: replace(r, requests=names))
    with pytest.raises(RecordError, match="one name for each live request"):
        judged(told)


def test_a_length_of_more_rows_than_there_are_fails(told: Path) -> None:
    edit(told, 1, lambda t: {"path.length": torch.where(t["path.length"] == 3, 8, t["path.length"]).int()})
    report = judged(told)
    assert report.verdict == "FAIL" and report.findings[0].check == "dump.path"


class OtherWeights(Engine):
    """From its second cycle on every layer reads the weights of the other one, and computes with them rightly."""

    which = 0

    def cycle(self, paths: Any) -> None:
        if len(self.recorder.known):
            parts = [list(layer) for layer in self.fixed]
            parts[0][self.which], parts[1][self.which] = parts[1][self.which], parts[0][self.which]
            self.fixed = [(layer[0], layer[1], layer[2]) for layer in parts]
        super().cycle(paths)


@pytest.mark.parametrize(("which", "name"), [(0, "conv.weight"), (1, "gdn.A_log"), (2, "gdn.dt_bias")])
def test_weights_of_another_layer_fail_though_all_follows_from_them(which: int, name: str, tmp_path: Path) -> None:
    engine = OtherWeights(tmp_path)
    engine.which = which
    engine.run(2)
    report = judged(tmp_path)
    assert report.verdict == "FAIL" and {f.check for f in report.findings} == {"dump.weights"}
    assert (report.findings[0].case, report.findings[0].got) == ("cycle 1", f"{name} changed")


def test_positions_turned_by_another_angle_than_before_fail(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.run(1)
    engine.cos, engine.sin = engine.cos.roll(1, 0), engine.sin.roll(1, 0)
    engine.run(1)
    report = judged(tmp_path)
    assert report.verdict == "FAIL" and {f.check for f in report.findings} == {"dump.weights"}


@pytest.mark.parametrize("backend", [None, "none"])
def test_values_that_are_cached_wrong_by_tree_and_chain_alike_fail(backend: str | None, told: Path) -> None:
    """Both the next cycle's attention and the chain take cached values as they find them."""

    def other(t: Tensors) -> Tensors:
        return {n: t[n] * 2 for n in ("candidate.v", "committed.v")}

    edit(told, 1, other)
    report = judged(told, backend)
    assert report.verdict == "FAIL"
    assert "dump.kv_new.values" in {f.check for f in report.findings}


def test_a_state_that_changes_along_an_empty_path_fails_without_a_chain(tmp_path: Path) -> None:
    contract = Contract(empty_path=True)

    class Rejecting(Engine):
        def cycle(self, paths: Any) -> None:
            super().cycle(((), paths[1]) if self.recorder.known else paths)

    def publish(pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
        inner.gdn_publish(pool, batch, accepted, ws, layers)
        for i, length in enumerate(accepted.length.tolist()):
            if not length:
                pool[:, int(batch.state_slot[i])] *= 1.5

    inner = TorchBackend(contract)
    engine = Rejecting(tmp_path, Faulty(inner, gdn_publish=publish))
    engine.run(2)
    report = judged(tmp_path, "none")
    assert report.verdict == "FAIL" and {f.check for f in report.findings} == {"dump.gdn.state"}
    assert (report.findings[0].case, report.findings[0].request) == ("cycle 1", 0)


def test_a_control_on_the_second_request_reads_that_request_s_rows(
    clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be called seen for rows of the first one that were taken for its own."""

    def harmless(entry: dump_controls.Entry, t: Tensors) -> Tensors | None:
        return {"logits": t["logits"] + 1} if entry.index else None

    monkeypatch.setattr(dump_controls, "EDITS", {"harmless": harmless})
    controls, judge = Controls(), DumpJudge(TorchBackend())
    controls.try_on(judge, read_record(clean / "cycle-000000.safetensors"))
    assert [c.detected for c in controls.results()] == [False]
