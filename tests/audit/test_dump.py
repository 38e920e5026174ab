"""A clean recording passes, a wrong one fails where it is wrong, a damaged one is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from audit import dump_controls
from audit.cli import main
from audit.dump import DumpOptions, judge_dump
from audit.report import Report
from faults import Faulty
from lumotree.backends.batch import accepted_paths
from lumotree.backends.torch_backend import TorchBackend
from lumotree.contract import Contract
from lumotree.errors import BackendError, InputError, RecordError
from lumotree.record_file import content_sha256, read_record, write_record

from .dump_engine import DIMS, Engine


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump") / "clean"
    Engine(folder).run(3)
    return folder


@pytest.fixture
def copied(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "elsewhere"))


def judged(folder: Path, *, controls: bool = False, **options: Any) -> Report:
    """Without controls a recording cannot pass, but fails all the same."""
    return judge_dump(DumpOptions(str(folder), controls=controls, **options))


def only_without_controls(report: Report) -> bool:
    return report.reasons == ("no positive control ran",)


def test_a_clean_recording_passes_wherever_it_lies(copied: Path) -> None:
    report = judged(copied, controls=True)
    assert report.verdict == "PASS" and report.exit_code == 0
    assert {c.status for c in report.checks} == {"pass"}
    assert {c.surface for c in report.checks} >= {"gdn", "conv", "attention", "kv_new", "kv_history", "hidden"}
    assert len(report.controls) == len(dump_controls.EDITS) and all(c.detected for c in report.controls)
    assert report.coverage["drafter"] == "verify only"  # nobody gave the head that could redo its entries


def test_without_a_backend_moved_data_and_float64_judge_alone(copied: Path) -> None:
    report = judged(copied, backend="none", controls=True)
    assert report.verdict == "PASS"
    ids = {c.id for c in report.checks}
    assert "dump.gdn.derived" in ids and "dump.conv.state" in ids and "dump.gdn.state" not in ids


def wrong_publish(surface: str, at: int, layer: int = 1) -> tuple[Any, list[int]]:
    """A backend that publishes one layer of one surface along the root alone, in cycle `at`."""
    inner, calls = TorchBackend(), [0]
    method = {"gdn": "gdn_publish", "conv": "conv_publish", "attention": "kv_publish"}[surface]

    def publish(pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
        wrong = calls[0] == at
        calls[0] += 1
        right = [n for n in layers if not (wrong and n == layer)]
        getattr(inner, method)(pool, batch, accepted, ws, right)
        if wrong:
            root = accepted_paths([(0,)] * len(accepted.length))
            getattr(inner, method)(pool, batch, root, ws, [layer])

    return Faulty(inner, **{method: publish}), calls


@pytest.mark.parametrize(
    ("surface", "check"),
    [("gdn", "dump.gdn.state"), ("conv", "dump.conv.state"), ("attention", "dump.kv_new.committed")],
)
def test_a_wrong_publication_is_named_with_surface_layer_and_cycle(surface: str, check: str, tmp_path: Path) -> None:
    backend, calls = wrong_publish(surface, at=1)
    Engine(tmp_path, backend).run(3)
    report = judged(tmp_path)
    first = report.findings[0]
    assert report.verdict == "FAIL" and calls[0] == 3
    assert (first.check, first.case, first.layer) == (check, "cycle 1", 1)


@pytest.mark.parametrize(
    ("method", "check"),
    [("gdn_verify", "dump.gdn.out"), ("conv_verify", "dump.conv.out"), ("attention_verify", "dump.attention.out")],
)
def test_outputs_that_do_not_follow_from_the_operands_fail(method: str, check: str, tmp_path: Path) -> None:
    inner, calls = TorchBackend(), [0]

    def verify(ops: Any, pool: Any, batch: Any, ws: Any, out: torch.Tensor, layer: int) -> None:
        getattr(inner, method)(ops, pool, batch, ws, out, layer)
        calls[0] += 1
        if calls[0] == 3:  # layer 0 of the second cycle
            out[4] = out[4] * 1.0625

    Engine(tmp_path, Faulty(inner, **{method: verify})).run(2)
    report = judged(tmp_path)
    first = report.findings[0]
    assert report.verdict == "FAIL"
    assert (first.check, first.case, first.layer, first.row) == (check, "cycle 1", 0, 4)


def test_a_publication_that_writes_to_earlier_keys_fails_there(tmp_path: Path) -> None:
    inner = TorchBackend()

    def publish(cache: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
        inner.kv_publish(cache, batch, accepted, ws, layers)
        cache.k[1, int(batch.page_table[1, 0]) * batch.page_size] += 1

    Engine(tmp_path, Faulty(inner, kv_publish=publish)).run(1)
    report = judged(tmp_path)
    assert report.verdict == "FAIL"
    finding = report.findings[0]
    assert (finding.check, finding.request, finding.layer) == ("dump.kv_history", 1, 1)


def test_a_publication_into_a_free_slot_fails(tmp_path: Path) -> None:
    inner = TorchBackend()

    def publish(pool: Any, batch: Any, accepted: Any, ws: Any, layers: Any) -> None:
        inner.gdn_publish(pool, batch, accepted, ws, layers)
        pool[0, 3] += 1

    Engine(tmp_path, Faulty(inner, gdn_publish=publish)).run(1)
    report = judged(tmp_path)
    assert [c.id for c in report.checks if c.status == "fail"] == ["dump.elsewhere"]
    assert report.findings[0].got == "recurrent changed"


def rewritten(folder: Path, sequence: int, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Tell another story in one file, with content hashes that fit, there and in all files behind it."""
    previous = None
    for path in sorted(folder.iterdir()):
        record = read_record(path)
        tensors = dict(record.tensors)
        if record.sequence == sequence:
            edit(tensors)
        record = replace(record, tensors=tensors, previous=record.previous if previous is None else previous)
        _, previous = write_record(record, folder)


def lie(name: str, value: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Callable[..., None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = value(tensors)

    return edit


def test_a_state_after_of_another_cycle_fails(copied: Path) -> None:
    other = read_record(copied / "cycle-000002.safetensors").tensors["after.recurrent"]
    rewritten(copied, 1, lie("after.recurrent", lambda t: other))
    report = judged(copied)
    assert report.verdict == "FAIL"
    assert (report.findings[0].check, report.findings[0].case) == ("dump.gdn.state", "cycle 1")


def test_a_cycle_that_begins_with_another_state_than_the_last_one_left_fails(copied: Path) -> None:
    rewritten(copied, 1, lie("before.conv", lambda t: t["before.conv"] * 2))
    report = judged(copied)
    assert report.verdict == "FAIL"
    assert (report.findings[0].check, report.findings[0].case) == ("dump.conv.before", "cycle 1")


def test_a_last_bit_of_the_published_state_fails(copied: Path) -> None:
    def flip(t: dict[str, torch.Tensor]) -> torch.Tensor:
        bits = t["after.recurrent"].clone().view(torch.int32)
        bits[1, 0, 1, 3, 2] ^= 1
        return bits.view(torch.float32)

    rewritten(copied, 2, lie("after.recurrent", flip))
    report = judged(copied)
    finding = report.findings[0]
    assert (finding.check, finding.case, finding.request, finding.layer, finding.head) == (
        "dump.gdn.state", "cycle 2", 0, 1, 1,
    )  # fmt: skip
    assert only_without_controls(judged(copied, backend="none"))  # far inside the bound that stands in for a chain


@pytest.mark.parametrize(
    ("edit", "check"),
    [
        (lie("tree.position", lambda t: t["tree.position"] + 1), "dump.lengths"),
        (lie("path.length_after", lambda t: t["path.length_after"] + 1), "dump.lengths"),
        (lie("path.pending", lambda t: t["path.pending"] + 1), "dump.path"),
        (lie("hidden.before", lambda t: t["hidden.before"] + 1), "dump.hidden"),
    ],
)
def test_claims_that_do_not_add_up_fail(edit: Any, check: str, copied: Path) -> None:
    rewritten(copied, 1, edit)
    report = judged(copied)
    assert report.verdict == "FAIL" and report.findings[0].check == check


def test_an_accepted_row_whose_parent_was_not_accepted_fails(copied: Path) -> None:
    rewritten(copied, 0, lie("path.rows", lambda t: torch.where(t["path.rows"] == 1, 2, t["path.rows"]).int()))
    report = judged(copied)
    assert report.findings[0].check == "dump.path"
    assert "not parent-linked" in str(report.findings[0].got)


def test_a_recording_of_nothing_is_inconclusive(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.backend = Faulty(TorchBackend(), conv_publish=lambda *_: None)
    engine.run(1)
    report = judged(tmp_path, backend="none")
    assert any("the same in all cycles: conv" in reason for reason in report.reasons)


def test_an_edit_that_goes_unseen_makes_the_run_inconclusive(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = {"harmless": lambda entry, t: {"logits": t["logits"] + 1}}
    monkeypatch.setattr(dump_controls, "EDITS", blind)
    report = judged(copied, controls=True)
    assert report.verdict == "INCONCLUSIVE" and report.reasons == ("control harmless was not detected",)


def test_what_was_not_recorded_is_not_covered(tmp_path: Path) -> None:
    Engine(tmp_path, untouched=False).run(2)
    report = judged(tmp_path)
    assert only_without_controls(report) and "dump.elsewhere" not in {c.id for c in report.checks}


def damaged(copied: Path, name: str) -> None:
    path = copied / "cycle-000001.safetensors"
    with safe_open(path, "pt") as file:
        meta, tensors = dict(file.metadata()), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    if name == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
        return
    if name == "noise":
        path.write_bytes(b"\x80\x04K\x01.")
        return
    if name == "edited":
        tensors["path.pending"] = tensors["path.pending"] + 1
    elif name == "foreign":
        meta = {"format": "pt"}
    elif name == "later version":
        meta["version"] = "2"
    elif name == "metadata missing":
        del meta["run"]
    else:
        _restructure(name, meta, tensors)
        meta["content"] = content_sha256(tensors, meta)
    save_file(tensors, path, meta)


def _restructure(name: str, meta: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    if name == "tensor missing":
        del tensors["gdn.k"]
    elif name == "tensor unknown":
        tensors["gdn.z"] = torch.zeros(1)
    elif name == "dtype":
        tensors["after.conv"] = tensors["after.conv"].float()
    elif name == "shape":
        tensors["after.recurrent"] = tensors["after.recurrent"][:, :, :1].contiguous()
    elif name == "contract":
        meta["contract"] = json.dumps({**json.loads(meta["contract"]), "beta": "fp8"})
    elif name == "dims":
        meta["dims"] = "[]"
    elif name == "sequence":
        meta["sequence"] = "-1"
    elif name == "other run":
        meta["run"] = "0123"
    elif name == "renumbered":
        meta["sequence"] = "5"
    elif name == "foreign neighbour":
        meta["previous"] = "ab" * 32
    elif name == "row ranges":
        tensors["tree.cu_rows"] = tensors["tree.cu_rows"].flip(0)
    elif name == "opening":
        tensors["opening.new"] = ~tensors["opening.new"]
    elif name == "cycle in the tree":
        tensors["tree.parent"] = torch.where(tensors["tree.parent"] == 3, 5, tensors["tree.parent"]).int()
    elif name == "committed rows":
        for part in ("k", "v"):
            tensors[f"committed.{part}"] = tensors[f"committed.{part}"][:, :1].contiguous()


REFUSED = {
    "truncated": "whole safetensors file",
    "noise": "whole safetensors file",
    "edited": "content hash",
    "foreign": "not a recorded cycle",
    "later version": "expected version 1, got '2'",
    "metadata missing": "metadata: run",
    "tensor missing": "expected a tensor 'gdn.k'",
    "tensor unknown": "unknown tensor 'gdn.z'",
    "dtype": "expected after.conv in torch.bfloat16",
    "shape": "expected after.recurrent of shape",
    "contract": "beta to be one of",
    "dims": "metadata dims to be a JSON dict",
    "sequence": "sequence to be an integer >= 0",
    "other run": "recorded in run 0123",
    "renumbered": "expected cycle 1 here",
    "foreign neighbour": "two recordings are mixed",
    "row ranges": "no ranges of 12 rows",
    "opening": "opens again",
    "cycle in the tree": "row",
    "committed rows": "committed.k holds 1 tokens, expected at least",
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_files_are_refused_with_the_reason(name: str, copied: Path) -> None:
    damaged(copied, name)
    with pytest.raises(InputError, match=REFUSED[name]):
        judged(copied)


def test_a_missing_cycle_is_refused(copied: Path) -> None:
    (copied / "cycle-000001.safetensors").unlink()
    with pytest.raises(RecordError, match="expected cycle 1 here"):
        judged(copied)


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_cycles_is_refused(make: bool, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    if make:
        folder.mkdir()
    with pytest.raises(RecordError, match="found none"):
        judged(folder)


def test_a_backend_of_another_contract_is_refused(copied: Path) -> None:
    with pytest.raises(BackendError, match=r"norm='rsqrt' \(recorded\) and 'sqrt'"):
        judged(copied, backend="sqrt_norm")


def test_the_dims_and_contract_of_a_recording_are_read_back(clean: Path) -> None:
    record = read_record(clean / "cycle-000000.safetensors")
    assert record.dims == DIMS and record.contract == TorchBackend().contract == Contract()


def test_the_command_line_gives_the_verdict_as_its_exit_code(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    assert main(["continue", "--dump", str(copied), "--report", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS")
    assert json.loads((out / "report.json").read_text())["verdict"] == "PASS"
    rewritten(copied, 0, lie("after.conv", lambda t: t["before.conv"]))
    assert main(["continue", "--dump", str(copied)]) == 1
    assert "dump.conv.state" in capsys.readouterr().out
    damaged(copied, "truncated")
    assert main(["continue", "--dump", str(copied)]) == 2
    assert "cycle-000001.safetensors: expected a whole safetensors file" in capsys.readouterr().err
