"""`lumotree-audit bench`: arguments, kept apart so that `--help` does not wait for torch."""

from __future__ import annotations

import argparse
from typing import Any

from audit.arguments import natural, positive


def register(commands: Any) -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        help="time, memory and accuracy of backends and published policies in one table",
        description="Verify and publish of Gated DeltaNet for each backend: milliseconds, bytes, distance to the "
        "floor, and how many cells leave the bounds. No speed is printed for a backend whose audit did not run.",
    )
    bench.add_argument(
        "--shape", default=None, help="main shape: 27B, tiny or micro (default 27B; --replay on a CPU: tiny)"
    )
    bench.add_argument("--device", default="cpu", help="torch device (default cpu)")
    bench.add_argument("--backends", default=None, metavar="NAMES", help="comma-separated (default: what suits the "
                       "device, and the peers that are installed)")  # fmt: skip
    bench.add_argument(
        "--repeat", type=positive, default=None, help="timed repetitions; medians are printed (default 5; --replay: 20)"
    )
    bench.add_argument("--batch", type=positive, default=1, help="requests, each with a tree of its own (default 1)")
    bench.add_argument("--layers", type=positive, default=None, help="layers timed (default 48 on a GPU, fewer "
                       "for an eager backend that takes over a second for them; 1 on a CPU)")  # fmt: skip
    bench.add_argument("--units", type=positive, default=1, help="audited layer instances (default 1)")
    bench.add_argument("--seed", type=natural, default=1, help="seed of every draw (default 1)")
    bench.add_argument("--report", default=None, metavar="DIR", help="write bench.json, bench.md and bench.svg there")
    bench.add_argument("--replay", action="store_true", help="instead: when does replay pay against a bank of states "
                       "and deferred factors? Takes --device, --shape, --layers, --repeat and --report")  # fmt: skip
    bench.set_defaults(run=_run)


def _run(args: argparse.Namespace, command: str) -> int:
    from audit.bench import Options, run_bench
    from lumotree.errors import InputError

    if args.replay:
        from audit.bench_replay_run import run_replay

        if args.backends is not None or args.batch != 1:
            raise InputError(
                "--replay: expected neither --backends nor --batch, for it chooses its own; leave them out"
            )
        return run_replay(args.device, args.shape, args.layers, args.repeat or 20, args.report, command)
    names = None if args.backends is None else tuple(args.backends.split(","))
    options = Options(
        names, args.shape or "27B", args.device, args.repeat or 5, args.batch, args.layers, args.units, args.seed,
        args.report, command,
    )  # fmt: skip
    return run_bench(options)
