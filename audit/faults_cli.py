"""`lumotree-audit faults`: arguments, run, print, exit code."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from audit.arguments import natural


def register(commands: Any) -> None:
    """Add the command to the parser of `lumotree-audit`."""
    sub = commands.add_parser("faults", help="put every known fault in front of a backend: which check catches which")
    sub.add_argument("--backend", default="torch", help="built-in name, entry point, or module:object")
    sub.add_argument("--seed", type=natural, default=1, help="seed of the cases (default 1)")
    sub.add_argument("--full", action="store_true", help="measure detection probabilities and the smallest size seen, "
                     "on held-out cases (many minutes)")  # fmt: skip
    sub.add_argument("--quick", action="store_true", help="stop at the first check that catches a fault: the same "
                     "verdict, but not who else catches it")  # fmt: skip
    sub.add_argument("--trials", type=natural, default=30, help="with --full: runs of a fault (default 30)")
    sub.add_argument("--size-trials", type=natural, default=300, help="with --full: runs of each size (default 300)")
    sub.add_argument("--only", action="append", default=[], metavar="TEXT", help="faults whose id contains this "
                     "(repeatable)")  # fmt: skip
    sub.add_argument("--blind", action="store_true", help="only the faults written by somebody who had not read the "
                     "checks")  # fmt: skip
    sub.add_argument("--list", action="store_true", help="name the faults and run nothing")
    sub.add_argument("--workers", type=natural, default=None, help="worker processes, 0 = this one")
    sub.add_argument("--report", default=None, metavar="DIR", help="write report.json, junit.xml, summary.md, "
                     "matrix.svg and matrix.txt there")  # fmt: skip
    sub.set_defaults(run=run)


def run(args: argparse.Namespace, command: str) -> int:
    """Run the matrix; 0 if every reachable fault was caught, 1 if one was missed. Raises InputError."""
    from audit.fault_matrix import Plan, containing, run_matrix
    from audit.fault_report import to_report
    from audit.fault_sampler import sampler_rows
    from audit.files import write_atomically
    from audit.processes import peak_mib
    from audit.render import MATRIX, TABLES, start_report, write_report
    from audit.render.matrix import matrix_svg, matrix_text, print_matrix
    from audit.render.terminal import print_report
    from faults import EVERY
    from faults.sampler import SAMPLER_FAULTS

    started = time.perf_counter()
    own = [fault.id for fault in EVERY.values() if fault.blind or not args.blind]
    known = own if args.blind else [*own, *SAMPLER_FAULTS]
    chosen = containing("--only", args.only, known)
    if args.list:
        return _listed(chosen)
    if args.report:
        start_report(args.report)
    plan = Plan(args.backend, args.seed, args.full, max(args.trials, 1), max(args.size_trials, 1), args.quick)
    rows = run_matrix(plan, lambda fault: fault.id in chosen, args.workers) if set(chosen) & set(EVERY) else []
    if sampled := [name for name in chosen if name in SAMPLER_FAULTS]:
        rows += sampler_rows(args.seed, faults=sampled)
    report = to_report(rows, plan, command, time.perf_counter() - started, peak_mib())
    if args.report:
        write_report(report, args.report)
        pictures = {MATRIX: matrix_svg(rows), TABLES: matrix_text(rows)}
        write_atomically({Path(args.report) / name: text.encode() for name, text in pictures.items()})
    print_matrix(rows)
    print_report(report)
    return report.exit_code


def _listed(chosen: Sequence[str]) -> int:
    """One line a fault: id, sizes if it has any, statement."""
    from rich.console import Console
    from rich.text import Text

    from faults import EVERY
    from faults.sampler import SAMPLER_FAULTS

    out = Console()
    for name in chosen:
        knob = EVERY[name].knob if name in EVERY else None
        sizes = f" ({knob.unit}: {', '.join(f'{x:g}' for x in knob.sizes)})" if knob else ""
        statement = EVERY[name].statement if name in EVERY else SAMPLER_FAULTS[name].statement
        out.print(Text(f"{name}: {statement}{sizes}"), highlight=False, soft_wrap=True)
    return 0
