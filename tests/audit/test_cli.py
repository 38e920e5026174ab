"""The command line: each exit code for its own reason, each bad input with its own message and nothing written."""

from __future__ import annotations

import json
import os
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from audit import cli, suite
from audit.families import micro_cases
from audit.operands import REGIMES
from faults import CONTROLS

MICRO = ("--shape", "micro", "--workers", "0")
ONE_CASE = "micro/heldout/named/comb:3"

KERNELS = '''
import torch
from lumotree.backends.torch_backend import TorchBackend
from lumotree.errors import ContractError

class LowBit(TorchBackend):
    """One low bit of row 1 of the conv output, on trees with a side leaf."""
    def conv_verify(self, ops, pool, batch, ws, out, layer):
        super().conv_verify(ops, pool, batch, ws, out, layer)
        out[1, :1].view(torch.int16).bitwise_xor_(1)

class NotPublished(TorchBackend):
    def gdn_publish(self, pool, batch, accepted, ws, layers):
        pass

class OtherOrder(TorchBackend):
    def attention_verify(self, ops, cache, batch, ws, out, layer):
        super().attention_verify(ops, cache, batch, ws, out, layer)
        if batch.requests > 1 and int(batch.prefix_len[0]) == 40:
            out[0] = 0

class TwoArguments(TorchBackend):
    def gdn_verify(self, ops, out):
        pass

class NoPublish(TorchBackend):
    conv_publish = None

class NoContract:
    pass

class Nothing:
    from lumotree.contract import Contract
    contract = Contract()

class BadExport(TorchBackend):
    def export(self, pools, ws, slot, layer):
        from dataclasses import replace
        state = super().export(pools, ws, slot, layer)
        return replace(state, recurrent=state.recurrent.transpose(1, 2))

class Crashes(TorchBackend):
    def conv_publish(self, pool, batch, accepted, ws, layers):
        raise RuntimeError("device-side assert")

class Refuses(TorchBackend):
    def gdn_verify(self, ops, pool, batch, ws, out, layer):
        raise ContractError("gdn q: expected torch.float16, got torch.bfloat16")

class Leaves(TorchBackend):
    def gdn_verify(self, ops, pool, batch, ws, out, layer):
        raise SystemExit(0)

def leaves_when_made():
    raise SystemExit(0)

class Leaks(TorchBackend):
    def gdn_verify(self, ops, pool, batch, ws, out, layer):
        super().gdn_verify(ops, pool, batch, ws, out, layer)
        out += (ops.v.float().sum() * 0).to(out.dtype)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of kernels that is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "kernels_of_cli.py").write_text(KERNELS)
    yield tmp_path
    sys.modules.pop("kernels_of_cli", None)


def run(*words: str) -> int:
    """What a shell would see; argparse leaves by SystemExit."""
    try:
        return cli.main([*words])
    except SystemExit as left:
        return int(left.code or 0)


def kernel(name: str) -> tuple[str, str]:
    return ("--backend", f"kernels_of_cli:{name}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One complete run of the main job: calibrate, then check with a report."""
    folder = tmp_path_factory.mktemp("whole")
    envelope, report = str(folder / "env.json"), str(folder / "report")
    size = ("--sets", "1", "--instances", "14", "--envelope", envelope)
    codes = [run("calibrate", *MICRO, *size), run("check", *MICRO, *size, "--report", report)]
    return {"codes": codes, "folder": folder, "report": Path(report), "envelope": Path(envelope), "size": size}


def test_a_run_that_does_not_end_leaves_no_earlier_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("audit.suite.check", interrupted)
    for name in ("report.json", "junit.xml", "summary.md"):
        (tmp_path / name).write_text("PASS")
    assert run("check", "--suite", "component", "--report", str(tmp_path)) == 130
    assert os.listdir(tmp_path) == []


def test_a_right_backend_ends_with_0_and_leaves_a_complete_report(whole: dict[str, Any]) -> None:
    assert whole["codes"] == [0, 0]
    data = json.loads((whole["report"] / "report.json").read_text())
    named = {
        "schema_version", "verdict", "backend", "contract", "environment", "envelope", "checks", "controls", "findings",
        "seed", "wall_s",
    }  # fmt: skip
    assert named <= set(data) and data["verdict"] == "PASS" and data["findings"] == []
    assert set(data["envelope"]) == {"path", "sha256", "guarantee"} and data["seed"] == 1 and data["wall_s"] > 0
    for check in data["checks"]:
        wanted = {"id", "surface", "rung", "status", "cells", "bitwise_cells", "worst_ratio", "bound"}
        assert wanted <= set(check) and check["status"] in ("pass", "info")
    for control in data["controls"]:
        assert {"fault", "detected", "by", "ratio"} <= set(control)
        assert control["detected"] == (control["expect"] == "detected")
    assert len(data["controls"]) == len(CONTROLS)
    assert sum(c["cells"] for c in data["checks"] if c["status"] == "pass") > 1000
    suites = ElementTree.parse(whole["report"] / "junit.xml").getroot()
    assert suites.iter("testcase") and not list(suites.iter("failure"))
    assert "PASS" in (whole["report"] / "summary.md").read_text()
    assert not [n for n in os.listdir(whole["report"]) if n.startswith(".")]


def test_the_report_names_the_envelope_it_was_judged_by(whole: dict[str, Any]) -> None:
    data = json.loads((whole["report"] / "report.json").read_text())
    envelope = json.loads(whole["envelope"].read_text())
    assert data["envelope"]["sha256"] == envelope["sha256"] and "1e-06" in envelope["guarantee"]
    assert envelope["planned"] == 14 and envelope["shape"] == "micro" and envelope["arm"] == "native"


def test_an_existing_envelope_is_kept_without_force(whole: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    before = whole["envelope"].read_bytes()
    assert run("calibrate", *MICRO, *whole["size"]) == 2
    assert "--force" in capsys.readouterr().err and whole["envelope"].read_bytes() == before


@pytest.mark.parametrize(
    ("name", "case", "check"),
    [
        ("LowBit", ONE_CASE, "conv.out.bitwise"),
        ("NotPublished", "micro/heldout/size/1", "gdn.state.bitwise"),
        ("OtherOrder", "micro/heldout/batch-inplace", "attention.rotation"),
        ("LowBit", "micro/binary:2/heldout/s1/i3", "conv.out.bitwise"),
        ("LowBit", "micro/binary:2/calibration/s0/i2", "conv.out.bitwise"),
    ],
)
def test_a_finding_ends_with_1_and_its_command_shows_it_alone(
    name: str, case: str, check: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", *MICRO, *kernel(name), "--only", case, "--report", "first", "--no-diagnosis") == 1
    assert "FAIL" in capsys.readouterr().out
    findings = json.loads((folder / "first" / "report.json").read_text())["findings"]
    assert check in {f["check"] for f in findings}
    assert list(ElementTree.parse(folder / "first" / "junit.xml").getroot().iter("failure"))
    commands = {f["reproduce"] for f in findings}
    assert commands == {f"lumotree-audit check --backend kernels_of_cli:{name} --seed 1 --shape micro --only {case}"}
    for command in commands:
        words = shlex.split(command)[1:]
        assert run(*words, "--workers", "0", "--report", "again", "--no-diagnosis") == 1
        again = json.loads((folder / "again" / "report.json").read_text())["findings"]
        where = ("check", "case", "request", "layer", "row", "head", "got", "allowed")
        assert [[f[k] for k in where] for f in again] == [[f[k] for k in where] for f in findings]


def test_a_finding_of_a_calibration_names_a_command_that_finds_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = ("--sets", "1", "--instances", "2")
    assert run("calibrate", *MICRO, *kernel("LowBit"), *size, "--report", "r", "--envelope", "e.json") == 1
    assert not (folder / "e.json").exists()
    report = json.loads((folder / "r" / "report.json").read_text())
    assert report["envelope"] is None
    asked = []  # what a diagnosis behind a check says is tested with the diagnosis
    monkeypatch.setattr(
        suite, "diagnose", lambda make, seed, surfaces: asked.append((make().__class__, surfaces)) or []
    )
    assert run(*shlex.split(report["findings"][0]["reproduce"])[1:], "--workers", "0") == 1
    assert [(kind.__name__, surfaces) for kind, surfaces in asked] == [("LowBit", ["conv"])]


@pytest.mark.parametrize(
    "case",
    [ONE_CASE, "micro/heldout/batch", "micro/heldout/exact/micro-exact/comb:3"],
)
def test_a_chosen_case_passes_on_a_right_backend(case: str, folder: Path) -> None:
    assert run("check", *MICRO, "--only", case) == 0


def test_a_chosen_case_that_forgets_its_parents_says_that_it_shows_nothing_about_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", *MICRO, "--only", "micro/heldout/regime/near_zero") == 3
    assert "control wrong_parent.gdn was not detected" in capsys.readouterr().out


def test_a_leak_of_inactive_rows_alone_is_inconclusive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", *MICRO, *kernel("Leaks"), "--only", "micro/heldout/size/9") == 3
    out = capsys.readouterr().out
    assert "INCONCLUSIVE" in out and "poisoned" in out


def test_our_own_bug_ends_with_70_and_a_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(*args: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("audit.component.root_reach", bug)
    monkeypatch.setattr("audit.component.Judge.native", bug)
    assert run("check", *MICRO, "--only", ONE_CASE) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err and "KeyError: 'ours'" in err and "internal error" in err


@pytest.mark.parametrize("command", [("check", *MICRO, "--only", ONE_CASE), ("fuzz", "--relation", "chain")])
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kernels_of_cli:Leaves", "gdn_verify raised SystemExit: 0 ("),
        ("kernels_of_cli:leaves_when_made", "leaves_when_made cannot be called: SystemExit: 0"),
        ("leaves_on_import:Kernel", "module 'leaves_on_import' cannot be imported: SystemExit: 0"),
    ],
)
def test_a_kernel_that_ends_the_run_with_0_has_passed_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], spec: str, message: str
) -> None:
    (folder / "leaves_on_import.py").write_text("import sys\n\nsys.exit(0)\n")
    wrong = command[0] == "fuzz" and spec.endswith(":Leaves")  # a legal call that is not done breaks a relation
    assert cli.main([*command, "--backend", spec]) == (1 if wrong else 2)
    said = capsys.readouterr()
    assert message in (said.out if wrong else said.err)


def test_whatever_else_ends_a_run_with_0_has_passed_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leaves(*args: object, **kwargs: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("audit.suite.check", leaves)
    assert cli.main(["check", *MICRO, "--suite", "component"]) == 2
    assert "left it with exit code 0; there is no verdict" in capsys.readouterr().err


def test_a_case_off_its_grid_is_our_own_bug(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGIMES, "exact", REGIMES["random"])
    assert run("check", *MICRO, "--only", "micro/heldout/exact/micro-exact/comb:3") == 70


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "check", stop)
    assert run("check", *MICRO, "--only", ONE_CASE) == 130


BAD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown backend": (("--backend", "nope"), ("'nope' is unknown", "torch", "module:object")),
    "missing module": (("--backend", "no_such_module:K"), ("no_such_module", "cannot be imported")),
    "missing object": (kernel("Absent"), ("no object 'Absent'",)),
    "no contract": (kernel("NoContract"), ("attribute contract",)),
    "no surface": (kernel("Nothing"), ("no surface", "gdn_verify")),
    "wrong arguments": (kernel("TwoArguments"), ("gdn_verify(ops, out)", "6 positional arguments")),
    "no publish": (kernel("NoPublish"), ("lacks conv_publish",)),
    "export of another shape": (
        kernel("BadExport"),
        ("export returned recurrent", "[3, 8, 12], expected", "[3, 12, 8]"),
    ),
    "method that raises": (
        kernel("Crashes"),
        ("conv_publish raised RuntimeError: device-side assert", "kernels_of_cli.py:"),
    ),
    "method that refuses": (kernel("Refuses"), ("gdn q: expected torch.float16",)),
    "unknown case": (
        ("--only", "micro/heldout/named/bush"),
        ("unknown case 'micro/heldout/named/bush'", "for example"),
    ),
    "unknown shape": (("--shape", "80B"), ("--shape: expected one of 27B, tiny, micro, got '80B'",)),
    "unknown device": (("--device", "warp"), ("--device: expected a torch device", "'warp'")),
    "no GPU": (("--device", "cuda"), ("--device cuda: expected an NVIDIA GPU",)),
    "graph without GPU": (("--graph",), ("--graph", "--device cuda")),
    "negative seed": (("--seed", "-1"), ("--seed",)),
    "seed that is no number": (("--seed", "1e3"), ("--seed", "expected an integer >= 0, got '1e3'")),
    "zero sets": (("--sets", "0"), ("--sets", "expected an integer >= 1, got '0'")),
    "zero instances": (("--instances", "0"), ("--instances", "expected an integer >= 1")),
    "workers": (("--workers", "two"), ("--workers", "got 'two'")),
    "unknown suite": (("--suite", "everything"), ("--suite", "everything")),
    "unknown option": (("--tolerance", "0.1"), ("--tolerance",)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_with_2_a_message_on_stderr_and_nothing_written(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words, messages = BAD[name]
    only = () if "--only" in words else ("--only", ONE_CASE)
    assert run("check", *MICRO, *only, *words, "--report", "new/report") == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    for message in messages:
        assert message in said.err
    assert sorted(p for p in os.listdir(folder) if p != "__pycache__") == ["kernels_of_cli.py"]


@pytest.mark.parametrize("words", [(), ("audit",), ("check", "--shape")])
def test_a_command_line_that_is_none_ends_with_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "calibrate"])
def test_an_unwritable_report_folder_is_refused_before_the_run(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setattr(suite, command, lambda *args: pytest.fail("the run was started"))
    assert run(command, *MICRO, "--report", "file/report") == 2
    assert "report folder file/report: expected a writable folder" in capsys.readouterr().err


def test_an_envelope_that_cannot_be_written_is_refused_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setattr(suite, "run_cases", lambda *args, **kwargs: pytest.fail("the run was started"))
    assert run("calibrate", *MICRO, "--envelope", "file/env.json") == 2
    assert "envelope file/env.json: expected a writable folder" in capsys.readouterr().err


def damaged(text: str, how: str) -> str:
    return {
        "truncated": text[: len(text) // 2],
        "empty": "",
        "a list": "[]",
        "edited": text.replace('"planned": 14', '"planned": 15'),
        "another version": text.replace('"schema_version": 1', '"schema_version": 2'),
        "loosened": text.replace('"bound": 0.', '"bound": 1.'),
    }[how]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "expected a file, found none"),
        ("truncated", "truncated or damaged"),
        ("empty", "truncated or damaged"),
        ("a list", "expected a JSON object"),
        ("edited", "edited or damaged"),
        ("loosened", "edited or damaged"),
        ("another version", "schema_version 1"),
    ],
)
def test_a_bad_envelope_ends_with_2_before_the_run(
    how: str, message: str, whole: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(suite, "run_cases", lambda *args, **kwargs: pytest.fail("the run was started"))
    if how != "missing":
        text = whole["envelope"].read_text()
        (folder / "env.json").write_text(damaged(text, how))
        assert damaged(text, how) != text
    assert run("check", *MICRO, "--envelope", "env.json") == 2
    err = capsys.readouterr().err
    assert "envelope env.json" in err and message in err
    force = "" if how == "missing" else " --force"
    assert f"lumotree-audit calibrate --backend torch --shape micro --envelope env.json{force}" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--backend", "sqrt_norm"), "expected backend 'sqrt_norm'"), (("--shape", "tiny"), "expected shape 'tiny'")],
)
def test_an_envelope_of_another_backend_or_shape_ends_with_2(
    words: tuple[str, ...], message: str, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", *MICRO, "--envelope", str(whole["envelope"]), *words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "name this backend's own with --envelope" in err and "--force" not in err  # it would write over the other's


def test_changed_judging_code_refuses_the_envelope(
    whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "code_sha256", lambda: "0" * 64)
    assert run("check", *MICRO, *whole["size"]) == 2
    assert "code_sha256 (the judging code)" in capsys.readouterr().err


def test_an_envelope_is_never_half_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "env.json").write_text("the old one")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("audit.families.micro_cases", lambda *args: micro_cases(*args)[:1])
    monkeypatch.setattr(os, "fsync", full)
    size = ("--sets", "1", "--instances", "2")
    assert run("calibrate", *MICRO, *size, "--envelope", "env.json", "--force") == 2
    assert (folder / "env.json").read_text() == "the old one"
    assert sorted(p for p in os.listdir(folder) if p != "__pycache__") == ["env.json", "kernels_of_cli.py"]
    monkeypatch.undo()
    os.chdir(folder)
    assert run("calibrate", *MICRO, *size, "--envelope", "env.json", "--force") == 0
    assert "envelope written: env.json" in capsys.readouterr().out
    assert json.loads((folder / "env.json").read_text())["planned"] == 2


def test_nothing_judged_never_ends_with_0(
    whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "family", lambda *args, **kwargs: [])
    assert run("check", *MICRO, *whole["size"]) == 3
    assert "zero cells judged" in capsys.readouterr().out


def test_known_backends_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("backends") == 0
    assert {"torch", "triton", "reference", "bank", "sglang"} <= set(capsys.readouterr().out.split())
