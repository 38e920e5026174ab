"""Seconds and rows a second of several backends on one layer of a main shape, in one run, so that ratios can be read.

No judgement: a backend's speed means nothing until `lumotree-audit check` has passed it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console

from audit.cases import Case
from audit.environment import environment
from audit.families import SHAPES, units
from audit.render.progress import Progress
from audit.stage import Stage
from lumotree.backends.loader import load_backend
from lumotree.errors import InputError


@dataclass(frozen=True)
class Timing:
    """Median seconds of one layer's GDN: verify all rows, publish the longest path, and rows a second of each."""

    backend: str
    rows: int
    path: int
    verify_s: float
    publish_s: float


def time_backend(name: str, shape: str, device: str, repeat: int) -> Timing:
    """Time one backend on the first held-out unit of a shape; one thread, so that backends compare."""
    backend = load_backend(name)
    case = Case(units(SHAPES[shape], "heldout", 1, sets=1, instances=1)[0], backend.contract, device)
    stage = Stage(backend, case, ["gdn"])
    tree = case.trees[0]
    path = tree.path(max(tree.leaves, key=lambda row: int(tree.depth[row])))
    stage.verify()
    out, ops = stage.out[0]["gdn"], stage.operands("gdn", 0)
    verify = _median(lambda: stage.run_verify("gdn", 0, ops, case.batch, out), stage.reset, device, repeat)
    stage.reset()
    stage.verify()
    publish = _median(lambda: stage.publish([path]), stage.rewind, device, repeat)
    return Timing(name, len(tree.active_rows), len(path), verify, publish)


def _median(work: Callable[[], None], prepare: Callable[[], None], device: str, repeat: int) -> float:
    times = []
    for _ in range(repeat + 1):
        prepare()
        _finish(device)
        start = time.perf_counter()
        work()
        _finish(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _finish(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def run_bench(backends: Sequence[str], shape: str, device: str, repeat: int) -> int:
    """Time the backends and print one line each. Raises InputError for an unknown shape."""
    if shape not in SHAPES:
        raise InputError(f"--shape: expected one of {', '.join(SHAPES)}, got {shape!r}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Progress(len(backends), "bench") as progress:
            timings = []
            for name in backends:
                timings.append(time_backend(name, shape, device, repeat))
                progress.advance(note=name)
    finally:
        torch.set_num_threads(threads)
    _print(timings, shape, device, repeat)
    if torch.device(device).type == "cpu":
        _print_fuzz(backends)
    return 0


def _print_fuzz(backends: Sequence[str]) -> None:
    """Programs a second of `lumotree-audit fuzz`, which runs on a CPU."""
    from audit.fuzz import programs_per_second  # needs Hypothesis, which timing kernels does not

    out = Console(width=80, highlight=False)
    out.print("fuzz programs a second at the smallest shape (and a second of processor time)")
    for name in backends:
        if getattr(load_backend(name), "interpreted", False):
            out.print(f"{name:12}   not timed: it runs under an interpreter here")
            continue
        clock, cpu = programs_per_second(name)
        out.print(f"{name:12}{clock:11.0f} ({cpu:.0f})")


def _print(timings: Sequence[Timing], shape: str, device: str, repeat: int) -> None:
    out, facts, first = Console(width=80, highlight=False), environment(), timings[0]
    where = facts["gpu"] if torch.device(device).type == "cuda" else f"{facts['processor']}, one thread"
    out.print(f"GDN of one layer, {shape} {SHAPES[shape].tree}, {where}, torch {facts['torch']}")
    out.print(f"{'backend':12}{'verify ms':>11}{'rows/s':>9}{'x':>7}{'publish ms':>13}{'rows/s':>9}{'x':>7}")
    for t in timings:
        verify = f"{1e3 * t.verify_s:11.2f}{t.rows / t.verify_s:9.0f}{first.verify_s / t.verify_s:7.2f}"
        publish = f"{1e3 * t.publish_s:13.3f}{t.path / t.publish_s:9.0f}{first.publish_s / t.publish_s:7.2f}"
        out.print(f"{t.backend:12}{verify}{publish}")
    out.print(f"x: speed relative to {first.backend}; median of {repeat}; {first.rows} rows, path of {first.path}")
