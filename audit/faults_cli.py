"""`lumotree-audit faults`: arguments, run, print, exit code."""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any


def count(text: str) -> int:
    """An integer of at least 0 from the command line."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected an integer >= 0, got {text!r}")
    return int(text)


def register(commands: Any) -> None:
    """Add the command to the parser of `lumotree-audit`."""
    sub = commands.add_parser("faults", help="put every known fault in front of a backend: which check catches which")
    sub.add_argument("--backend", default="torch", help="built-in name, entry point, or module:object")
    sub.add_argument("--seed", type=count, default=1, help="seed of the cases (default 1)")
    sub.add_argument("--full", action="store_true", help="measure detection probabilities and the smallest size seen, "
                     "on held-out cases (many minutes)")  # fmt: skip
    sub.add_argument("--trials", type=count, default=30, help="with --full: runs of a fault (default 30)")
    sub.add_argument("--size-trials", type=count, default=300, help="with --full: runs of each size (default 300)")
    sub.add_argument("--only", action="append", default=[], metavar="TEXT", help="faults whose id contains this "
                     "(repeatable)")  # fmt: skip
    sub.add_argument("--blind", action="store_true", help="only the faults written by somebody who had not read the "
                     "checks")  # fmt: skip
    sub.add_argument("--list", action="store_true", help="print a line for every fault")
    sub.add_argument("--workers", type=count, default=None, help="worker processes, 0 = this one")
    sub.add_argument("--report", default=None, metavar="DIR", help="write report.json, junit.xml, summary.md and "
                     "matrix.svg there")  # fmt: skip
    sub.set_defaults(run=run)


def run(args: argparse.Namespace, command: str) -> int:
    """Run the matrix; 0 if every reachable fault was caught, 1 if one was missed. Raises InputError."""
    from audit.fault_matrix import Plan, every_fault, run_matrix
    from audit.fault_report import to_report
    from audit.fault_sampler import sampler_rows
    from audit.files import write_atomically
    from audit.render import MATRIX, start_report, write_report
    from audit.render.matrix import matrix_svg, print_matrix
    from audit.render.terminal import print_report
    from faults import EVERY
    from faults.sampler import SAMPLER_FAULTS
    from lumotree.errors import InputError

    started = time.perf_counter()
    if args.report:
        start_report(args.report)
    own = [fault.id for fault in every_fault() if fault.blind or not args.blind]
    known = own if args.blind else [*own, *SAMPLER_FAULTS]
    chosen = [name for name in known if not args.only or any(text in name for text in args.only)]
    if not chosen:
        raise InputError(f"--only: no fault's id contains {args.only[0]!r}; for example: {', '.join(known[:3])}")
    plan = Plan(args.backend, args.seed, args.full, max(args.trials, 1), max(args.size_trials, 1))
    rows = run_matrix(plan, lambda fault: fault.id in chosen, args.workers) if set(chosen) & set(EVERY) else []
    if set(chosen) & set(SAMPLER_FAULTS):
        rows += [row for row in sampler_rows(args.seed) if row.fault in chosen]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report = to_report(rows, plan, command, time.perf_counter() - started, round(peak, 1))
    if args.report:
        write_report(report, args.report)
        write_atomically({Path(args.report) / MATRIX: matrix_svg(rows).encode()})
    print_matrix(rows, every=args.list)
    print_report(report)
    return report.exit_code
