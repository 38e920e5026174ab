"""`junit.xml`: what continuous integration systems read. One test case for each check and each control.

A failed check is a `failure`; whatever leaves the run without a verdict is an `error`; a check that is only reported
is `skipped`. If the verdict is not PASS for a reason that no test case carries, one more named `verdict` does, so that
the file is green only for PASS.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from audit.render.text import count, number, outcome
from audit.report import Check, Control, Report

#: XML 1.0 has no way to write these characters, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(report: Report) -> str:
    """Return the XML text."""
    suite = ET.Element("testsuite", name=_clean(f"lumotree-audit {report.suite}"), time=f"{report.wall_s:.3f}")
    if report.created:
        suite.set("timestamp", _clean(report.created))
    for check in report.checks:
        _add_check(suite, check)
    for control in report.controls:
        _add_control(suite, control)
    if report.verdict != "PASS" and suite.find("testcase/failure") is None and suite.find("testcase/error") is None:
        _add_trouble(_case(suite, "verdict", "verdict"), "error", "; ".join(report.reasons))
    counts = {"tests": "testcase", "failures": "testcase/failure", "errors": "testcase/error"}
    for name, path in {**counts, "skipped": "testcase/skipped"}.items():
        suite.set(name, str(len(suite.findall(path))))
    root = ET.Element("testsuites", {k: v for k, v in suite.attrib.items() if k not in ("timestamp", "skipped")})
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _add_check(suite: ET.Element, check: Check) -> None:
    case = _case(suite, f"check.{check.surface}", f"{check.id}: {check.title}")
    detail = (
        f"rung {check.rung}, cells {count(check.cells)}, bitwise {count(check.bitwise_cells)}, "
        f"worst/bound {number(check.worst_ratio)}, bound {number(check.bound)}"
    )
    if check.status == "fail":
        _add_trouble(case, "failure", f"{check.note or check.title}; {detail}")
    elif check.status == "inconclusive":
        _add_trouble(case, "error", f"{check.note}; {detail}")
    elif check.status == "info":
        _add_trouble(case, "skipped", f"reported, not judged; {detail}")
    else:
        ET.SubElement(case, "system-out").text = _clean(detail)


def _add_control(suite: ET.Element, control: Control) -> None:
    case = _case(suite, "control", f"{control.fault} ({control.expect})")
    detail = f"{outcome(control)}, ratio {number(control.ratio)}, cases {count(control.cases)}"
    if control.as_expected:
        ET.SubElement(case, "system-out").text = _clean(detail)
    else:
        _add_trouble(case, "error", f"expected {control.expect}, got: {detail}")


def _case(suite: ET.Element, group: str, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=_clean(f"lumotree-audit.{group}"), name=_clean(name), time="0")


def _add_trouble(case: ET.Element, kind: str, message: str) -> None:
    element = ET.SubElement(case, kind, message=_clean(message))
    if kind != "skipped":
        element.set("type", kind)


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
