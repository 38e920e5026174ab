"""The command line: parses, calls, prints, exits. 0 PASS, 1 FAIL, 2 bad input, 3 INCONCLUSIVE, 70 our own bug."""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from audit import (
    __version__,
    bench_cli,
    clean_cli,
    continuation_cli,
    decode_cli,
    diagnose_cli,
    faults_cli,
    fuzz_cli,
    others_cli,
)
from audit.arguments import natural, positive

if TYPE_CHECKING:
    from audit.sampler import Options as SamplerOptions

EXIT_USAGE, EXIT_INTERNAL = 2, 70
OUR_BACKENDS = ("torch", "triton")
"""Backends whose unrestricted `check` runs every suite: the samplers are ours too."""


def parser() -> argparse.ArgumentParser:
    """The argument parser of `lumotree-audit`."""
    top = argparse.ArgumentParser(
        prog="lumotree-audit",
        description="Audit tree verifiers for hybrid language models: outputs and published state against a "
        "sequential reference, and the law of a sampler.",
        epilog="exit codes: 0 PASS, 1 FAIL, 2 bad input, 3 INCONCLUSIVE, 70 internal error",
    )
    top.add_argument("--version", action="version", version=f"lumotree-audit {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    calibrate = commands.add_parser("calibrate", help="draw the calibration set and freeze an envelope")
    _common(calibrate)
    calibrate.add_argument("--force", action="store_true", help="replace an existing envelope")
    check = commands.add_parser("check", help="judge a backend on the held-out set")
    _common(check)
    check.add_argument(
        "--suite",
        choices=("component", "sampler", "continuation", "all"),
        default=None,
        help="which suite to run (default: all for an unrestricted check of the backends torch and triton, whose "
        "selection rule is ours, else component; restricted is a check with --shape, --sets, --instances, --device, "
        "--only or --graph)",
    )
    check.add_argument("--only", action="append", default=[], metavar="CASE", help="run this case alone (repeatable)")
    check.add_argument("--graph", action="store_true", help="replay captured CUDA graphs (needs a GPU)")
    check.add_argument("--no-diagnosis", action="store_true", help="on a FAIL, do not look for the likely defect")
    _sampler_arguments(commands.add_parser("sample", help="judge the law of a sampler"))
    continuation_cli.register(commands)
    decode_cli.register(commands)
    faults_cli.register(commands)
    fuzz_cli.register(commands)
    clean_cli.register(commands)
    diagnose_cli.register(commands)
    others_cli.register(commands)
    bench_cli.register(commands)
    commands.add_parser("backends", help="list the backends that are known by name")
    commands.add_parser("samplers", help="list the samplers that are known by name")
    return top


def _sampler_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--sampler", default="multi-round", help="rule (multi-round, naive, greedy, traversal), other "
                     "known name, or module:object")  # fmt: skip
    sub.add_argument("--walks", type=positive, default=200_000, help="walks a step before the first look "
                     "(default 200,000)")  # fmt: skip
    sub.add_argument("--exact", type=natural, default=10_000, metavar="N", help="configurations on which the rules are "
                     "proved (default 10,000; 0 = none)")  # fmt: skip
    sub.add_argument("--seed", type=natural, default=1, help="seed of every draw (default 1)")
    sub.add_argument("--only", action="append", default=[], metavar="STEP", help="this captured-like step alone, "
                     "nothing else (repeatable)")  # fmt: skip
    sub.add_argument("--step", action="append", default=[], metavar="FILE", help="a step that you captured, .npz with "
                     "parents, tokens, target and more (repeatable; see audit/sampler_file.py)")  # fmt: skip
    sub.add_argument("--workers", type=natural, default=None, help="worker processes, 0 = this one")
    sub.add_argument("--report", default=None, metavar="DIR", help="write report.json, junit.xml, summary.md there")
    for name, default in (("--vocab", 151_936), ("--min-visits", 2_000)):  # for tests of the audit itself
        sub.add_argument(name, type=positive, default=default, help=argparse.SUPPRESS)


def _common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--backend", default="torch", help="built-in name, entry point, or module:object")
    sub.add_argument("--shape", default=None, help="main shape: 27B, tiny or micro (default: the backend's)")
    sub.add_argument("--device", default="cpu", help="torch device, for example cuda")
    sub.add_argument("--seed", type=natural, default=1, help="seed of every draw (default 1)")
    sub.add_argument("--sets", type=positive, default=None, help="operand sets (default: the shape's, 2)")
    sub.add_argument("--instances", type=positive, default=None, help="layer instances (default: the shape's, 48)")
    sub.add_argument("--envelope", default=None, metavar="FILE", help="envelope file (default: below envelopes/)")
    sub.add_argument("--workers", type=natural, default=None, help="worker processes, 0 = this one")
    sub.add_argument("--report", default=None, metavar="DIR", help="write report.json, junit.xml, summary.md there")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    # Imported late, so that --help and usage errors do not wait for torch.
    from lumotree.errors import InputError

    try:
        return _run(args, shlex.join(["lumotree-audit", *words]))
    except InputError as refusal:
        print(f"lumotree-audit: {refusal}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("lumotree-audit: interrupted", file=sys.stderr)
        return 130
    except SystemExit as left:  # its code would be taken for ours, 0 for a PASS
        print(f"lumotree-audit: something the run called left it with exit code {left.code}; there is no verdict",
              file=sys.stderr)  # fmt: skip
        return EXIT_USAGE
    except Exception as error:
        from audit.shortage import remedy, shortage

        if short := shortage(error):
            print(f"lumotree-audit: out of memory: {args.command} {short}; {remedy(vars(args))}", file=sys.stderr)
            return EXIT_USAGE
        traceback.print_exc()
        print("lumotree-audit: internal error; this is a bug of the audit, not of the backend", file=sys.stderr)
        return EXIT_INTERNAL


def _run(args: argparse.Namespace, command: str) -> int:
    if hasattr(args, "run"):  # a command that brings its own
        return int(args.run(args, command))
    if args.command == "backends":
        from audit.listing import backend_lines, print_lines

        print_lines(backend_lines(), "surface and claim")
        return 0
    if args.command == "samplers":
        from audit.listing import print_lines, sampler_lines

        print_lines(sampler_lines(), "takes")
        return 0
    if args.command == "sample":
        return _sample(_sampler_options(args, command), args.report)
    suites = _suites(args)
    codes = []
    if "component" in suites:
        codes.append(_audit(args, command))
    if "sampler" in suites:
        codes.append(_check_sampler(args, command, nested=len(suites) > 1))
    if "continuation" in suites:
        codes.append(continuation_cli.check(args, command, nested=len(suites) > 1))
    return _worst(codes)


def _suites(args: argparse.Namespace) -> tuple[str, ...]:
    """Which suites to run. `--only` names component cases and `--graph` replays component kernels: component alone."""
    if args.command == "calibrate":
        return ("component",)
    component_only = bool(args.only) or args.graph
    if component_only and args.suite not in (None, "component"):
        from lumotree.errors import InputError

        raise InputError(f"--suite {args.suite}: --only and --graph belong to the component suite; leave them out, or "
                         "use lumotree-audit sample --only STEP")  # fmt: skip
    if args.suite == "sampler" and args.backend not in OUR_BACKENDS:
        from lumotree.errors import InputError

        raise InputError(f"--suite sampler: it audits a selection rule and would not touch --backend {args.backend}; "
                         "name a sampler: lumotree-audit sample --sampler module:object")  # fmt: skip
    if args.suite in ("component", "sampler", "continuation"):
        return (args.suite,)
    restricted = component_only or args.device != "cpu" or any((args.shape, args.sets, args.instances))
    if args.suite is None and (restricted or args.backend not in OUR_BACKENDS):
        return ("component",)
    # Under Triton's interpreter a whole model would take hours.
    interpreted = args.backend == "triton" and args.device == "cpu"
    return ("component", "sampler") if interpreted else ("component", "sampler", "continuation")


def _worst(codes: Sequence[int]) -> int:
    """FAIL wins over INCONCLUSIVE, which wins over PASS."""
    return next((code for code in (1, 3) if code in codes), 0)


def _sampler_options(args: argparse.Namespace, command: str) -> SamplerOptions:
    from audit.sampler import Options

    return Options(
        sampler=args.sampler,
        seed=args.seed,
        walks=args.walks,
        exact=args.exact,
        only=tuple(args.only),
        steps=tuple(args.step),
        workers=args.workers,
        command=command,
        vocab=args.vocab,
        min_visits=args.min_visits,
    )


def _check_sampler(args: argparse.Namespace, command: str, nested: bool) -> int:
    """The sampler suite of `check`: our default rule. nested: its report goes into a folder of its own."""
    from audit.sampler import Options

    report = f"{args.report}/sampler" if args.report and nested else args.report
    return _sample(Options(seed=args.seed, workers=args.workers, command=command), report)


def _sample(options: SamplerOptions, report: str | None) -> int:
    from audit import sampler
    from audit.render import start_report, write_report
    from audit.render.terminal import print_report

    if report:
        start_report(report)
    run = sampler.check(options)
    if report:
        write_report(run.report, report, run.frame)
    print_report(run.report)
    return run.report.exit_code


def _audit(args: argparse.Namespace, command: str) -> int:
    from audit import suite
    from audit.render import start_report, write_report
    from audit.render.terminal import print_report

    options = suite.Options(
        backend=args.backend,
        shape=args.shape,
        device=args.device,
        seed=args.seed,
        sets=args.sets,
        instances=args.instances,
        workers=args.workers,
        only=tuple(getattr(args, "only", ())),
        graph=getattr(args, "graph", False),
        command=command,
        envelope=args.envelope,
        diagnose=args.command == "check" and not args.no_diagnosis,
    )
    suite.check_device(options.device)
    if args.report:
        start_report(args.report)
    run = suite.calibrate(options, args.force) if args.command == "calibrate" else suite.check(options)
    if args.report:
        write_report(run.report, args.report, run.frame)
    if args.command == "calibrate" and run.report.envelope is not None:
        print(f"envelope written: {run.report.envelope.path}")
    print_report(run.report)
    return run.report.exit_code


if __name__ == "__main__":
    sys.exit(main())
