"""`lumotree-audit clean`: right backends on random cases; every alarm is a false one."""

from __future__ import annotations

import argparse
import time
from typing import Any

from audit.arguments import natural


def register(commands: Any) -> None:
    """Add the command to the parser of `lumotree-audit`."""
    sub = commands.add_parser("clean", help="false alarms of the audit: right backends on random clean cases")
    sub.add_argument("--cases", type=natural, default=1_000, help="how many, over the backends in turn (default 1,000)")
    sub.add_argument("--first", type=natural, default=0, help="number of the first case (default 0)")
    sub.add_argument("--backends", default="torch,reference,bank,split_k,sqrt_norm,kv_layout,wy",
                     help="comma-separated (default: three bitwise ones, four correct ones that are not)")  # fmt: skip
    sub.add_argument("--seed", type=natural, default=1, help="seed of every draw (default 1)")
    sub.add_argument("--workers", type=natural, default=None, help="worker processes, 0 = this one")
    sub.add_argument("--report", default=None, metavar="DIR", help="write report.json, junit.xml, summary.md there")
    sub.set_defaults(run=run)


def run(args: argparse.Namespace, command: str) -> int:
    """Run the cases; 0 without a false alarm, 1 with one, 3 if there was none to run. Raises InputError."""
    from audit.clean import run_clean, to_report
    from audit.render import start_report, write_report
    from audit.render.terminal import print_report

    started = time.perf_counter()
    if args.report:
        start_report(args.report)
    found = run_clean(args.backends.split(","), args.cases, args.seed, args.workers, args.first)
    report = to_report(found, args.seed, command, time.perf_counter() - started)
    if args.report:
        write_report(report, args.report)
    print_report(report)
    return report.exit_code
