"""Runs many cases: in this process, or over worker processes that each load the backend once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from audit.capture import captured
from audit.cases import CaseSpec
from audit.component import CaseResult, audit_case
from audit.processes import one_thread
from audit.render.progress import Progress
from lumotree.backends.loader import load_backend
from lumotree.errors import BackendError

_worker_backend: Any = None


def default_workers(device: str) -> int:
    """One process a core on a CPU, up to four; none on a GPU, where one process fills the card."""
    if torch.device(device).type != "cpu":
        return 0
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 4)


def _start(backend: str, threads: int) -> None:
    global _worker_backend
    torch.set_num_threads(threads)
    _worker_backend = load_backend(backend)


def _work(spec: CaseSpec, arm: str) -> CaseResult:
    return audit_case(_worker_backend, spec, "cpu", arm=arm)


def run_cases(
    backend: str,
    specs: Sequence[CaseSpec],
    *,
    device: str = "cpu",
    arm: str = "verify",
    workers: int | None = None,
    graph: bool = False,
    label: str = "cases",
) -> list[CaseResult]:
    """Audit every case and return the results in the order of `specs`.

    backend: as `load_backend` takes it. arm: see `audit_case`. workers: processes, 0 = this one; each uses one thread,
    so that the bits of a kernel that splits work over threads do not depend on the machine. graph: see
    `audit.capture`. Raises InputError when the backend refuses a case, BackendError when a worker dies.
    """
    count = default_workers(device) if workers is None else workers
    with Progress(len(specs), label) as progress:
        results: dict[str, CaseResult] = {}
        inline = count == 0 or len(specs) == 1 or graph
        source = _inline(backend, specs, device, arm, graph) if inline else _pooled(backend, specs, arm, count)
        for result in source:
            results[result.spec.id] = result
            progress.advance(note=result.spec.id)
    return [results[s.id] for s in specs]


def _inline(backend: str, specs: Sequence[CaseSpec], device: str, arm: str, graph: bool) -> Iterator[CaseResult]:
    loaded = load_backend(backend)
    if graph:
        loaded = captured(loaded)
    with one_thread():
        for spec in specs:
            yield audit_case(loaded, spec, device, arm=arm)


def _pooled(backend: str, specs: Sequence[CaseSpec], arm: str, workers: int) -> Iterator[CaseResult]:
    # spawn: a forked child of a process that has used torch's thread pool can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(backend, 1)) as pool:
        # Units are alike; the small cases are not, and a long one at the end would leave the other workers idle.
        futures = [pool.submit(_work, spec, arm) for spec in sorted(specs, key=lambda s: s.unit)]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as died:
            raise BackendError(
                f"backend {backend!r}: a worker process died (out of memory, or a crash in the kernel). "
                "Run one case in this process to see where: add --workers 0"
            ) from died
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
