"""`lumotree-audit continue`: arguments, and what they start."""

from __future__ import annotations

import argparse
from typing import Any


def register(commands: Any) -> None:
    """Add the command to the parser of `lumotree-audit`; `run` is called with the parsed arguments and the command."""
    sub = commands.add_parser("continue", help="judge what published states carry: whole cycles, recorded or live")
    sub.add_argument("--dump", default=None, metavar="DIR", help="judge cycles recorded elsewhere "
                     "(lumotree/recorder.py) instead of running any")  # fmt: skip
    sub.add_argument("--backend", default=None, help="built-in name, entry point, or module:object (default: torch; "
                     "with --dump the backend that the recording names, or none for float64 bounds alone)")  # fmt: skip
    sub.add_argument("--report", default=None, metavar="DIR", help="write report.json, junit.xml, summary.md there")
    sub.set_defaults(run=run)


def run(args: argparse.Namespace, command: str) -> int:
    """Run the command and return its exit code. Raises InputError."""
    from audit.dump import DumpOptions, judge_dump
    from audit.render import check_writable, write_report
    from audit.render.terminal import print_report
    from lumotree.errors import InputError

    if args.report:
        check_writable(args.report)
    if args.dump is None:
        raise InputError("continue: expected --dump DIR, a folder of recorded cycles; see lumotree/recorder.py")
    report = judge_dump(DumpOptions(args.dump, args.backend, command=command))
    if args.report:
        write_report(report, args.report)
    print_report(report)
    return report.exit_code
