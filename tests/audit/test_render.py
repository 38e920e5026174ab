"""What a person, a log, a continuous integration system and a pull request get to see."""

from __future__ import annotations

import io
import os
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

import audit
from audit.frame import cells_frame
from audit.render import check_writable, start_report, write_report
from audit.render.json import parse_json, render_json
from audit.render.junit import render_junit
from audit.render.markdown import render_markdown
from audit.render.progress import Progress
from audit.render.terminal import print_report
from audit.render.text import advice
from audit.report import Check, Control, EnvelopeRef, Finding, Report, decide
from lumotree.errors import ReportError

INF = float("inf")
COVERAGE = {"gdn": "covered", "conv": "verify only", "kv": "not covered"}
GOOD = Check("gdn.state", "published states", "gdn", "bitwise", "pass", 2688, 2688, 0.0, "bitwise")
PAIRED = Check("gdn.paired", "paired rule", "gdn", "paired", "info", 3072, None, 1.003, "section 6", "reported only")
BAD = Check("conv.state", "conv history", "conv", "bitwise", "fail", 2688, 2600, INF, "bitwise", "88 cells differ")
OPEN = Check("gdn.env", "envelope", "gdn", "envelope", "inconclusive", 2, note="no power: n=2")
SEEN = Control("wrong parent", "detected", True, "gdn.state", INF, 24)
MISSED = Control("state not published", "detected", False, None, 0.5, 24)
HARMLESS = Control("poisoned inactive rows", "harmless", False, None, None, 24)
FLAGGED = replace(HARMLESS, detected=True, by="gdn.state", ratio=3.0)
COMMAND = "lumotree-audit check --backend mypackage.kernels:Backend --case hydra27/set2/layer3 --path 0,1,2 --seed 31"


def finding(check: str, row: int, case: str = "hydra27/set2") -> Finding:
    return Finding(check, case, COMMAND, request=0, layer=3, row=row, got=INF, allowed=0.0)


FINDING = Finding("conv.state", "hydra27/set2", COMMAND, request=0, layer=3, row=12, got=INF, allowed=0.0)


#: Two places in each of seven checks.
MANY = tuple(finding(f"conv.state{n}", row) for n in ("", *"123456") for row in (14, 12))


def make_report(
    checks: tuple[Check, ...] = (GOOD, PAIRED), controls: tuple[Control, ...] = (SEEN, HARMLESS), **changes: Any
) -> Report:
    """A consistent report on the given checks and controls."""
    verdict, reasons = decide(checks, controls, COVERAGE)
    made = Report(
        verdict=verdict,
        reasons=reasons,
        suite="27B hydra27",
        backend="torch",
        contract={"layout": "VK"},
        environment={"processor": "Some CPU [x86]", "gpu": None, "torch": "2.13.0"},
        envelope=EnvelopeRef("envelopes/torch-27b.json", "c0ffee" + "0" * 58, "At most one in a million."),
        coverage=COVERAGE,
        checks=checks,
        controls=controls,
        findings=(),
        seed=3,
        command="lumotree-audit check",
        wall_s=43.21,
        horizon={"slowest decay": INF},
        created="2026-01-01",
    )
    return replace(made, **changes)


LONG = Check(
    "x.long",
    "a title that goes on and on, far beyond what any column of a terminal could ever hold",
    "attention",
    "derived bound",
    "pass",
    123_456_789,
    123_456_788,
    1.23456e-30,
    note="a rather long note " * 6,
)
REPORTS = {
    "PASS": make_report((GOOD, PAIRED, LONG)),
    "FAIL": make_report((GOOD, BAD, OPEN), (SEEN, MISSED), findings=MANY, warnings=("another [cpu] " * 9,)),
    "INCONCLUSIVE": make_report((GOOD, OPEN), (SEEN, MISSED, FLAGGED)),
}


def printed(report: Report, width: int = 80, terminal: bool = False) -> str:
    out = io.StringIO()
    print_report(
        report, Console(file=out, width=width, force_terminal=terminal, color_system="standard" if terminal else "auto")
    )
    return out.getvalue()


@pytest.mark.parametrize("verdict", REPORTS)
def test_a_log_gets_no_colour_and_no_line_over_80(verdict: str) -> None:
    text = printed(REPORTS[verdict])
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.splitlines()[-1].startswith(verdict)


def test_colour_changes_nothing_but_colour() -> None:
    plain, colour = printed(REPORTS["FAIL"]), printed(REPORTS["FAIL"], terminal=True)
    assert "\x1b[" in colour
    assert re.sub(r"\x1b\[[0-9;]*m", "", colour) == plain


def test_the_last_line_of_a_pass_says_what_it_rests_on() -> None:
    report = make_report()
    assert printed(report, 120).splitlines()[-1] == (
        "PASS  torch  27B hydra27  2,688 cells bitwise, 1/1 controls detected, envelope torch-27b.json (c0ffee..)"
    )
    assert "c0ffee" in printed(report, 80).splitlines()[-1]
    assert "envelope" not in printed(replace(report, envelope=None)).splitlines()[-1]
    assert printed(report, 30).splitlines()[-1] == "PASS  torch  27B hydra27"
    assert printed(report, 20).splitlines()[-1] == "PASS  torch  27B ..."


def test_a_pass_without_a_bitwise_rung_counts_judged_cells() -> None:
    derived = replace(GOOD, rung="derived bound", bitwise_cells=2000)
    assert "2,688 cells judged" in printed(make_report((derived,))).splitlines()[-1]


def test_the_table_shows_every_check_and_control() -> None:
    text = printed(REPORTS["INCONCLUSIVE"])
    for word in (
        "published states",
        "2,688",
        "open",
        "MISSED",
        "FLAGGED by gdn",
        "1/2 detected",
        "kv not covered",
    ):
        assert word in text
    assert "- check gdn.env is inconclusive: no power: n=2" in text
    assert text.splitlines()[-1].endswith("(+2 more)")


def test_an_inconclusive_run_says_what_to_do_about_each_kind_of_reason_once() -> None:
    text = " ".join(printed(REPORTS["INCONCLUSIVE"]).split())
    assert text.count("what to do: more or other cases may reach it") == 1
    assert text.count("what to do: the kernel reads rows that are inactive: mask them") == 1
    assert "what to do" not in printed(REPORTS["FAIL"]) + printed(REPORTS["PASS"])


def test_every_doubt_that_ends_a_run_open_has_advice() -> None:
    sources = ("report", "assemble", "decode", "continuation_report", "dump")
    text = "".join((Path(audit.__file__).parent / f"{name}.py").read_text(encoding="utf-8") for name in sources)
    reasons = re.findall(r'(?:open_|doubts)\.append\(\s*f?"([^"]+)"', text)
    assert len(reasons) >= 10
    for reason in reasons:
        assert advice(make_report((GOOD,), (MISSED,), reasons=(reason,))), reason


def test_a_pass_with_a_long_suite_keeps_its_numbers_at_80_columns() -> None:
    last = printed(make_report((GOOD,), (SEEN,), suite="decode 86 prompts, 1024 tokens, all of them")).splitlines()[-1]
    assert len(last) <= 80 and last.endswith("1/1 controls")


def test_a_fail_shows_the_findings_of_five_checks_with_their_commands() -> None:
    text = printed(REPORTS["FAIL"])
    assert text.count("  first in hydra27/set2, request 0, layer 3, row 12: inf, ") == 5
    assert "row 14" not in text and "conv.state: 2 findings, worst inf x bound\n" in text
    assert "findings of 2 more checks in report.json" in text
    assert text.splitlines()[-1] == "FAIL  torch  27B hydra27  1 of 3 checks failed: conv.state"
    joined = text.replace(" \\\n    ", " ")
    assert f"  {FINDING.reproduce}\n" in joined  # the backslash lines paste as one command


def test_findings_of_a_check_are_one_paragraph_with_the_count_the_worst_and_the_first_place() -> None:
    found = [finding("conv.state", row, case) for case, row in (("b", 9), ("b", 4), ("a", 0), ("b", 4))]
    bad = replace(BAD, worst_ratio=41.5, note="312 of 2688 cells outside")
    text = printed(make_report((GOOD, bad), findings=tuple(found)))
    assert text.count("conv.state: 312 of 2688 cells outside, worst 41.5 x bound\n") == 1
    assert text.count("first in") == 1 and "  first in b, request 0, layer 3, row 4: inf, allowed 0\n" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    alone = printed(make_report((GOOD, replace(bad, worst_ratio=None, note="")), findings=(found[2],)))
    assert "\nconv.state: 1 finding\n  first in a, " in alone


@pytest.mark.parametrize("command", ["A=1 run | tee log", 'run "$X"', "run 'unclosed"])
def test_commands_that_quoting_would_change_are_left_alone(command: str) -> None:
    report = make_report((GOOD, BAD), findings=(replace(FINDING, reproduce=command),))
    assert f"\n  {command}\n" in printed(report)


def test_brackets_are_no_markup() -> None:
    assert "[red]x[/nope]" in printed(make_report(warnings=("[red]x[/nope]",)))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def loop(seconds: int, terminal: bool) -> str:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=80, force_terminal=terminal, color_system="standard" if terminal else None)
    with Progress(seconds, "held-out", console, clock) as progress:
        for step in range(seconds):
            clock.now += 1.0
            progress.advance(note=f"layer {step} [x]")
    return out.getvalue()


def test_progress_in_a_log_is_a_line_every_five_seconds() -> None:
    lines = loop(21, terminal=False).splitlines()
    assert lines[0] == "held-out: 2/21, 2 s, layer 1 [x]"  # too few to tell how long the rest takes
    assert lines[1] == "held-out: 7/21, 7 s, about 14 s left, layer 6 [x]"
    assert [line.split("/")[0] for line in lines] == [f"held-out: {n}" for n in (2, 7, 12, 17)]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_short_loop_says_nothing(terminal: bool) -> None:
    assert loop(1, terminal) == ""


def test_progress_on_a_terminal_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in loop(21, terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert loop(21, terminal=True).splitlines()[0].startswith("held-out: 2/21")


@pytest.mark.parametrize("verdict", REPORTS)
def test_json_text_round_trip(verdict: str) -> None:
    assert parse_json(render_json(REPORTS[verdict])) == REPORTS[verdict]


@pytest.mark.parametrize(("text", "message"), [('{"a": ', "truncated or damaged"), ("[]", "expected a JSON object")])
def test_json_text_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        parse_json(text)


def suite_of(report: Report) -> ET.Element:
    suite = ET.fromstring(render_junit(report).encode()).find("testsuite")
    assert suite is not None
    for name, path in (("tests", "testcase"), ("failures", "testcase/failure"), ("errors", "testcase/error")):
        assert suite.get(name) == str(len(suite.findall(path)))
    return suite


def test_junit_of_a_pass_is_green() -> None:
    suite = suite_of(REPORTS["PASS"])
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "5",
        "0",
        "0",
        "1",
    )


def test_junit_marks_failures_and_errors() -> None:
    suite = suite_of(REPORTS["FAIL"])
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "1", "2")
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert str(failure.get("message")).startswith("88 cells differ; rung bitwise, cells 2,688, bitwise 2,600")


def test_junit_is_never_green_for_a_run_without_verdict() -> None:
    report = make_report((GOOD,), (HARMLESS,))
    assert report.verdict == "INCONCLUSIVE"
    suite = suite_of(report)
    assert suite.get("errors") == "1"
    assert "no positive control ran" in ET.tostring(suite, encoding="unicode")


def test_junit_survives_characters_that_xml_forbids() -> None:
    suite = suite_of(make_report((GOOD, replace(BAD, note="<nul \x00 & escape \x1b>"))))
    messages = [node.get("message", "") for node in suite.iter("failure")]
    assert any("<nul" in m and "& escape" in m for m in messages)
    assert not any(c in m for m in messages for c in "\x00\x1b")


def test_markdown_has_everything_and_its_tables_hold() -> None:
    text = render_markdown(replace(REPORTS["FAIL"], command="a | b"))
    for word in ("# FAIL", "## Checks", "## Controls", "## Findings", "## Warnings", FINDING.reproduce, "a \\| b"):
        assert word in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def frame() -> pd.DataFrame:
    return cells_frame([{"case": "a", "surface": "gdn", "statistic": "max", "value": 0.25, "row": 3}])


def test_write_report_writes_all_files(tmp_path: Path) -> None:
    paths = write_report(REPORTS["PASS"], tmp_path / "out", frame())
    assert sorted(p.name for p in paths) == sorted(os.listdir(tmp_path / "out"))
    assert {"report.json", "junit.xml", "summary.md"} < {p.name for p in paths}
    assert parse_json((tmp_path / "out" / "report.json").read_text()) == REPORTS["PASS"]
    cells = next(p for p in paths if p.name.startswith("cells"))
    back = pd.read_parquet(cells) if cells.suffix == ".parquet" else pd.read_csv(cells)
    assert back["value"].tolist() == [0.25]


@pytest.mark.parametrize(
    ("suite", "got", "allowed", "words"),
    [("component 27B hydra27", 0.5, 0.25, "0.5, expected 0.25"),
     ("calibration tiny hydra27", 0.5, 0.25, "0.5, expected 0.25"),
     ("continuation", 0.5, 0.25, "0.5, allowed 0.25"), ("sampler", 0.5, "never", "0.5, expected never"),
     ("component", 0.5, "1.00e-02 of it", "error 0.5, of which 1.0% is allowed"),
     ("component", float("nan"), "0.00e+00 of it", "error nan, of which nothing is allowed"),
     ("fuzz nano, 12 programs", "row 3 differs", None, "row 3 differs")],
)  # fmt: skip
def test_a_finding_says_what_was_expected_or_how_much_is_allowed(
    suite: str, got: Any, allowed: Any, words: str
) -> None:
    check = replace(GOOD, id="conv.state", status="fail", note="1 cells outside")
    report = make_report((check,), findings=(replace(FINDING, got=got, allowed=allowed),), suite=suite)
    assert f": {words}\n" in render_markdown(report)
    assert f"row 12: {words}\n" in printed(report, 120)


def test_cells_and_pictures_of_an_earlier_report_do_not_stay(tmp_path: Path) -> None:
    write_report(REPORTS["PASS"], tmp_path, frame())
    for name in ("drift.svg", "accepted-length.svg", "matrix.svg", "matrix.txt"):
        (tmp_path / name).write_text("<svg/>")
    write_report(REPORTS["FAIL"], tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["junit.xml", "report.json", "summary.md"]


def test_an_unwritable_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        for attempt in (lambda f=folder: check_writable(f), lambda f=folder: write_report(REPORTS["PASS"], f)):
            with pytest.raises(ReportError, match=f"report folder {folder}: expected a writable folder"):
                attempt()
    assert os.listdir(tmp_path) == ["file"]


def test_a_report_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(REPORTS["PASS"], tmp_path)
    calls = []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 1:  # the second file of the new report meets a full disk
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match="No space left"):
        write_report(REPORTS["FAIL"], tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["junit.xml", "report.json", "summary.md"]
    assert parse_json((tmp_path / "report.json").read_text()).verdict == "PASS"


def test_check_writable_leaves_no_trace(tmp_path: Path) -> None:
    check_writable(tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_a_started_report_leaves_no_earlier_verdict_and_what_is_not_its_own(tmp_path: Path) -> None:
    write_report(REPORTS["PASS"], tmp_path, frame())
    for name in ("drift.svg", "accepted-length.svg", "matrix.svg", "matrix.txt", "notes.txt"):
        (tmp_path / name).write_text("")
    start_report(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_an_earlier_report_that_cannot_be_removed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(ReportError, match="cannot remove an earlier report"):
        start_report(tmp_path)


def test_an_infinite_ratio_is_readable_everywhere() -> None:
    report = make_report((GOOD, BAD))
    assert report.checks[1].worst_ratio == INF
    for text in (printed(report), render_markdown(report), render_junit(report), render_json(report)):
        assert "inf" in text
