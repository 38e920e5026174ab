"""The benchmark of the fuzz audit: programs a second at the smallest shape, of one process and of a team of workers.

python -m audit.bench_fuzz --backend torch --workers 2

By the clock, and by the processor time that the programs took, which does not see other processes. The issue asks for
30 a second on 2 cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import count, takewhile

from audit.arguments import natural
from audit.fuzz_hunt import Hunt, chunk, start_hunting
from audit.fuzz_machine import Ledger
from audit.processes import one_thread, team
from audit.runner import default_workers
from audit.world import DIMS_NANO

#: Programs of a chunk, as in a run.
PROGRAMS = 50


def programs_per_second(spec: str, seconds: float, workers: int = 0) -> tuple[float, float]:
    """Programs a second, and a second of processor time, at the smallest shape; workers have started before."""
    with one_thread(), team(workers, "benchmark", start_hunting, (None,)) as others:
        for _ in others.each(chunk, [(spec, DIMS_NANO, 0, 1)] * max(workers, 1)):
            pass
        total, started = Hunt(Ledger(), 0.0, 0.0), time.perf_counter()
        jobs = ((spec, DIMS_NANO, number, PROGRAMS) for number in count(1))
        for part in others.each(chunk, takewhile(lambda _: time.perf_counter() - started < seconds, jobs)):
            total = total.with_chunk(part, time.perf_counter() - started)
    return total.rate


def main(words: Sequence[str] | None = None) -> None:
    """Print both."""
    parser = argparse.ArgumentParser(prog="python -m audit.bench_fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--workers", type=natural, default=default_workers("cpu"))
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args(words)
    for workers in dict.fromkeys([0, options.workers]):
        clock, cpu = programs_per_second(options.backend, options.seconds, workers)
        who = "one process" if workers == 0 else f"{workers} workers"
        print(f"{who}: {clock:.1f} programs a second, {cpu:.1f} a second of processor time")


if __name__ == "__main__":
    main()
