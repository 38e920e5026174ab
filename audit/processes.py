"""What a run asks of its processes: one thread each, and how much memory they took."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
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


def pooled(
    work: Callable[..., R],
    jobs: Sequence[tuple[Any, ...]],
    workers: int,
    what: str,
    *,
    start: Callable[..., object] = torch.set_num_threads,
    args: tuple[Any, ...] = (1,),
    in_order: bool = False,
) -> Iterator[R]:
    """`work(*job)` of every job from worker processes, as they are done, or `in_order` of the jobs.

    start, args: what each worker does first. what: the work, in the message. Raises BackendError when a worker dies;
    then, or when the caller stops, jobs that have not begun are dropped.
    """
    # spawn: a forked child of a process that has used torch's thread pool can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=start, initargs=args) as pool:
        futures = [pool.submit(work, *job) for job in jobs]
        ended = False
        try:
            for future in futures if in_order else as_completed(futures):
                yield future.result()
            ended = True
        except BrokenProcessPool as died:
            raise BackendError(
                f"{what}: a worker process died (out of memory, or a crash in the kernel). "
                "Run in this process to see where: add --workers 0"
            ) from died
        finally:
            # What workers used is known once they have ended; a caller that stops early does not wait for them.
            pool.shutdown(wait=ended, cancel_futures=True)


def peak_mib(workers: int = 2) -> float:
    """Peak resident memory of this process and, `workers` times, of its largest worker, in MiB: at most this."""
    unit = 1024 if sys.platform != "darwin" else 1024 * 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return round((own + workers * children) / unit, 1)
