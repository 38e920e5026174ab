"""What a run asks of its processes: one thread each, and how much memory they took."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lumotree.errors import BackendError

R = TypeVar("R")


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: a kernel that splits work over threads must not make bits depend on the machine, and for small
    tensors a second thread costs more than it does. The number is put back at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def start_worker(*_: object) -> None:
    """What a worker process does first: one thread; Ctrl-C is its parent's affair; it does not outlive its parent."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


@contextmanager
def worker_processes(
    count: int, what: str, start: Callable[..., object] = start_worker, args: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """A pool of `count` processes.

    start, args: what each does first. what: their work, in the message. Raises BackendError when one dies. They have
    ended behind the block (what they used is then known): once their jobs are done or, if the block is left by an
    exception (Ctrl-C, or a caller that stops), at once.
    """
    # spawn: a forked child of a process that has used torch's thread pool can hang.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(count, mp_context=context, initializer=start, initargs=args) as pool:
        try:
            yield pool
        except BaseException as cause:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
            if isinstance(cause, BrokenProcessPool):
                raise BackendError(
                    f"{what}: a worker process died (out of memory, or a crash in the kernel). "
                    "Run in this process to see where: add --workers 0"
                ) from cause
            raise


def pooled(
    work: Callable[..., R],
    jobs: Sequence[tuple[Any, ...]],
    workers: int,
    what: str,
    *,
    start: Callable[..., object] = start_worker,
    args: tuple[Any, ...] = (),
    in_order: bool = False,
) -> Iterator[R]:
    """`work(*job)` of every job from worker processes, as they are done, or `in_order` of the jobs.

    See `worker_processes` for the other arguments, errors, and what happens when the caller stops.
    """
    with worker_processes(workers, what, start, args) as pool:
        futures = [pool.submit(work, *job) for job in jobs]
        for future in futures if in_order else as_completed(futures):
            yield future.result()


@dataclass(frozen=True)
class Team:
    """Does jobs in turn: in worker processes or, without any, in this one."""

    workers: int = 0
    pool: ProcessPoolExecutor | None = None

    def each(self, work: Callable[..., R], jobs: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """`work(*job)` of each job, in their order.

        A job is taken from `jobs` when there is a process for it, so they may be without end, or end when time is up.
        """
        if self.pool is None:
            yield from (work(*job) for job in jobs)
            return
        waiting: deque[Future[R]] = deque()
        for job in jobs:
            waiting.append(self.pool.submit(work, *job))
            while len(busy := [future for future in waiting if not future.done()]) >= self.workers:
                wait(busy, return_when=FIRST_COMPLETED)
            while waiting and waiting[0].done():
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)


@contextmanager
def team(
    workers: int, what: str, start: Callable[..., object] = start_worker, args: tuple[Any, ...] = ()
) -> Iterator[Team]:
    """A team of so many processes, 0 = this one; see `worker_processes`."""
    if workers == 0:
        yield Team()
        return
    with worker_processes(workers, what, start, args) as pool:
        yield Team(workers, pool)


def peak_mib(workers: int = 2) -> float:
    """Peak resident memory of this process and, `workers` times, of its largest worker, in MiB: at most this."""
    unit = 1024 if sys.platform != "darwin" else 1024 * 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return round((own + workers * children) / unit, 1)
