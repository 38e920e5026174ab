"""Judges a folder of recorded cycles offline: `lumotree-audit continue --dump DIR`."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audit.dump_controls import Controls
from audit.dump_judge import DUMP_CHECKS, DumpJudge, judged_dump
from audit.environment import environment
from audit.processes import one_thread
from audit.render.progress import Progress
from audit.report import Check, Control, Finding, Report, decide
from audit.tally import Tally
from lumotree.backends.loader import load_backend
from lumotree.errors import BackendError, RecordError
from lumotree.record_file import SUFFIX, CycleRecord, read_record

#: Surface -> group of a record that must be there for it to be covered.
GROUPS = {
    "gdn": "gdn",
    "conv": "conv",
    "attention": "attention",
    "kv_new": "committed",
    "kv_history": "history",
    "hidden": "hidden",
    "drafter": "drafter",
    "topology": "tree",
}


@dataclass(frozen=True)
class DumpOptions:
    """folder: of recorded cycles. backend: whose one-token step makes the chain; None = the one that the files name,
    "none" = no chain, float64 bounds and moved data alone. head: the model's draft head, None = entries not redone.
    controls: without them a recording can fail, but not pass. device: where backend and head run: bits are those of a
    device."""

    folder: str
    backend: str | None = None
    head: Any | None = None
    controls: bool = True
    device: str = "cpu"
    command: str = "lumotree-audit continue --dump"


def dump_files(folder: str | Path) -> list[Path]:
    """The recorded cycles of a folder, in order. Raises RecordError when there is none."""
    path = Path(folder)
    if not path.is_dir():
        raise RecordError(
            f"--dump {folder}: expected a folder of recorded cycles, found none; see lumotree/recorder.py"
        )
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise RecordError(f"--dump {folder}: expected files cycle-000000{SUFFIX} and on, found none")
    return files


def records(files: list[Path]) -> Iterator[CycleRecord]:
    """Read one after another; only one is in memory at a time."""
    for path in files:
        yield read_record(path)


def judge_dump(options: DumpOptions) -> Report:
    """Judge a recording. Raises InputError for files that are unusable and a backend that cannot be loaded."""
    started, files = time.perf_counter(), dump_files(options.folder)
    first = read_record(files[0])
    name = options.backend or first.backend or "none"
    judge, controls = DumpJudge(_backend(name, first), options.head, options.device), Controls()
    with one_thread(), Progress(len(files), "recorded cycles") as progress:
        for record in itertools.chain([first], records(files[1:])):
            if options.controls:
                controls.try_on(judge, record)
            judge.judge(record)
            progress.advance()
    return _report(options, name, first, judge, controls.results(), len(files), time.perf_counter() - started)


def _backend(name: str, first: CycleRecord) -> Any | None:
    if name == "none":
        return None
    backend = load_backend(name)
    if backend.contract != first.contract:
        theirs, ours = first.contract.as_dict(), backend.contract.as_dict()
        odd = [f"{k}={theirs[k]!r} (recorded) and {ours[k]!r}" for k in theirs if theirs[k] != ours[k]]
        raise BackendError(
            f"--dump: backend {name!r} declares another contract than the recording: {', '.join(odd)}; give the "
            "backend that recorded it with --backend, or --backend none"
        )
    return backend


def to_check(tally: Tally, first: CycleRecord) -> Check:
    """The report's line of a tally."""
    title, surface, rung = DUMP_CHECKS[tally.check]
    counts = judged_dump(tally.check, first)
    status = "info" if not counts else "fail" if tally.failed else "pass"
    bits = None if rung == "derived" else tally.bitwise
    note = f"{tally.failed} of {tally.cells} cells outside" if tally.failed else ""
    if tally.cells == 0:
        status, note = "inconclusive", "no cell was compared"
    bound = "derived" if rung == "derived" else None
    return Check(tally.check, title, surface, rung, status, tally.cells, bits, tally.worst, bound, note)


def _report(
    options: DumpOptions,
    name: str,
    first: CycleRecord,
    judge: DumpJudge,
    controls: list[Control],
    count: int,
    seconds: float,
) -> Report:
    checks = [to_check(judge.tallies[c], first) for c in DUMP_CHECKS if c in judge.tallies]
    judged = {c.surface for c in checks if c.cells and c.status != "info"}
    coverage = {s: "covered" if first.has(g) and s in judged else "not covered" for s, g in GROUPS.items()}
    if coverage["drafter"] == "covered" and judge.head is None:
        coverage["drafter"] = "verify only"
    doubts = _doubts(first, judge)
    verdict, reasons = decide(checks, controls, coverage, doubts=doubts)
    command = f"lumotree-audit continue --dump {shlex.quote(options.folder)}"
    if options.backend:
        command += f" --backend {shlex.quote(options.backend)}"
    failed = [c.id for c in checks if c.status == "fail"]
    findings = [
        Finding(p.check, p.case, command, p.request, p.layer, p.row, p.head, p.got, p.allowed)
        for check in failed
        for p in judge.tallies[check].places
    ]
    return Report(
        verdict=verdict,
        reasons=reasons,
        suite=f"continuation dump of {count} cycles",
        backend=name,
        contract=first.contract.as_dict(),
        environment={**environment(), "gpu": None},
        envelope=None,
        coverage=coverage,
        checks=tuple(checks),
        controls=tuple(controls),
        findings=tuple(sorted(findings, key=_when)),
        seed=0,
        command=options.command,
        wall_s=round(seconds, 2),
        facts={"recording": {"run": first.run, "cycles": count, "backend": first.backend}},
        created=environment()["date"],
    )


def _when(finding: Finding) -> tuple[int, int]:
    """Earliest cycle first, then the order of the checks: what went wrong first is what is wrong."""
    return int(finding.case.rpartition(" ")[2]), list(DUMP_CHECKS).index(finding.check)


def _doubts(first: CycleRecord, judge: DumpJudge) -> list[str]:
    """Why a PASS would mean nothing: a state that no cycle moved, or nothing recorded to recompute it from."""
    doubts = []
    if not first.has("gdn") and not first.has("attention"):
        doubts.append("the recording holds no operands of any layer, so no state could be recomputed")
    if not judge.carried:
        doubts.append("no request was recorded in two cycles: nothing shows what a later cycle found of an earlier one")
    for group, sequence in judge.lacking.items():
        doubts.append(f"cycle {sequence} was recorded without {group}, others with it: not all of them were judged")
    if judge.still:
        doubts.append(f"state and history of every request are the same in all cycles: {', '.join(judge.still)}")
    return doubts
