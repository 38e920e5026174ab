"""`lumotree-audit others`: the same faults under acceptance rules that other projects publish."""

from __future__ import annotations

import argparse
import time
from typing import Any

from audit.arguments import natural


def register(commands: Any) -> None:
    """Add the command to the parser of `lumotree-audit`."""
    sub = commands.add_parser("others", help="the same faults under acceptance rules that other projects publish")
    sub.add_argument("--backend", default="torch", help="built-in name, entry point, or module:object")
    sub.add_argument("--clean-seeds", type=natural, default=3, help="seeds of the runs of right kernels (default 3)")
    sub.add_argument("--report", default=None, metavar="DIR", help="write report.json, junit.xml, summary.md there")
    sub.set_defaults(run=run)


def run(args: argparse.Namespace, command: str) -> int:
    """0 if our own checks caught every fault that was reached. Raises InputError."""
    from audit.others import compare, to_report
    from audit.processes import one_thread
    from audit.render import start_report, write_report
    from audit.render.others import print_comparison
    from audit.render.terminal import print_report

    started = time.perf_counter()
    if args.report:
        start_report(args.report)
    with one_thread():
        found = compare(args.backend, args.clean_seeds)
    report = to_report(found, args.backend, command, time.perf_counter() - started)
    if args.report:
        write_report(report, args.report)
    print_comparison(found)
    print_report(report)
    return report.exit_code
