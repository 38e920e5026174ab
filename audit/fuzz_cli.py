"""`lumotree-audit fuzz`: arguments, and what they start."""

from __future__ import annotations

import argparse
import math
from typing import Any

from audit.arguments import natural, positive


def register(commands: Any) -> None:
    """Add the command to the parser of `lumotree-audit`; `run` is called with the parsed arguments and the command."""
    sub = commands.add_parser("fuzz", help="many-step programs and metamorphic relations on a backend")
    sub.add_argument("--backend", default="torch", help="built-in name, entry point, or module:object")
    length = sub.add_mutually_exclusive_group()
    length.add_argument("--examples", type=positive, default=300, metavar="N", help="programs to draw (default 300)")
    length.add_argument("--minutes", type=_minutes, default=None, metavar="M", help="draw programs for so long instead")
    sub.add_argument("--shape", default="nano", help="nano (default) or micro")
    sub.add_argument("--seed", type=natural, default=1, help="seed of every draw (default 1)")
    sub.add_argument("--database", default=".lumotree/fuzz", metavar="DIR", help="stored failures, replayed first "
                     "(default .lumotree/fuzz)")  # fmt: skip
    sub.add_argument("--relation", action="append", default=[], metavar="NAME", help="this metamorphic relation alone "
                     "(repeatable)")  # fmt: skip
    sub.add_argument("--workers", type=natural, default=None, help="worker processes, 0 = this one (default: one a "
                     "core, up to four)")  # fmt: skip
    sub.add_argument("--script", default=None, metavar="FILE", help="write the smallest failing program there as well")
    sub.add_argument("--report", default=None, metavar="DIR", help="write report.json, junit.xml, summary.md there")
    sub.set_defaults(run=run)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected minutes > 0, got {text!r}")
    return value


def run(args: argparse.Namespace, command: str) -> int:
    """Run the command and return its exit code. Raises InputError."""
    from pathlib import Path

    from rich.console import Console

    from audit.files import probe_writable
    from audit.fuzz import FuzzOptions, fuzz
    from audit.render import start_report, write_report
    from audit.render.terminal import print_report
    from audit.runner import default_workers
    from lumotree.errors import InputError

    if args.report:
        start_report(args.report)
    if args.script:
        try:
            probe_writable(Path(args.script).resolve().parent)
        except OSError as cause:
            raise InputError(f"--script {args.script}: expected a file that can be written, found: {cause}") from cause
    workers = default_workers("cpu") if args.workers is None else args.workers
    options = FuzzOptions(
        args.backend, args.examples, args.minutes, args.shape, args.seed, args.database, tuple(args.relation), command,
        workers,
    )  # fmt: skip
    result = fuzz(options)
    out = Console()
    if result.code:
        out.print("the smallest failing program:\n", highlight=False)
        out.print(result.code, markup=False, highlight=False, soft_wrap=True)
    if result.code and args.script:
        Path(args.script).write_text(result.code)
    if result.rate:
        clock, cpu = result.rate
        who = f" with {workers} workers" if workers else ""
        out.print(f"{clock:.0f} programs a second{who}, {cpu:.0f} a second of processor time", highlight=False)
    if args.report:
        write_report(result.report, args.report)
    print_report(result.report)
    return result.report.exit_code
