"""A report on disk: every file of it, or none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from audit.files import probe_writable, write_atomically
from audit.frame import FRAME_FILES, frame_bytes
from audit.render.continuation import PICTURE, drift_picture
from audit.render.decode import PICTURE as LENGTHS
from audit.render.json import render_json
from audit.render.junit import render_junit
from audit.render.markdown import render_markdown
from audit.report import Report
from lumotree.errors import ReportError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["check_writable", "start_report", "write_report"]

#: Names of a detection matrix's picture and of its tables.
MATRIX = "matrix.svg"
TABLES = "matrix.txt"

#: What commands put beside a report; one of their own is written after it.
PICTURES = (PICTURE, LENGTHS, MATRIX, TABLES)


def check_writable(folder: str | Path) -> None:
    """Prove that files can be made in the folder: ask before a long run. Raises ReportError."""
    target = Path(folder)
    try:
        probe_writable(target)
    except OSError as cause:
        raise ReportError(
            f"report folder {target}: expected a writable folder, found: {cause}; choose another"
        ) from cause


def start_report(folder: str | Path) -> None:
    """Make room for a run's report before the run: prove that files can be made, and remove an earlier run's.

    A run that is interrupted or refused must not leave the verdict of another one where its own is looked for. Other
    files stay. Raises ReportError.
    """
    check_writable(folder)
    try:
        for name in ("report.json", "junit.xml", "summary.md", *FRAME_FILES, *PICTURES):
            (Path(folder) / name).unlink(missing_ok=True)
    except OSError as cause:
        raise ReportError(f"report folder {folder}: cannot remove an earlier report: {cause}") from cause


def write_report(report: Report, folder: str | Path, frame: pd.DataFrame | None = None) -> list[Path]:
    """Write report.json, junit.xml, summary.md, with a frame the per-cell results, with a drift its picture; return the
    paths.

    Files of an earlier report in the same folder are replaced; its per-cell results and pictures do not stay behind.
    Raises ReportError, before anything is written, for a folder that cannot be written to.
    """
    target = Path(folder)
    texts = {"report.json": render_json, "junit.xml": render_junit, "summary.md": render_markdown}
    contents = {target / name: render(report).encode() for name, render in texts.items()}
    if frame is not None:
        name, data = frame_bytes(frame)
        contents[target / name] = data
    if (picture := drift_picture(report)) is not None:
        contents[target / PICTURE] = picture.encode()
    check_writable(target)
    try:
        write_atomically(contents)
        for stale in (target / name for name in (*FRAME_FILES, *PICTURES)):
            if stale not in contents:
                stale.unlink(missing_ok=True)
    except OSError as cause:
        raise ReportError(f"report folder {target}: cannot write the report: {cause}") from cause
    return list(contents)
