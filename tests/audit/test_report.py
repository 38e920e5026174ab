"""The verdict, and every way in which a report could contradict itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from audit.frame import COLUMNS, cells_frame, frame_bytes
from audit.report import EXIT_CODES, Check, Control, EnvelopeRef, Finding, Report, decide, from_json, to_json
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
FLAGGED = Control("poisoned inactive rows", "harmless", True, "gdn.state", 3.0, 24)
FINDING = Finding(
    "conv.state",
    "hydra27/set2",
    "lumotree-audit check --backend mypackage.kernels:Backend --case hydra27/set2/layer3 --path 0,1,2 --seed 31",
    request=0,
    layer=3,
    row=12,
    got=INF,
    allowed=0.0,
)
ENVELOPE = EnvelopeRef("envelopes/torch-27b.json", "c0ffee" + "0" * 58, "At most one in a million.")


def make_report(
    checks: tuple[Check, ...] = (GOOD, PAIRED), controls: tuple[Control, ...] = (SEEN, HARMLESS), **changes: Any
) -> Report:
    """A consistent report on the given checks and controls."""
    verdict, reasons = decide(checks, controls, COVERAGE)
    arguments: dict[str, Any] = {
        "verdict": verdict,
        "reasons": reasons,
        "suite": "27B hydra27",
        "backend": "torch",
        "contract": {"layout": "VK", "state_dtype": "float32"},
        "environment": {"processor": "Some CPU [x86]", "gpu": None, "torch": "2.13.0"},
        "envelope": ENVELOPE,
        "coverage": COVERAGE,
        "checks": checks,
        "controls": controls,
        "findings": (),
        "seed": 3,
        "command": "lumotree-audit check",
        "wall_s": 43.21,
        "peak_mib": 1200.0,
        "horizon": {"rows": 12.0, "slowest decay": INF},
        "created": "2026-01-01",
    }
    return Report(**(arguments | changes))


def test_all_green_passes() -> None:
    assert decide([GOOD, PAIRED], [SEEN, HARMLESS], COVERAGE) == ("PASS", ())


@pytest.mark.parametrize(
    ("checks", "controls", "coverage", "reason"),
    [
        ([GOOD], [SEEN, MISSED], COVERAGE, "control state not published was not detected"),
        ([GOOD], [SEEN, FLAGGED], COVERAGE, "control poisoned inactive rows is harmless but was flagged by gdn.state"),
        ([GOOD], [SEEN, replace(HARMLESS, cases=0)], COVERAGE, "control poisoned inactive rows ran on no case"),
        ([GOOD, OPEN], [SEEN], COVERAGE, "check gdn.env is inconclusive: no power: n=2"),
        ([PAIRED], [SEEN], COVERAGE, "zero cells judged"),
        ([], [SEEN], COVERAGE, "zero cells judged"),
        ([GOOD], [SEEN], {"gdn": "not covered"}, "the backend covers no surface"),
        ([GOOD], [SEEN], {}, "the backend covers no surface"),
        ([GOOD], [HARMLESS], COVERAGE, "no positive control ran"),
    ],
)
def test_a_run_without_power_is_inconclusive(checks: Any, controls: Any, coverage: Any, reason: str) -> None:
    assert decide(checks, controls, coverage) == ("INCONCLUSIVE", (reason,))


def test_doubts_of_the_caller_count() -> None:
    assert decide([GOOD], [SEEN], COVERAGE, doubts=["output is constant"]) == ("INCONCLUSIVE", ("output is constant",))


def test_controls_are_optional_only_when_asked() -> None:
    assert decide([GOOD], [], COVERAGE, controls_required=False) == ("PASS", ())


def test_fail_wins_but_hides_nothing() -> None:
    verdict, reasons = decide([GOOD, BAD, OPEN], [MISSED], COVERAGE)
    assert verdict == "FAIL"
    assert reasons == (
        "check conv.state failed: 88 cells differ",
        "check gdn.env is inconclusive: no power: n=2",
        "control state not published was not detected",
    )


def test_exit_codes() -> None:
    assert EXIT_CODES == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
    assert make_report().exit_code == 0
    assert make_report((GOOD, BAD)).exit_code == 1
    assert make_report((GOOD, OPEN)).exit_code == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checks": ()}, "PASS with zero judged cells is refused"),
        ({"checks": (PAIRED,)}, "PASS with zero judged cells is refused"),
        ({"checks": (GOOD, BAD)}, "PASS contradicts its content: check conv.state failed"),
        ({"checks": (GOOD, OPEN)}, "PASS contradicts its content: check gdn.env is inconclusive"),
        ({"controls": (MISSED,)}, "PASS contradicts its content: control state not published"),
        ({"coverage": {"gdn": "not covered"}}, "covers no surface"),
        ({"reasons": ("but",)}, "PASS takes no reasons, got but"),
        ({"verdict": "FAIL", "reasons": ("x",)}, "verdict FAIL, but a check failed: False"),
        ({"verdict": "FAIL"}, "verdict FAIL must give its reasons"),
        ({"verdict": "INCONCLUSIVE"}, "verdict INCONCLUSIVE must give its reasons"),
        ({"verdict": "INCONCLUSIVE", "reasons": ("x",), "checks": (BAD,)}, "a check failed: True"),
        ({"verdict": "GREEN"}, "expected verdict to be one of PASS, FAIL, INCONCLUSIVE, got verdict='GREEN'"),
        ({"coverage": {"gdn": "mostly"}}, "coverage of gdn: expected state to be one of covered"),
        ({"checks": (GOOD, GOOD)}, "check ids to be unique, got gdn.state more than once"),
        ({"schema_version": 2}, "expected schema_version 1, got 2"),
        ({"seed": "3"}, "report: expected seed to be int, got seed='3'"),
        ({"wall_s": None}, "expected wall_s to be float"),
    ],
)
def test_a_report_cannot_contradict_itself(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        replace(make_report(), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "ok"}, "check 'gdn.state': expected status to be one of pass, fail, inconclusive, info"),
        ({"id": ""}, "non-empty id"),
        ({"cells": -1, "bitwise_cells": None}, "cells >= 0, got cells=-1"),
        ({"cells": 0, "bitwise_cells": 0}, "cells > 0 for status pass, got zero cells"),
        ({"bitwise_cells": 2687}, "2687 of 2688 cells bitwise is no pass on rung bitwise"),
        ({"bitwise_cells": 2689}, "2689 bitwise of 2688 cells"),
        ({"worst_ratio": float("nan")}, "worst_ratio is NaN, use infinity"),
        ({"status": "inconclusive"}, "must give its reason in note"),
        ({"cells": np.int64(4), "bitwise_cells": None}, "expected cells to be int, got cells=np.int64"),
        ({"cells": True, "bitwise_cells": None}, "expected cells to be int, got cells=True"),
    ],
)
def test_a_check_cannot_contradict_itself(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        replace(GOOD, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expect": "seen"}, "expected expect to be one of detected, harmless"),
        ({"by": None}, "detected=True but by=None"),
        ({"detected": False}, "detected=False but by='gdn.state'"),
        ({"cases": 0}, "detected on zero cases"),
        ({"cases": -1}, "cases >= 0"),
        ({"fault": ""}, "non-empty fault name"),
    ],
)
def test_a_control_cannot_contradict_itself(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        replace(SEEN, **change)


def test_a_finding_must_be_reproducible() -> None:
    with pytest.raises(ReportError, match="expected a command in reproduce"):
        Finding("gdn.state", "case", " ")


def test_lists_are_accepted_and_frozen() -> None:
    report = replace(make_report(), warnings=["w"])  # type: ignore[arg-type]
    assert report.warnings == ("w",)


@pytest.mark.parametrize("checks", [(GOOD, PAIRED), (GOOD, BAD), (GOOD, OPEN)])
def test_json_round_trip(checks: tuple[Check, ...]) -> None:
    report = make_report(checks, findings=(FINDING,), warnings=("w",))
    text = json.dumps(to_json(report), allow_nan=False)
    assert from_json(json.loads(text)) == report
    assert '"slowest decay": "inf"' in text


def test_json_has_at_least_the_promised_fields() -> None:
    data = to_json(make_report((GOOD, BAD), findings=(FINDING,)))
    promised = "schema_version verdict backend contract environment envelope checks controls findings seed wall_s"
    assert set(promised.split()) <= set(data)
    assert {"path", "sha256", "guarantee"} == set(data["envelope"])
    assert {"id", "surface", "rung", "status", "cells", "bitwise_cells", "worst_ratio", "bound"} <= set(
        data["checks"][0]
    )
    assert {"fault", "detected", "by", "ratio"} <= set(data["controls"][0])
    assert {"check", "request", "layer", "row", "head", "got", "allowed", "reproduce"} <= set(data["findings"][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema_version=9), "expected schema_version 1, got 9"),
        (lambda d: d.pop("seed"), "report: missing or unknown fields: seed"),
        (lambda d: d.update(checks=None), "expected a list in checks, got None"),
        (lambda d: d["checks"][0].pop("rung"), "check: missing or unknown fields: rung"),
        (lambda d: d["checks"].append(3), "check: expected an object, got 3"),
        (lambda d: d["checks"][0].update(cells="many"), "check: expected cells to be int"),
        (lambda d: d["checks"][0].update(status="fail"), "a check failed: True|contradicts"),
        (lambda d: d["envelope"].pop("sha256"), "enveloperef: missing or unknown fields: sha256"),
    ],
)
def test_json_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    data = json.loads(json.dumps(to_json(make_report())))
    change(data)
    with pytest.raises(ReportError, match=message):
        from_json(data)


def test_json_refuses_objects() -> None:
    with pytest.raises(ReportError, match=r"plain data in contract\.dtype, got object"):
        to_json(replace(make_report(), contract={"dtype": object()}))


def test_cells_frame_orders_and_types_its_columns() -> None:
    frame = cells_frame([{"case": "a", "surface": "gdn", "statistic": "max", "value": 0.5, "row": 3, "depth": 2}])
    assert list(frame.columns) == [*COLUMNS, "depth"]
    assert frame["row"][0] == 3
    assert frame["head"].isna().all()
    with pytest.raises(KeyError, match="missing surface, value"):
        cells_frame([{"case": "a", "statistic": "max"}])
    assert list(cells_frame([]).columns) == list(COLUMNS)


def test_frame_bytes_are_reproducible() -> None:
    frame = cells_frame([{"case": "a", "surface": "gdn", "statistic": "max", "value": INF}])
    assert frame_bytes(frame) == frame_bytes(frame)


def test_control_as_expected() -> None:
    assert [c.as_expected for c in (SEEN, MISSED, HARMLESS, FLAGGED)] == [True, False, True, False]
    assert isinstance(make_report(), Report)
    assert not Control("x", "detected", False).as_expected
