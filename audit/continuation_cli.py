"""`lumotree-audit continue`: arguments, and what they start."""

from __future__ import annotations

import argparse
from typing import Any

from audit.arguments import natural

#: Tokens of the drift as a part of `check`, where all suites together are to take minutes.
CHECK_DRIFT = 500


def register(commands: Any) -> None:
    """Add the command to the parser of `lumotree-audit`; `run` is called with the parsed arguments and the command."""
    sub = commands.add_parser("continue", help="judge what published states carry: whole cycles, live or recorded")
    sub.add_argument("--backend", default=None, help="built-in name, entry point, or module:object (default: torch; "
                     "with --dump the backend that the recording names; none = float64 bounds alone)")  # fmt: skip
    sub.add_argument("--surface", action="append", default=[], metavar="NAME=BACKEND", help="another backend for gdn, "
                     "conv or attention (repeatable)")  # fmt: skip
    sub.add_argument("--checkpoint", default=None, metavar="DIR", help="model folder (default: the shipped model)")
    sub.add_argument("--device", default="cpu", help="torch device, for example cuda")
    sub.add_argument("--seed", type=natural, default=1, help="seed of the plan (default 1)")
    sub.add_argument("--drift", type=natural, default=2_000, metavar="N", help="tokens decoded in one go, against "
                     "float64 (default 2,000; 0 = none)")  # fmt: skip
    sub.add_argument("--calibrated", type=natural, default=0, metavar="N", help="also judge by the spread of correct "
                     "native decoders on N calibration prefixes (default 0 = not; 24 is a good number)")  # fmt: skip
    sub.add_argument("--workers", type=natural, default=None, help="worker processes (default: one a core, at least 1)")
    sub.add_argument("--dump", default=None, metavar="DIR", help="judge cycles recorded elsewhere "
                     "(lumotree/recorder.py) instead of running any")  # fmt: skip
    sub.add_argument("--report", default=None, metavar="DIR", help="write report.json, junit.xml, summary.md there")
    sub.set_defaults(run=run)


def run(args: argparse.Namespace, command: str) -> int:
    """Run the command and return its exit code. Raises InputError."""
    from audit.render import start_report, write_report
    from audit.render.terminal import print_report

    if args.report:
        start_report(args.report)
    report, frame = _recorded(args, command) if args.dump is not None else _live(args, command)
    if args.report:
        write_report(report, args.report, frame)
    print_report(report)
    return int(report.exit_code)


def _recorded(args: argparse.Namespace, command: str) -> tuple[Any, None]:
    from audit.dump import DumpOptions, judge_dump
    from audit.suite import check_device
    from lumotree.errors import InputError
    from lumotree.model import load_model

    if args.surface:
        raise InputError("--dump: --surface belongs to live runs; the backend that recorded is one")
    check_device(args.device)
    head = load_model(args.checkpoint, args.device).draft_head() if args.checkpoint is not None else None
    return judge_dump(DumpOptions(args.dump, args.backend, head, command=command, device=args.device)), None


def _live(args: argparse.Namespace, command: str) -> tuple[Any, Any]:
    from audit import continuation
    from audit.suite import check_device

    check_device(args.device)
    run_ = continuation.check(options_of(args, command))
    return run_.report, run_.frame


def options_of(args: argparse.Namespace, command: str) -> Any:
    """`audit.continuation.Options` of the parsed arguments. Raises InputError for a surface without a backend."""
    from audit.continuation import Options
    from audit.continuation_stack import StackSpec
    from lumotree.errors import InputError

    surfaces = [tuple(text.split("=", 1)) for text in args.surface]
    odd = [text for text, pair in zip(args.surface, surfaces, strict=True) if len(pair) != 2 or not all(pair)]
    if odd:
        raise InputError(f"--surface: expected NAME=BACKEND, for example conv=sglang, got {odd[0]!r}")
    spec = StackSpec(args.checkpoint, args.backend or "torch", tuple(surfaces), args.device)
    return Options(spec, args.seed, args.drift, args.calibrated, args.workers, command)


def check(args: argparse.Namespace, command: str, nested: bool) -> int:
    """The suite as a part of `check`. nested: its report goes into a folder of its own. Raises InputError."""
    from audit import continuation
    from audit.continuation_stack import StackSpec
    from audit.render import start_report, write_report
    from audit.render.terminal import print_report
    from audit.suite import check_device

    check_device(args.device)
    folder = f"{args.report}/continuation" if args.report and nested else args.report
    if folder:
        start_report(folder)
    spec = StackSpec(backend=args.backend, device=args.device)
    options = continuation.Options(spec, args.seed, CHECK_DRIFT, workers=args.workers, command=command)
    done = continuation.check(options)
    if folder:
        write_report(done.report, folder, done.frame)
    print_report(done.report)
    return done.report.exit_code
