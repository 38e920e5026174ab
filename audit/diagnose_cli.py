"""`lumotree-audit diagnose`: which known defect a failing kernel looks like."""

from __future__ import annotations

import argparse
import time
from typing import Any

from audit.arguments import natural


def register(commands: Any) -> None:
    """Add the command to the parser of `lumotree-audit`."""
    sub = commands.add_parser("diagnose", help="name the known defect that a failing kernel looks like")
    sub.add_argument("--backend", default=None, help="built-in name, entry point, or module:object (default torch)")
    sub.add_argument("--seed", type=natural, default=1, help="seed of the small cases (default 1)")
    sub.add_argument("--surface", action="append", default=[], choices=("gdn", "conv", "attention"),
                     help="this surface alone (repeatable)")  # fmt: skip
    sub.add_argument("--only", default=None, metavar="CASE", help="a case of `check` that fails, instead of small ones")
    sub.add_argument("--evaluate", type=natural, default=0, metavar="N", help="measure the diagnosis itself: every "
                     "fault of the catalogue on N held-out seeds (many minutes)")  # fmt: skip
    sub.add_argument("--faults", action="append", default=[], metavar="TEXT", help="with --evaluate: only faults whose "
                     "id contains this (repeatable)")  # fmt: skip
    sub.add_argument("--workers", type=natural, default=None, help="worker processes of --evaluate, 0 = this one")
    sub.add_argument("--report", default=None, metavar="DIR", help="with --evaluate: write report.json there")
    sub.set_defaults(run=run)


def run(args: argparse.Namespace, command: str) -> int:
    """0 if no small case fails, 1 if one does, whatever its defect; with --evaluate as any report."""
    from lumotree.errors import InputError

    given = {"--backend": args.backend, "--only": args.only, "--surface": args.surface} if args.evaluate else {
        "--faults": args.faults, "--report": args.report, "--workers": args.workers}  # fmt: skip
    for option, value in given.items():
        if value not in (None, []):
            without = "does not go with --evaluate, which measures our own kernels" if args.evaluate else (
                "says how --evaluate measures, expected --evaluate N with it")  # fmt: skip
            raise InputError(f"diagnose: {option} {without}")
    if args.evaluate:
        return _evaluate(args, command)
    args.backend = args.backend or "torch"

    from audit.diagnose import diagnose
    from audit.processes import one_thread
    from audit.render.diagnosis import print_diagnoses
    from lumotree.backends.loader import load_backend
    from lumotree.backends.protocol import covered_surfaces

    covered = covered_surfaces(load_backend(args.backend))
    missing = [s for s in args.surface or covered if not all(covered[s])]
    if missing and (args.surface or len(missing) == len(covered)):
        raise InputError(f"diagnose: backend {args.backend!r} has no {', '.join(missing)}: no case could fail")
    with one_thread():
        found = diagnose(lambda: load_backend(args.backend), args.seed, args.surface or None, _chosen(args))
    print_diagnoses([d.as_dict() for d in found], args.backend, args.seed)
    return 1 if found else 0


def _chosen(args: argparse.Namespace) -> list[Any] | None:
    """The case of `check` that was named in front of the small ones. Raises InputError if there is none."""
    if args.only is None:
        return None
    from audit.families import SHAPES, family
    from audit.fault_cases import ladder
    from lumotree.errors import InputError

    small = list(ladder(args.seed))
    splits = ("calibration", "heldout")
    known = {s.id: s for shape in SHAPES.values() for split in splits for s in family(shape, split, args.seed)}
    known |= {s.id: s for s in small}
    if args.only not in known:
        raise InputError(f"--only: unknown case {args.only!r}; for example: {', '.join([s.id for s in small][:3])}")
    return [known[args.only], *small]


def _evaluate(args: argparse.Namespace, command: str) -> int:
    from audit.diagnose_eval import run_evaluation, to_report
    from audit.render import start_report, write_report
    from audit.render.terminal import print_report

    started = time.perf_counter()
    if args.report:
        start_report(args.report)
    verdicts = run_evaluation(args.evaluate, args.workers, only=args.faults)
    report = to_report(verdicts, command, time.perf_counter() - started)
    if args.report:
        write_report(report, args.report)
    print_report(report)
    return report.exit_code
