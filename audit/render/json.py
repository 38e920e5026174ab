"""`report.json`: the schema stands in `audit.report`."""

from __future__ import annotations

import json

from audit.report import Report, from_json, to_json
from lumotree.errors import ReportError


def render_json(report: Report) -> str:
    """Return strict JSON; fields stay in the order of the schema."""
    return json.dumps(to_json(report), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def parse_json(text: str) -> Report:
    """Read `render_json` back. Raises ReportError for text that is not JSON or does not fit the schema."""
    try:
        data = json.loads(text)
    except ValueError as cause:
        raise ReportError(f"report: expected JSON, found a truncated or damaged text ({cause})") from cause
    if not isinstance(data, dict):
        raise ReportError(f"report: expected a JSON object, found {type(data).__name__}")
    return from_json(data)
